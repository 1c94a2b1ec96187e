"""Durotaxis as an env: specs, ends, resets, modes of running, rows by themselves, and no NaN from any action."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrl.envs.utils import check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.collectors.random_actions import RandomActions
from torchrl_perf.envs import ColonySettings, Durotaxis
from torchrl_perf.envs.durotaxis.dynamics import Colony, divide, fresh_colony, select_deleted
from torchrl_perf.modules import HybridActor
from torchrl_perf.modules.hybrid_actor import hybrid_features
from torchrl_perf.runtime import no_host_sync

KINDS = ["global", "per_node"]
HOLD = (0.5, 5.0, 2.0, 0.5, 0.0)


def held(env, *action):
    values = torch.tensor(action or HOLD, dtype=env.dtype, device=env.device).repeat(env.num_envs, 1)
    return lambda td: td.set("action", values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("actions", KINDS)
def test_specs(actions, dtype, device):
    check_env_specs(Durotaxis(3, critical_nodes=8, actions=actions, dtype=dtype, device=device))


def test_keys_and_shapes():
    env = Durotaxis(2, critical_nodes=8, actions="per_node")
    batch = env.rollout(3, break_when_any_done=False)
    shapes = {key: tuple(value.shape) for key, value in batch.items(True, True)}
    assert shapes["nodes"] == shapes["next", "nodes"] == (2, 3, 16, 11)
    assert shapes["node_mask"] == (2, 3, 16)
    assert shapes["graph"] == (2, 3, 19)
    assert shapes["action", "kind"] == (2, 3, 16)
    assert shapes["action", "growth"] == (2, 3, 4)
    assert shapes["next", "reward"] == shapes["next", "outcome"] == (2, 3, 1)
    assert shapes["next", "reward_components"] == (2, 3, 14)
    assert batch["next", "outcome"].dtype == torch.int8
    assert env.reward_keys == ["reward"]


def test_start():
    env = Durotaxis(200, size=(600.0, 400.0), seed=0)
    shot = env.snapshot()
    x, y = shot["position"][:, :5].unbind(-1)
    assert (shot["alive"].sum(-1) == 5).all()
    assert (x >= 0).all() and (x <= 60).all() and x.max() > 58
    assert (y >= 160).all() and (y <= 240).all() and y.max() > 238 and y.min() < 162
    assert (x.diff() >= 0).all()
    assert (shot["pid"][:, :5] == torch.arange(5)).all()
    assert abs(torch.corrcoef(torch.stack((x[:, 0], y[:, 0])))[0, 1]) < 0.3


def test_time_limit_truncates_and_only_that():
    env = Durotaxis(3, max_episode_steps=4, seed=0)
    batch = DeviceCollector(env, held(env), frames_per_batch=24, total_frames=24).collect()
    outcome = batch["next", "outcome"][..., 0]
    assert outcome.tolist() == [[0, 0, 0, 6] * 2] * 3
    assert torch.equal(batch["next", "truncated"][..., 0], outcome == 6)
    assert not batch["next", "terminated"].any()
    # the final observation is the colony's last, the next root a fresh one
    assert (batch["next", "graph"][:, 3, 16] == 1.0).all()
    assert (batch["graph"][:, 4, 16] == 0.0).all()
    assert (batch["next", "node_mask"][:, 3].sum(-1) == 6).all()
    assert (batch["node_mask"][:, 4].sum(-1) == 5).all()
    assert batch["is_init"][:, 4].all()


def test_no_limit():
    env = Durotaxis(2, critical_nodes=10, max_episode_steps=None)
    batch = DeviceCollector(env, held(env, 0.5, 0.5, 4.0, 0.05, 0.0), frames_per_batch=40, total_frames=40).collect()
    assert not batch["next", "done"].any()
    assert not batch["graph"][..., 16].any()


def run_until(env, policy, steps):
    td = env.reset()
    for _ in range(steps):
        out, td = env.step_and_maybe_reset(policy(td))
        if out["next", "done"].all():
            return out["next"]
    raise AssertionError(f"no end in {steps} steps")


def test_every_outcome():
    names = Durotaxis.outcomes
    env = Durotaxis(2, delete_max=1.0)
    ended = run_until(env, held(env, 1.0, *HOLD[1:]), 1)
    assert (ended["outcome"] == names.index("empty")).all()
    assert not ended["node_mask"].any() and not ended["nodes"].any()
    # the centroid of an empty colony is where it was
    assert (ended["reward"] == -2.0).all()
    env = Durotaxis(1, theta_max=math.pi, confine=False, seed=0)
    ended = run_until(env, held(env, 0.0, 15.0, 0.5, 0.5, math.pi), 4)
    assert (ended["outcome"] == names.index("out_of_bounds")).all()
    assert (ended["reward"] < -1.9).all()


def test_thirty_steps_to_the_left():
    # nodes for themselves: the rightmost half goes, and children are born to the left
    env = Durotaxis(2, theta_max=math.pi, actions="per_node", critical_nodes=8, size=(4000.0, 400.0), seed=0)
    td = env.reset()
    env.state_x[:, :5] += 2000.0  # far from the edges
    env.state_center_x += 2000.0
    growth = torch.tensor([0.5, 4.0, 0.05, math.pi]).repeat(2, 1)
    for step in range(1, 31):
        rank = env.state_x.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        kind = (rank < env.state_count.unsqueeze(-1) // 2).long()
        out, td = env.step_and_maybe_reset(td.set(("action", "kind"), kind).set(("action", "growth"), growth))
        assert (out["next", "graph"][:, 15] == torch.tensor(step) / 30).all()
    assert (out["next", "outcome"] == env.outcomes.index("leftward")).all()
    assert out["next", "terminated"].all()


def test_over_growth_comes_before_success():
    env = Durotaxis(1, critical_nodes=5, start_nodes=5)
    env.reset()
    env.state_x[:, 4] = 379.5
    out = env.step(held(env, 0.0, *HOLD[1:])(env._reset(None)))
    assert out["next", "outcome"].item() == 2
    env.reset()
    td = env.reset()
    env.state_x[:, :5] = 379.5
    out = env.step(held(env, 0.0, *HOLD[1:])(td))
    assert out["next", "outcome"].item() == 2
    assert (out["next", "graph"][:, 7] >= 0.95).all()


def test_milestones_are_paid_once():
    env = Durotaxis(4, critical_nodes=10, reward_mode="full", seed=0)
    column = env.component_names.index("milestone")
    td, paid = env.reset(), torch.zeros(4)
    for _ in range(40):
        out, td = env.step_and_maybe_reset(held(env, 0.5, 15.0, 0.5, 0.5, 0.0)(td))
        paid += out["next", "reward_components"][:, column] * (paid < 1000)
        if out["next", "done"].any():
            break
    assert (out["next", "graph"][:, 17] == 1.0).all()
    assert (paid == 50 + 150 + 300 + 500).all()


@pytest.mark.parametrize("actions", KINDS)
def test_no_host_read(actions, device):
    env = Durotaxis(6, critical_nodes=8, actions=actions, max_episode_steps=3, device=device)
    policy, mask = RandomActions(env), torch.tensor([[True], [False]] * 3, device=device)
    td = env.reset()
    with no_host_sync(device):
        for _ in range(5):
            _, td = env.step_and_maybe_reset(policy(td))
        env.step(policy(td.clone()))
        env._reset(td.clone().set("_reset", mask))
        env._reset(None)


@pytest.mark.parametrize("actions", KINDS)
def test_one_env_is_that_row_of_many(actions, device):
    many = Durotaxis(50, critical_nodes=12, actions=actions, device=device, seed=0, reward_mode="full")
    one = Durotaxis(1, critical_nodes=12, actions=actions, device=device, reward_mode="full")
    for name, buffer in one._state().items():
        buffer.copy_(many._state()[name][17:18])
    for _ in range(8):
        action = many.full_action_spec.rand()
        if actions == "global":
            action["action"][..., 0] = 0.5
        left, right = many.step(action)["next"], one.step(action[17:18].clone())["next"]
        for key, value in right.items(True, True):
            if device.type == "cpu":
                assert torch.equal(left[key][17:18], value), key
            else:  # sums run over rows in another order
                torch.testing.assert_close(left[key][17:18], value, rtol=1e-5, atol=1e-5)
        if right["done"].any():
            break


@pytest.mark.usefixtures("fresh_dynamo")
def test_traced_whole_equals_eager():
    envs = [Durotaxis(5, critical_nodes=8, max_episode_steps=6, reward_mode="full") for _ in range(2)]
    traced = torch.compile(envs[1].step_and_maybe_reset, backend="eager", fullgraph=True)
    logs = []
    for env, step in zip(envs, (envs[0].step_and_maybe_reset, traced), strict=True):
        env.set_seed(0)
        td, log = env.reset(), []
        for delta in (0.5, 0.2, 0.5, 0.4, 0.1, 0.5, 0.5, 0.3):
            out, td = step(held(env, delta, *HOLD[1:])(td))
            log.append(out.clone())
        logs.append(torch.stack(log))
    for key, value in logs[0].items(True, True):
        assert torch.equal(value, logs[1][key]), key


def test_variants_agree(variant):
    rules = ColonySettings(critical_nodes=8)

    def step(*parts):
        *nodes, share, shape = parts
        colony = Colony(*nodes)
        return tuple(divide(colony, select_deleted(colony, share, rules), shape, rules)[0])

    colony = fresh_colony(torch.rand(32, 5, 2, device=variant.device), rules)
    share = torch.rand(32, device=variant.device) * 0.5 + 0.4
    shape = torch.tensor([[5.0, 2.0, 0.5, 0.3]], device=variant.device).repeat(32, 1)
    for got, expected in zip(variant(step)(*colony, share, shape), step(*colony, share, shape), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_collects_on_cuda_in_every_mode(mode):
    env = Durotaxis(64, device="cuda", seed=0, max_episode_steps=9)
    batch = DeviceCollector(env, held(env), frames_per_batch=64 * 8, total_frames=64 * 16, mode=mode).collect()
    for t in range(8):
        here = batch[:, t]
        assert (here["next", "node_mask"].sum(-1) == 6).all()
        assert (here["next", "graph"][:, 7] > here["graph"][:, 7]).all()  # the rightmost node
        if t < 7:  # a compiled step writes both, by kernels that round differently
            torch.testing.assert_close(here["next", "nodes"], batch["nodes"][:, t + 1], rtol=1e-5, atol=1e-6)
    assert (batch["next", "outcome"] == 0).all()


@pytest.mark.gpu
def test_graph_replays_the_eager_step():
    from torchrl_perf.runtime import capture

    env = Durotaxis(64, device="cuda", seed=0, reward_mode="full", max_episode_steps=40)
    root = env.reset()
    held(env)(root)
    step = capture(lambda: env.step_and_maybe_reset(root.copy())[0].get("next"))
    for _ in range(60):
        before = {name: value.clone() for name, value in env._state().items()}
        got = step()
        expected = env.advance(before, root["action"])
        for key in ("reward", "reward_components", "outcome"):
            torch.testing.assert_close(got[key], expected.entries[key])
        assert torch.equal(got["terminated"].squeeze(-1), expected.terminated)
        assert torch.equal(got["nodes"], env.observe(expected.next_state)["nodes"])


def tokens(low, high):
    return st.one_of(st.floats(low, high), st.sampled_from([math.nan, math.inf, -math.inf, -1e30, 1e30, 0.0]))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(*[tokens(-2.0, 20.0)] * 5), min_size=3, max_size=3),
    st.integers(0, 2**31 - 1),
    st.booleans(),
    st.sampled_from([{}, {"field": "exponential"}, {"slope": 0.0}, {"delete_max": 1.0, "theta_max": math.pi}]),
)
def test_no_nan_from_any_action(numbers, seed, confine, world):
    env = Durotaxis(3, critical_nodes=6, size=(60.0, 30.0), seed=seed, confine=confine, reward_mode="full", **world)
    td = env.reset()
    action = torch.tensor(numbers)
    for _ in range(6):
        out, td = env.step_and_maybe_reset(td.set("action", action))
        for part in (out["next"], td):
            for key in ("nodes", "graph", "reward_components"):
                assert part[key].isfinite().all(), key
            assert part["nodes"].abs().max() <= 60.0
            assert part["graph"].abs().max() <= 20.0
        assert out["next", "reward"].isfinite().all()
        count = env.state_count
        assert ((count >= 0) & (count <= 6)).all()
        assert (out["next", "done"] == (out["next", "outcome"] > 0)).all()


class Heads(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.kind, self.growth = nn.Linear(11, 2), nn.Linear(19, 8)

    def forward(self, nodes, graph):
        return self.kind(nodes), self.growth(graph)


def test_hybrid_actor_acts_for_nodes_and_colony():
    env = Durotaxis(4, critical_nodes=8, actions="per_node", seed=0)
    assert hybrid_features(env.full_action_spec) == 2 + 8
    actor = HybridActor(Heads(env), spec=env.full_action_spec, in_keys=("nodes", "graph"), valid_key="node_mask")
    batch = DeviceCollector(env, actor, frames_per_batch=40, total_frames=40).collect()
    assert batch["action_log_prob"].shape == (4, 10)
    assert batch["action_log_prob"].isfinite().all()
    assert not batch["action", "kind_log_prob"][~batch["node_mask"]].any()


def test_weights_change_in_place():
    env = Durotaxis(2, reward_weights={"survival": 2.0, "action": 1.0}, seed=0)
    td = held(env)(env.reset())
    assert env.step(td.clone())["next", "reward"].flatten().tolist() == pytest.approx([0.25, 0.25])
    env.reset()
    env.reward_weights.zero_()
    assert not env.step(td.clone())["next", "reward"].any()


def test_colonies_are_tuples_of_the_state():
    env = Durotaxis(2, seed=0)
    assert set(Colony._fields) <= set(env._state())
    shot = env.snapshot()
    shot["position"].zero_()
    assert env.state_x.any()
