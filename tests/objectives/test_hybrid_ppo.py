"""The PPO losses with actions of several parts: against TorchRL's, hand numbers, nodes, the host-wait audit, a task."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import HybridTarget
from torchrl_perf.modules import DeviceActor, FusedMLP, GumbelCategorical, HybridActor, hybrid_features
from torchrl_perf.objectives import DeviceClipPPOLoss, DeviceKLPENPPOLoss
from torchrl_perf.runtime import no_host_sync
from torchrl_perf.transforms import GAETransform

ROWS, OBS = 24, 3
F64 = torch.float64
EXTRA = {"ESS", "max_ratio", "mean_ratio", "explained_variance", "composite_entropy", "beta"}


def make_spec(bounded=True):
    push = Bounded(-torch.ones(2), torch.ones(2)) if bounded else Unbounded(2)
    return Composite(action=Composite(kind=Categorical(4), push=push))


def make_modules(spec=None, **options):
    torch.manual_seed(2)
    spec = make_spec() if spec is None else spec
    actor = HybridActor(nn.Linear(OBS, hybrid_features(spec)), spec=spec, **options)
    return actor.double(), ValueOperator(nn.Linear(OBS, 1), in_keys=["observation"]).double()


def make_batch(actor, critic, *, noise=0.3, extra=(), rows=ROWS):
    td = TensorDict({"observation": torch.randn(rows, OBS, dtype=F64), **dict(extra)}, [rows])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        critic(actor(td))
    total = 0.0
    for key in actor.log_prob_keys:
        td[key] = td[key] + noise * torch.randn_like(td[key])
        total = total + td[key]
    td["action_log_prob"] = total
    td["state_value"] = td["state_value"] + noise * torch.randn(rows, 1, dtype=F64)
    td["advantage"] = torch.randn(rows, 1, dtype=F64) * 2 + 1
    td["value_target"] = torch.randn(rows, 1, dtype=F64)
    return td


def of_the_sum(loss):
    """The loss reads the joint log-probability; by itself it takes the parts' from the actor, as TorchRL's do."""
    loss.set_keys(sample_log_prob="action_log_prob")
    return loss


def outcome(loss, batch):
    out = loss(batch.clone())
    loss.zero_grad()
    sum(value for key, value in out.items() if key.startswith("loss_")).backward()
    return out.detach(), [p.grad.clone() for p in loss.parameters() if p.grad is not None]


def assert_same(one, other):
    (ours, our_grads), (theirs, their_grads) = one, other
    assert set(theirs.keys()) - EXTRA <= set(ours.keys())
    for key in set(ours.keys()) & set(theirs.keys()):
        torch.testing.assert_close(ours[key], theirs[key].mean(), rtol=1e-10, atol=1e-12, msg=key)
    assert len(our_grads) == len(their_grads) > 0
    for a, b in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    "coeff", [0.03, {("action", "kind_entropy"): 0.1, ("action", "push_entropy"): 0.02}], ids=["number", "mapping"]
)
def test_clip_values_and_gradients_are_torchrls(bounded, coeff):
    actor, critic = make_modules(make_spec(bounded))
    batch = make_batch(actor, critic)
    options = {"clip_value": 0.2, "normalize_advantage": True, "entropy_coeff": coeff}
    ours = DeviceClipPPOLoss(actor, critic, **options)
    theirs = ClipPPOLoss(actor, critic, **options)
    assert ours.tensor_keys.sample_log_prob == theirs.tensor_keys.sample_log_prob == actor.log_prob_keys
    assert_same(outcome(ours, batch), outcome(theirs, batch))
    assert_same(outcome(of_the_sum(ours), batch), outcome(theirs, batch))


@pytest.mark.parametrize("bounded", [False, True])
def test_kl_penalty_values_and_gradients_are_torchrls(bounded):
    actor, critic = make_modules(make_spec(bounded))
    batch = make_batch(actor, critic)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    results = []
    for cls in (DeviceKLPENPPOLoss, KLPENPPOLoss):
        loss = cls(actor, critic, beta=0.7, dtarg=1e9, decrement=1.0)  # a weight that stays
        results.append(outcome(loss, batch))
    assert_same(*results)
    kl = torch.distributions.kl_divergence(actor.build_dist_from_params(batch), actor.get_dist(batch))
    assert results[0][0]["kl"].item() == pytest.approx(kl.mean().item())
    assert kl.mean() > 0.001


@pytest.mark.parametrize(("dtarg", "factor"), [(1e-6, 2.0), (1e6, 0.5), (None, 1.0)])
def test_weight_of_the_kl_penalty_adapts_on_the_device(dtarg, factor):
    actor, critic = make_modules()
    batch = make_batch(actor, critic)
    with torch.no_grad():
        actor.head.network.weight.add_(0.1)
    kl = torch.distributions.kl_divergence(actor.build_dist_from_params(batch), actor.get_dist(batch)).mean().item()
    loss = DeviceKLPENPPOLoss(actor, critic, beta=3.0, dtarg=kl if dtarg is None else dtarg)
    still = DeviceKLPENPPOLoss(actor, critic, beta=3.0, dtarg=kl)
    (out, grads), (same, same_grads) = outcome(loss, batch), outcome(still, batch)
    assert loss.beta.item() == 3.0 * factor
    assert out["beta"].item() == 3.0
    for key in same.keys():
        torch.testing.assert_close(out[key], same[key])
    for one, other in zip(grads, same_grads, strict=True):  # of the weight that was used
        torch.testing.assert_close(one, other)
    loss.reset()
    assert loss.beta.item() == 3.0


def test_hybrid_ratio():
    """Log-probabilities .1 and .05 above the stored ones: each ratio is exp(.15) = 1.161834."""
    actor, critic = make_modules(make_spec(bounded=False))
    batch = make_batch(actor, critic, noise=0.0)
    batch["action", "kind_log_prob"] -= 0.05
    batch["action", "push_log_prob"] -= 0.1
    batch["action_log_prob"] -= 0.15
    batch["advantage"] = torch.ones(ROWS, 1, dtype=F64)
    assert math.exp(0.15) == pytest.approx(1.161834, abs=1e-6)
    for loss in (
        DeviceClipPPOLoss(actor, critic, clip_epsilon=0.2),
        of_the_sum(DeviceClipPPOLoss(actor, critic, clip_epsilon=0.2)),
        ClipPPOLoss(actor, critic, clip_epsilon=0.2),
    ):
        assert loss(batch.clone())["loss_objective"].item() == pytest.approx(-1.161834, abs=1e-6)
    batch["advantage"] = torch.arange(ROWS, dtype=F64).unsqueeze(-1)
    out = DeviceClipPPOLoss(actor, critic, clip_epsilon=0.1)(batch.clone())
    assert out["loss_objective"].item() == pytest.approx(-1.1 * (ROWS - 1) / 2)
    assert out["clip_fraction"] == 1.0


def test_torchrls_composite_actor():
    class Params(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.split = nn.Linear(OBS, 8), NormalParamExtractor()

        def forward(self, x):
            features = self.net(x)
            return features[..., :4], *self.split(features[..., 4:])

    keys = [("params", "kind", "logits"), ("params", "push", "loc"), ("params", "push", "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(Params(), ["observation"], keys),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"kind": GumbelCategorical, "push": IndependentNormal}},
        return_log_prob=True,
    ).double()
    critic = ValueOperator(nn.Linear(OBS, 1), in_keys=["observation"]).double()
    batch = make_batch(actor, critic)
    results = [outcome(cls(actor, critic), batch) for cls in (DeviceClipPPOLoss, ClipPPOLoss)]
    assert_same(*results)


def test_one_part_is_the_plain_loss():
    hybrid, critic = make_modules(Categorical(4))
    plain = DeviceActor(hybrid.head.network, distribution_class=GumbelCategorical, param_keys=["logits"])
    batch = make_batch(hybrid, critic)
    one, other = (outcome(DeviceClipPPOLoss(actor, critic), batch) for actor in (hybrid, plain))
    assert_same(one, other)


@pytest.mark.parametrize("normalize", [False, True])
def test_nodes_are_added_up_as_torchrl_does(normalize):
    spec = Composite(action=Composite(kind=Categorical(4, shape=[5]), push=Unbounded([5, 2])))
    actor, critic = make_modules(spec)
    critic.module = nn.Sequential(nn.Flatten(-2), nn.Linear(5 * OBS, 1)).double()
    batch = make_batch(actor, critic, noise=0.1, extra={"observation": torch.randn(ROWS, 5, OBS, dtype=F64)})
    results = [
        outcome(cls(actor, critic, normalize_advantage=normalize), batch) for cls in (DeviceClipPPOLoss, ClipPPOLoss)
    ]
    assert_same(*results)


def test_masked_nodes_contribute_nothing():
    spec = Composite(action=Composite(kind=Categorical(4, shape=[5]), push=Unbounded([5, 2])))
    actor, critic = make_modules(spec, valid_key="exists")
    critic.module = nn.Sequential(nn.Flatten(-2), nn.Linear(5 * OBS, 1)).double()
    exists = torch.rand(ROWS, 5) < 0.5
    extra = {"observation": torch.randn(ROWS, 5, OBS, dtype=F64), "exists": exists}
    batch = make_batch(actor, critic, extra=extra)
    # the stored ones were disturbed by the helper, those of missing nodes too
    other = batch.clone()
    other["action", "push"] = other["action", "push"].masked_fill(~exists.unsqueeze(-1), torch.nan)
    other["action", "kind"] = other["action", "kind"].masked_fill(~exists, 3)
    critic.module = nn.Sequential(nn.Flatten(-2), nn.Linear(5 * OBS, 1)).double()
    loss = DeviceClipPPOLoss(actor, critic)
    out, other_out = loss(batch), loss(other)
    for key in out.keys():
        torch.testing.assert_close(out[key], other_out[key], msg=key)
    expected = sum(part.entropy().sum(-1) for part in actor.get_dist(batch).dists.values()).mean()
    torch.testing.assert_close(out["entropy"], expected.detach())


@pytest.mark.parametrize("cls", [DeviceClipPPOLoss, DeviceKLPENPPOLoss])
@pytest.mark.parametrize("functional", [False, True])
def test_no_host_read_forward_and_backward(cls, functional):
    actor, critic = make_modules()
    loss = cls(actor, critic, clip_value=0.2, normalize_advantage=True, functional=functional)
    batch = make_batch(actor, critic)
    with no_host_sync():
        out = loss(batch)
        (out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]).backward()


@pytest.mark.parametrize("cls", [DeviceClipPPOLoss, DeviceKLPENPPOLoss])
@pytest.mark.slow_compiled
def test_variants_agree(cls, variant):
    actor, critic = make_modules()
    batch = make_batch(actor, critic).to(variant.device)
    options = {"closed_form_kl": True} if cls is DeviceClipPPOLoss else {"dtarg": 1e9, "decrement": 1.0}
    loss = cls(actor.to(variant.device), critic.to(variant.device), functional=False, **options)
    expected = loss(batch.clone()).detach()
    run = variant(lambda td: dict(loss(td).items()))
    with torch.no_grad():
        for _ in range(4):  # the last one is a replay
            got = run(batch)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-8, msg=key)


def test_closed_form_kl_is_reported():
    actor, critic = make_modules()
    batch = make_batch(actor, critic, noise=0.0)
    loss = DeviceClipPPOLoss(actor, critic, closed_form_kl=True)
    assert loss(batch)["kl"].item() == pytest.approx(0.0, abs=1e-12)
    with torch.no_grad():
        actor.head.network.bias.add_(0.2)
    loss = DeviceClipPPOLoss(actor, critic, closed_form_kl=True)
    old, new = actor.build_dist_from_params(batch), actor.get_dist(batch)
    assert loss(batch)["kl"].item() == pytest.approx(old.joint_kl(new).mean().item())
    with pytest.raises(KeyError, match=r"the old policy.*parameters.*Remedy: keep what the actor writes"):
        loss(batch.exclude("params"))


def test_a_ratio_beyond_all_numbers_is_not_nan():
    actor, critic = make_modules()
    batch = make_batch(actor, critic)
    batch["action", "kind_log_prob"][:2] -= 5_000.0
    batch["advantage"] = batch["advantage"].abs()
    loss = DeviceClipPPOLoss(actor, critic)
    out, grads = outcome(loss, batch)
    assert all(value.isfinite() for value in out.values())
    assert all(grad.isfinite().all() for grad in grads)


def test_errors_name_the_remedy():
    actor, critic = make_modules()
    batch = make_batch(actor, critic)
    loss = DeviceClipPPOLoss(actor, critic, entropy_coeff={("action", "kind_entropy"): 0.1})
    with pytest.raises(KeyError, match=r"entropy_coeff: expected a weight for each of .*push_entropy.*Remedy: add"):
        loss(batch)
    with pytest.raises(KeyError, match=r"Expected .*action_log_prob.*Remedy"):
        of_the_sum(DeviceClipPPOLoss(actor, critic))(batch.exclude("action_log_prob"))
    with pytest.raises(ValueError, match=r"advantage: expected \[24, 1\].*received \[24\].*Remedy"):
        DeviceClipPPOLoss(actor, critic)(batch.set("advantage", torch.randn(ROWS, dtype=F64)))
    with pytest.raises(ValueError, match=r"received .*Remedy: torchrl's KLPENPPOLoss"):
        DeviceKLPENPPOLoss(actor, critic, delay_actor=True)


@pytest.mark.slow
def test_learns_to_choose_and_to_measure():
    """A policy that only ever moves along one axis gets about -4.5, one that does not move -8; the best is -0.79."""
    torch.manual_seed(0)
    env = HybridTarget(64)
    spec = env.full_action_spec
    actor = HybridActor(FusedMLP(2, hybrid_features(spec), output_gain=0.01), spec=spec)
    critic = ValueOperator(FusedMLP(2, 1), in_keys=["observation"])
    collector = DeviceCollector(env, actor, frames_per_batch=1024, total_frames=-1, mode="eager")
    gae = GAETransform(gamma=0.8, lmbda=0.9, value_network=critic)
    loss = DeviceClipPPOLoss(actor, critic, entropy_coeff=0.03, normalize_advantage=True, functional=False)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    for iteration in range(60):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - iteration / 60)
        with torch.no_grad():
            rows = gae(collector.collect()).reshape(-1)
        for _ in range(5):
            for minibatch in rows[torch.randperm(1024)].split(256):
                out = loss(minibatch)
                optimizer.zero_grad()
                sum(value for key, value in out.items() if key.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
    env = HybridTarget(512)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        batch = env.rollout(8, actor, break_when_any_done=False)
    gap = batch["next", "reward"].sum(1).squeeze(-1) - env.optimal_return(batch["observation"][:, 0])
    assert gap.max() <= 1e-5
    assert gap.mean() > -1.0
