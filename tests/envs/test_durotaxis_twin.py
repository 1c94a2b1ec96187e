"""Durotaxis against one colony at a time in plain Python numbers: places, features, rewards and ends."""

import math

import pytest
import torch
from colony_twin import ColonyTwin

from torchrl_perf.envs import Durotaxis
from torchrl_perf.envs.durotaxis import GRAPH_FEATURES, NODE_FEATURES

WORLDS = {
    "linear": {},
    "full": {"reward_mode": "full", "size": (600.0, 300.0)},
    "exponential": {"field": "exponential", "slope": 0.012, "intercept": 0.5, "reward_mode": "full"},
    "small": {"critical_nodes": 12, "size": (60.0, 40.0), "max_episode_steps": 9},
    "falling": {"slope": -0.002, "theta_max": math.pi, "size": (50.0, 50.0), "critical_nodes": 8, "delete_max": 1.0},
    "free": {"confine": False, "theta_max": math.pi, "size": (40.0, 40.0), "critical_nodes": 20},
}


def twins_of(env, world):
    shot = env.snapshot()
    names = {"critical_nodes": "critical", "max_episode_steps": "limit"}
    options = {names.get(name, name): value for name, value in world.items()}
    options["full"] = options.pop("reward_mode", "centroid") == "full"
    options.pop("theta_max", None), options.pop("delete_max", None)
    rows = [shot["position"][row, : shot["count"][row]] for row in range(env.num_envs)]
    return [ColonyTwin(rows_[:, 0].tolist(), rows_[:, 1].tolist(), **options) for rows_ in rows]


def check_observation(td, row, twin):
    count = len(twin.nodes)
    assert td["node_mask"][row].tolist() == [slot < count for slot in range(td["node_mask"].shape[-1])]
    assert not td["nodes"][row, count:].any()
    expected = torch.tensor(twin.node_rows(), dtype=torch.float64).view(count, 11)
    torch.testing.assert_close(td["nodes"][row, :count], expected, rtol=1e-9, atol=1e-9)
    graph = torch.tensor(twin.graph_row(), dtype=torch.float64)
    torch.testing.assert_close(td["graph"][row], graph, rtol=1e-9, atol=1e-9)


def actions_of(env, kind):
    """Near what holds a colony in half of the rows, anything in the others."""
    low, high = env.settings.action_bounds
    low, high = torch.tensor(low, dtype=env.dtype), torch.tensor(high, dtype=env.dtype)
    action = low + (high - low) * torch.rand(env.num_envs, 5, dtype=env.dtype)
    action[::2, 0] = env.settings.delete_max * (0.9 + 0.1 * action[::2, 0])
    if kind == "global":
        return {"action": action}
    choice = (torch.rand(env.num_envs, env.settings.slots) < 0.5).long()
    return {("action", "kind"): choice, ("action", "growth"): action[:, 1:]}


@pytest.mark.parametrize("kind", ["global", "per_node"])
@pytest.mark.parametrize("name", list(WORLDS))
def test_equals_the_twin_through_whole_episodes(name, kind):
    world, rows = WORLDS[name], 4
    env = Durotaxis(rows, dtype=torch.float64, seed=3, actions=kind, **world)
    twins = twins_of(env, world)
    td = env.reset().clone()
    twins = twins_of(env, world)
    seen = set()
    for _ in range(30):
        action = actions_of(env, kind)
        for key, value in action.items():
            td.set(key, value)
        out, root = env.step_and_maybe_reset(td)
        for row, twin in enumerate(twins):
            check_observation(td, row, twin)
            if kind == "global":
                delta, *shape = action["action"][row].tolist()
                deleted = twin.leftmost(delta)
            else:
                shape = action["action", "growth"][row].tolist()
                deleted = [n["pid"] for slot, n in enumerate(twin.nodes) if action["action", "kind"][row, slot] == 1]
            columns, outcome = twin.step(deleted, *shape)
            check_observation(out["next"], row, twin)
            got = out["next", "reward_components"][row]
            torch.testing.assert_close(got, torch.tensor(columns, dtype=torch.float64), rtol=1e-9, atol=1e-9)
            reward = sum(w * c for w, c in zip(env.reward_weights.tolist(), columns, strict=True))
            assert out["next", "reward"][row].item() == pytest.approx(reward, rel=1e-9, abs=1e-9)
            assert out["next", "outcome"][row].item() == outcome
            assert out["next", "terminated"][row].item() == (outcome in (1, 2, 3, 4, 5))
            assert out["next", "done"][row].item() == (outcome > 0)
            seen.add(outcome)
        td = root.clone()
        fresh = twins_of(env, world)
        done = out["next", "done"].flatten().tolist()
        twins = [new if end else old for new, old, end in zip(fresh, twins, done, strict=True)]
    assert 0 in seen
    assert len(seen) > 1


def test_numbers_stay_with_the_nodes():
    env = Durotaxis(4, dtype=torch.float64, seed=0)
    td = env.reset()
    twins = twins_of(env, {})
    for _ in range(12):
        action = torch.tensor([0.48, 5.0, 2.0, 0.5, 0.1], dtype=torch.float64).expand(4, 5)
        _, td = env.step_and_maybe_reset(td.set("action", action))
        shot = env.snapshot()
        for row, twin in enumerate(twins):
            twin.step(twin.leftmost(0.48), 5.0, 2.0, 0.5, 0.1)
            assert shot["pid"][row, : len(twin.nodes)].tolist() == [n["pid"] for n in twin.nodes]
            assert shot["age"][row, : len(twin.nodes)].tolist() == [n["age"] for n in twin.nodes]
            assert not shot["pid"][row, len(twin.nodes) :].any()


def test_columns_have_names():
    env = Durotaxis(1)
    assert (len(NODE_FEATURES), len(GRAPH_FEATURES)) == (11, 19)
    assert len(set(env.component_names)) == env.reward_weights.shape[0] == 14
    assert env.observation_spec["nodes"].shape == (1, 200, 11)
    assert env.observation_spec["graph"].shape == (1, 19)
