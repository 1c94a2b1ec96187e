"""MuJoCo Warp on CUDA: its own graph, torch's graph around it, and nothing that waits."""

import pytest
import torch

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs.mujoco import HalfCheetah, Hopper
from torchrl_perf.runtime import capture
from torchrl_perf.trainers import PPOConfig, PPOTrainer

pytest.importorskip("mujoco_warp", reason="the extra mujoco-warp is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def states(simulation, start, actions, step):
    """Positions after each action, from a start."""
    state, found = {name: value.clone() for name, value in start.items()}, []
    for action in actions:
        state = step(simulation, state, action)
        found.append(state["qpos"].clone())
    return torch.stack(found)


def test_physics_in_torchs_graph_is_that_of_its_own_graph_up_to_rounding():
    env = HalfCheetah(32, device="cuda", seed=0)
    simulation = env.simulation
    start = {name: getattr(env, f"state_{name}").clone() for name in simulation.names}
    actions = [env.action_spec.rand() for _ in range(6)]
    expected = states(simulation, start, actions, lambda sim, state, action: sim.step(state, action).state)
    held, held_action = {name: value.clone() for name, value in start.items()}, actions[0].clone()

    def once():
        for name, value in simulation.step(held, held_action).state.items():
            held[name].copy_(value)

    captured = capture(once, audit=False)
    for _ in range(3):
        captured()
    assert captured.captured

    def replay(action):
        held_action.copy_(action)
        captured()
        return held

    for name, value in start.items():
        held[name].copy_(value)
    found = [replay(action)["qpos"].clone() for action in actions]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-3, atol=1e-3)


def test_a_rollout_in_a_graph_has_the_eager_ones_time_limits_and_waits_for_nothing():
    def batches(mode):
        env = HalfCheetah(64, device="cuda", seed=1, max_episode_steps=12)
        collector = DeviceCollector(env, None, frames_per_batch=64 * 8, mode=mode)
        return collector, [collector.collect().clone() for _ in range(5)]

    eager, expected = batches("eager")
    graph, found = batches("graph")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["next", "done"], other["next", "done"])
        assert one["next", "observation"].isfinite().all()
    assert not torch.equal(found[3]["action"], found[4]["action"]), "random numbers advance between replays"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.collect()
        eager.collect()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("iterations", [5, 50])
def test_few_iterations_of_the_solver_are_unrolled(iterations):
    env = Hopper(64, device="cuda", seed=0, iterations=iterations)
    assert env.simulation.model.opt.graph_conditional == (iterations == 50)
    root = env.reset()
    for _ in range(20):
        root["action"] = env.action_spec.rand()
        root = env.step_and_maybe_reset(root)[1]
    assert root["observation"].isfinite().all()
    assert env.faults() == {}


def test_overflows_are_counted_in_a_graph():
    env = Hopper(64, device="cuda", seed=0, nconmax=1, njmax=2)
    collector = DeviceCollector(env, None, frames_per_batch=64 * 16, mode="graph")
    for _ in range(6):
        collector.collect()
    assert set(env.faults()) == {"contact_overflows", "constraint_overflows"}


def test_a_whole_iteration_of_ppo_is_one_graph():
    config = PPOConfig(env="HalfCheetah", num_envs=256, num_steps=8, total_steps=10**6, device="cuda", logger="none")
    trainer = PPOTrainer(config)
    before = [parameter.detach().clone() for parameter in trainer.policy.parameters()]
    for _ in range(5):
        trainer.step()
    assert trainer.mode == "graph"
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.policy.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in trainer.policy.parameters())
    trainer.close()


def test_worlds_that_do_not_fit_are_refused_with_a_remedy():
    with pytest.raises((ValueError, torch.OutOfMemoryError), match=r"num_envs: expected worlds that fit|out of memory"):
        Hopper(30_000_000, device="cuda", seed=0)
    torch.cuda.empty_cache()
