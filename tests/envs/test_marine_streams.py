"""AgentStreams of MarineNavigation: rows against the env itself, resets inside the step, host waits, state, modes."""

import pytest
import torch
from torchrl.envs import check_env_specs

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import AgentStreams, Curriculum, MarineNavigation
from torchrl_perf.runtime import no_host_sync


def make(num_envs=4, *, action="continuous", steps=9, device="cpu", **options):
    stages = Curriculum((0, 80), (2, 3), (0, 1), (0, 0), (0.0, 0.0))
    env = MarineNavigation(
        num_envs, action=action, curriculum=stages, max_episode_steps=steps, device=device, **options
    )
    return AgentStreams(env)


def collector_of(env, steps, mode="eager", policy=None):
    return DeviceCollector(env, policy, frames_per_batch=env.batch_size[0] * steps, mode=mode)


@pytest.mark.parametrize("action", ["continuous", "discrete"])
def test_specs(action, device):
    env = make(action=action, device=device)
    assert env.batch_size == (12,)
    assert env.resets_inside_step
    check_env_specs(env)


def test_a_row_is_a_vessel(device):
    """The same random numbers, the same actions: each entry is the env's own, and ends are masked."""
    base, env = make(device=device).base_env, make(device=device)
    torch.manual_seed(1)
    theirs = base.reset()
    torch.manual_seed(1)
    ours = env.reset()
    for step in range(30):
        action = torch.rand(12, 2, device=device, generator=torch.Generator(device).manual_seed(step)) * 2 - 1
        ours["action"], theirs["agents", "action"] = action, action.view(4, 3, 2)
        torch.manual_seed(step)
        before, theirs = base.step_and_maybe_reset(theirs)
        torch.manual_seed(step)
        stepped, ours = env.step_and_maybe_reset(ours)
        valid = before["agents", "active"].flatten(0, 1)
        assert torch.equal(stepped["valid"], valid)
        for key in ("observation", "reward", "event", "colregs"):
            assert torch.equal(stepped["next", key], before["next", "agents", key].flatten(0, 1)), key
        assert torch.equal(stepped["next", "valid"], before["next", "agents", "active"].flatten(0, 1))
        assert torch.equal(stepped["next", "terminated"], valid & before["next", "agents", "terminated"].flatten(0, 1))
        of_env = before["next", "done"].repeat_interleave(3, 0)
        own = before["next", "agents", "done"].flatten(0, 1)
        assert torch.equal(stepped["next", "done"], torch.where(valid, own, of_env))
        assert torch.equal(ours["observation"], theirs["agents", "observation"].flatten(0, 1))
        assert torch.equal(ours["is_init"], theirs["is_init"].repeat_interleave(3, 0))
        assert not ours["done"].any()


def test_torchrls_own_loop_sees_the_same_episodes():
    """A loop that resets done rows by mask, against the resets inside the step."""
    one, other = make(), make()
    torch.manual_seed(0)
    ours = one.reset()
    torch.manual_seed(0)
    theirs = other.reset()
    for step in range(25):
        action = torch.full((12, 2), 0.5 if step % 3 else -0.2)
        torch.manual_seed(step)
        stepped, ours = one.step_and_maybe_reset(ours.set("action", action))
        torch.manual_seed(step)
        following = other.step(theirs.set("action", action))
        for key in ("reward", "done", "terminated", "observation"):
            assert torch.equal(stepped["next", key], following["next", key]), key
        theirs = other.maybe_reset(other._step_mdp(following))
        assert torch.equal(ours["observation"], theirs["observation"])
        assert torch.equal(ours["valid"], theirs["valid"])


def test_a_rollout_waits_for_nothing():
    collector = collector_of(make(), 12)
    collector.collect()
    with no_host_sync():
        batch = collector.collect()
    assert (batch["next", "done"] & batch["valid"]).any()


def test_going_on_from_a_state():
    collector = collector_of(make(), 7)
    collector.collect()
    state, random = collector.state_dict(), torch.get_rng_state()
    expected = [collector.collect().clone() for _ in range(3)]
    other = collector_of(make(), 7)
    other.collect()
    other.load_state_dict(state)
    torch.set_rng_state(random)
    for batch in expected:
        found = other.collect()
        for key in batch.keys(True, True):
            assert torch.equal(batch[key], found[key]), key
    assert int(other.env.base_env.frames) == int(collector.env.base_env.frames) > 80  # the second stage


@pytest.mark.parametrize("mode", ["compile", pytest.param("graph", marks=pytest.mark.gpu)])
def test_modes_agree(mode, device, request):
    if device.type == "cpu" and mode == "graph":
        pytest.skip("graphs need CUDA")
    request.getfixturevalue("traced" if device.type == "cpu" else "fresh_dynamo")

    def policy(td):
        return td.set("action", torch.stack([td["observation"][:, 1], -td["observation"][:, 1]], -1).sign() * 0.5)

    found = []
    for each in ("eager", mode):
        env = make(steps=100, device=device, observation_noise=False)
        torch.manual_seed(0)
        root = env.reset()
        collector = collector_of(env, 12, each, policy)
        # no episode ends within the batch: random numbers of resets differ between the modes
        collector._started = True
        for key, row in zip(collector._root_keys, collector._root_rows[-1], strict=True):
            row.copy_(root[key])
        found.append(collector.collect().clone())
    for key in ("observation", "valid", ("next", "reward"), ("next", "event"), ("next", "done")):
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-4, atol=1e-4, msg=str(key))


def test_a_state_that_is_not_finite_is_reset_where_the_run_shall_go_on():
    env = make()
    assert not env.resets_nonfinite
    env.resets_nonfinite = True
    assert env.base_env.resets_nonfinite
    td = env.rand_action(env.reset())
    env.base_env.state_position[1] = torch.nan
    stepped, td = env.step_and_maybe_reset(td)
    assert stepped["next", "done"][3:6].all()
    assert td["observation"].isfinite().all()
