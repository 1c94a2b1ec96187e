"""HybridActor: keys of any nesting, batch shapes, nodes and agents, exploration types, compiled and captured."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import HybridTarget
from torchrl_perf.modules import EnsembleHybridQ, FusedMLP, HybridActor, HybridDistribution, hybrid_features
from torchrl_perf.runtime import no_host_sync

OBS = 3


def make_spec(*shape, keys=(("action", "kind"), ("action", "push"), "shift"), device="cpu"):
    low, high = torch.tensor([-1.0, 0.0], device=device), torch.tensor([1.0, 0.5], device=device)
    spec = Composite(shape=shape[:1], device=device)
    spec[keys[0]] = Categorical(4, shape=shape, device=device)
    spec[keys[1]] = Bounded(low.expand(*shape, 2), high.expand(*shape, 2), device=device)
    spec[keys[2]] = Unbounded(shape=(*shape, 1), device=device)
    return spec


def make_actor(spec, device="cpu", **options):
    torch.manual_seed(1)
    return HybridActor(nn.Linear(OBS, hybrid_features(spec), device=device), spec=spec, **options)


def act(actor, td, kind=ExplorationType.RANDOM):
    with set_exploration_type(kind), torch.no_grad():
        return actor(td.copy())


@pytest.mark.parametrize(
    "keys", [("a", "b", "c"), (("x", "a"), ("x", "b"), ("x", "c")), (("p", "q", "a"), "b", ("r", "c"))]
)
def test_keys_of_any_nesting(keys):
    actor = make_actor(make_spec(5, keys=keys))
    out = act(actor, TensorDict({"observation": torch.randn(5, OBS)}, [5]))
    assert [set(actor.dist_sample_keys)] == [set(keys)]
    assert set(actor.out_keys) <= set(out.keys(True))
    assert [tuple(out[key].shape) for key in keys] == [(5,), (5, 2), (5, 1)]
    parts = sum(out[key] for key in actor.log_prob_keys)
    torch.testing.assert_close(out["action_log_prob"], parts)
    torch.testing.assert_close(actor.get_dist(out).joint_log_prob(out), out["action_log_prob"])
    again = actor.build_dist_from_params(out)
    assert isinstance(again, HybridDistribution)
    torch.testing.assert_close(again.joint_log_prob(out), out["action_log_prob"])


@pytest.mark.parametrize("batch", [(), (7,), (2, 3)])
def test_any_batch_shape_equals_rows_one_by_one(batch):
    actor = make_actor(make_spec())
    td = TensorDict({"observation": torch.randn(*batch, OBS)}, batch)
    out = act(actor, td, ExplorationType.DETERMINISTIC)
    assert out["action_log_prob"].shape == batch
    for row, given in zip(out.reshape(-1), td.reshape(-1), strict=True):
        alone = act(actor, given, ExplorationType.DETERMINISTIC)
        for key in (*actor.dist_sample_keys, "action_log_prob"):
            torch.testing.assert_close(row[key], alone[key], rtol=1e-5, atol=1e-5)


def test_actions_keep_their_bounds_and_draws_differ():
    actor = make_actor(make_spec())
    out = act(actor, TensorDict({"observation": 5 * torch.randn(2_000, OBS)}, [2_000]))
    push = out["action", "push"]
    assert (push >= torch.tensor([-1.0, 0.0])).all() and (push <= torch.tensor([1.0, 0.5])).all()
    assert push[:, 0].min() < -0.9 and push[:, 0].max() > 0.9
    assert not torch.equal(push, act(actor, TensorDict({"observation": out["observation"]}, [2_000]))["action", "push"])


def test_deterministic_is_the_mode_and_the_squashed_mean():
    actor = make_actor(make_spec())
    out = act(actor, TensorDict({"observation": torch.randn(6, OBS)}, [6]), ExplorationType.DETERMINISTIC)
    params = out["params"]
    assert torch.equal(out["action", "kind"], params["action", "kind", "logits"].argmax(-1))
    loc, low, high = (params["action", "push", name] for name in ("loc", "low", "high"))
    torch.testing.assert_close(out["action", "push"], (high + low) / 2 + (high - low) / 2 * loc.tanh())
    assert torch.equal(out["shift"], params["shift", "loc"])


def test_masks():
    actor = make_actor(make_spec(), mask_key="allowed")
    assert "allowed" in actor.in_keys
    mask = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]]).bool().repeat(200, 1)
    td = TensorDict({"observation": torch.randn(600, OBS), "allowed": mask}, [600])
    kind = act(actor, td)["action", "kind"].view(200, 3)
    assert (kind[:, 0] == 2).all() and (kind[:, 2] == 0).all()
    assert set(kind[:, 1].tolist()) == {1, 3}
    assert act(actor, td)["action_log_prob"].isfinite().all()


def test_nodes_joint_and_as_agents():
    spec = make_spec(4, 3)
    td = TensorDict({"observation": torch.randn(4, 3, OBS), "exists": torch.rand(4, 3) < 0.5}, [4])
    joint = make_actor(spec, valid_key="exists")
    agents = make_actor(spec, valid_key="exists", joint=False)
    a, b = (act(actor, td, ExplorationType.DETERMINISTIC) for actor in (joint, agents))
    assert b["action_log_prob"].shape == (4, 3)
    assert (b["action_log_prob"][~td["exists"]] == 0).all()
    torch.testing.assert_close(a["action_log_prob"], b["action_log_prob"].sum(-1))
    assert (a["action", "kind"][~td["exists"]] == 0).all()
    middle = torch.tensor([0.0, 0.25])
    torch.testing.assert_close(a["action", "push"][~td["exists"]], middle.expand((~td["exists"]).sum(), 2))


class NodesAndWhole(nn.Module):
    """Logits for each node, and one normal for the whole row."""

    def __init__(self):
        super().__init__()
        self.nodes, self.whole = nn.Linear(OBS, 2), nn.Linear(OBS, 8)

    def forward(self, x):
        return self.nodes(x), self.whole(x.mean(-2))


def test_flags_with_a_trailing_dim_and_flags_that_fit_no_part():
    actor = make_actor(make_spec(4, 5), valid_key="exists")
    exists = torch.rand(4, 5) < 0.5
    td = TensorDict({"observation": torch.randn(4, 5, OBS), "exists": exists}, [4])
    plain = act(actor, td, ExplorationType.DETERMINISTIC)
    assert (plain["action", "kind_log_prob"][~exists] == 0).all()
    trailing = act(actor, td.set("exists", exists.unsqueeze(-1)), ExplorationType.DETERMINISTIC)
    for key in actor.dist_sample_keys:
        assert torch.equal(trailing[key], plain[key])
    with pytest.raises(ValueError, match=r"'exists': expected the shape of the nodes of a part.*received \[4\]"):
        act(actor, td.set("exists", exists[:, 0]))


def test_parts_of_different_nodes():
    """A choice for each node and one continuous action for all: the joint log-probability is the sum of both."""
    spec = Composite(
        action=Composite(
            each=Categorical(2, shape=[4, 5]), whole=Bounded(-torch.ones(4, 4), torch.ones(4, 4)), shape=[4]
        ),
        shape=[4],
    )
    actor = HybridActor(NodesAndWhole(), spec=spec, valid_key="exists")
    exists = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]]).bool()
    out = act(actor, TensorDict({"observation": torch.randn(4, 5, OBS), "exists": exists}, [4]))
    each, whole = out["action", "each_log_prob"], out["action", "whole_log_prob"]
    assert each.shape == (4, 5) and whole.shape == (4,)
    assert (each[~exists] == 0).all()
    torch.testing.assert_close(out["action_log_prob"], each.sum(-1) + whole)
    torch.testing.assert_close(
        actor.get_dist(out).joint_entropy()[2], actor.get_dist(out).dists["action", "whole"].entropy()[2]
    )


def test_variants_agree(variant):
    """Parameters, log-probabilities and deterministic actions are the eager ones; draws have their distribution.

    The draws themselves need not be: a compiler may draw the parts in another order.
    """
    states, count = 4, 4_000
    # with large scales actions lie at the bounds, where their log-probability is that of the nearest one inside
    options = {"mask_key": "allowed", "log_scale_range": (-3.0, 0.0)}
    actor = make_actor(make_spec(device=variant.device), variant.device, **options)
    allowed = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    td = TensorDict({"observation": torch.randn(states, OBS), "allowed": allowed}, [states]).to(variant.device)
    td = td.repeat_interleave(count, dim=0)
    run = variant(lambda td: (act(actor, td), act(actor, td, ExplorationType.DETERMINISTIC)))
    for _ in range(4):  # the last one is a replay
        draws = [part.clone() for part in run(td)]
    random, fixed = draws
    expected = act(actor, td, ExplorationType.DETERMINISTIC)
    for key in expected.keys(True, True):
        torch.testing.assert_close(fixed[key], expected[key], rtol=1e-5, atol=1e-5, msg=str(key))
    dist = actor.get_dist(td)
    torch.testing.assert_close(random["action_log_prob"], dist.joint_log_prob(random), rtol=1e-4, atol=1e-4)
    assert not torch.equal(run(td)[0]["action", "push"], random["action", "push"])

    probs = dist.dists["action", "kind"].probs.view(states, count, 4)[:, 0]
    shares = torch.nn.functional.one_hot(random["action", "kind"], 4).view(states, count, 4).float().mean(1)
    assert ((shares - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt() + 1e-6).all()
    for key in (("action", "push"), "shift"):
        below = (random[key] < fixed[key]).view(states, count, -1).float().mean(1)  # the median is deterministic
        assert ((below - 0.5).abs() < 5 * 0.5 / count**0.5).all()
    surprise = (random["action_log_prob"] + dist.joint_entropy()).view(states, count)
    assert (surprise.mean(1).abs() < 5 * surprise.std(1) / count**0.5).all()


def test_no_host_read(device):
    actor = make_actor(make_spec(device=device), device, mask_key="allowed")
    td = TensorDict({"observation": torch.randn(8, OBS), "allowed": torch.rand(8, 4) < 0.7}, [8]).to(device)
    with no_host_sync(device):
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
            act(actor, td, kind)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_collects(mode, fresh_dynamo):
    env = HybridTarget(6)
    actor = HybridActor(FusedMLP(2, hybrid_features(env.full_action_spec)), spec=env.full_action_spec)
    collector = DeviceCollector(
        env, actor, frames_per_batch=60, total_frames=-1, mode=mode, exclude_keys=actor.param_keys
    )
    batch = collector.collect()
    assert batch.shape == (6, 10)
    assert "params" not in batch.keys()
    torch.testing.assert_close(
        actor.get_dist(batch).joint_log_prob(batch), batch["action_log_prob"], rtol=1e-4, atol=1e-4
    )


def test_state_dict_holds_the_bounds():
    actor = make_actor(make_spec())
    held = [name for name in actor.state_dict() if name.endswith((".low", ".high"))]
    assert len(held) == 2
    assert torch.equal(actor.state_dict()[held[0]], torch.tensor([-1.0, 0.0]))
    assert actor.double().get_dist(TensorDict({"observation": torch.randn(2, OBS).double()}, [2])).batch_shape == (2,)


def test_an_extreme_location_still_tells_where_it_was():
    """Log-probabilities from the action alone stay those of the draw, for a small scale near a bound."""
    spec = Bounded(-torch.ones(1), torch.ones(1))
    actor = HybridActor(nn.Identity(), spec=spec)
    td = TensorDict({"observation": torch.tensor([[100.0, -100.0]]).expand(1_000, 2)}, [1_000])
    out = act(actor, td)
    noise = (out["action_log_prob"] - out["action_log_prob"].mean()).abs()
    assert noise.max() < 20  # five and a half standard deviations of the normal itself


def test_ensemble_of_values_of_all_choices():
    net = EnsembleHybridQ(3, 4, 5, hidden_sizes=(8,))
    values = net(torch.randn(6, 2), torch.randn(6, 2))
    assert values.shape == (6, 3, 5)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (OneHot(3), {}, r"received OneHot of .* at 'action'. Remedy: index actions"),
        (Bounded(0, 3, shape=(2,), dtype=torch.int64), {}, "received Bounded"),
        (Composite(), {}, "at least one part, received none"),
        (
            Composite(a=Bounded(-torch.ones(2, 1), torch.tensor([[1.0], [2.0]]))),
            {},
            r"(?s)same bounds for all rows and nodes of 'a'.*Remedy",
        ),
        (Composite(a=Bounded(torch.zeros(2), torch.tensor([1.0, torch.inf]))), {}, "finite bounds"),
        (Composite(a=Categorical(2), b=Categorical(3)), {"mask_key": "m"}, r"mapping from parts to keys.*\['a', 'b'\]"),
        (Composite(a=Categorical(2), b=Unbounded(1)), {"mask_key": {"b": "m"}}, r"discrete parts \['a'\].*\['b'\]"),
    ],
)
def test_bad_specs(spec, options, message):
    with pytest.raises(ValueError, match=message):
        HybridActor(nn.Identity(), spec=spec, **options)
