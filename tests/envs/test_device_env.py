"""The contract of the auto-reset base: episodes, time limit, masked resets, ownership of the returned data."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs import EnvBase, check_env_specs

from torchrl_perf.envs import Acrobot, CartPole, DeviceEnv, MountainCar, MountainCarContinuous, Pendulum

TASKS = [CartPole, Pendulum, Acrobot, MountainCar, MountainCarContinuous]
FLAGS = ("done", "terminated", "truncated")


class EpisodeCounter(DeviceEnv):
    """Observation (row, step in the episode, episode); action 1 ends the episode. Every number is identifiable."""

    num_state = 3
    num_reset_noise = 1
    observation_low = (-math.inf,) * 3
    observation_high = (math.inf,) * 3
    num_actions = 2

    def initial_state(self, uniform):
        rows = torch.arange(self.num_envs, dtype=self.dtype, device=self.device)
        episode = self.state[:, 2] + 1 if hasattr(self, "state") else torch.zeros_like(rows)
        return torch.stack((rows, torch.zeros_like(rows), episode), -1)

    def dynamics(self, state, action):
        row, step, episode = state.unbind(-1)
        return torch.stack((row, step + 1, episode), -1), 100 * row + step + 1, action == 1

    def observe(self, state):
        return state


def assert_equal(left, right):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        assert torch.equal(left[key], right[key]), key


def roll(env, steps, td=None):
    """Return the list of step TensorDicts and the last root."""
    td = env.reset() if td is None else td
    out = []
    for _ in range(steps):
        env.rand_action(td)
        td, root = env.step_and_maybe_reset(td)
        out.append(td.clone())
        td = root
    return out, td


@pytest.mark.parametrize("num_envs", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("task", TASKS)
def test_specs_pass_torchrl_check(task, dtype, num_envs, device):
    env = task(num_envs, dtype=dtype, device=device)
    check_env_specs(env)
    assert env.batch_size == (num_envs,)
    assert env.batch_locked


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("limit", [1, 3])
def test_truncation_comes_at_the_exact_step(task, limit):
    env = task(2, max_episode_steps=limit)
    steps, _ = roll(env, 7)
    for index, td in enumerate(steps):
        expected = (index + 1) % limit == 0
        assert td["next", "truncated"].all() if expected else not td["next", "truncated"].any()
        assert torch.equal(td["next", "done"], td["next", "truncated"] | td["next", "terminated"])


def test_no_limit_never_truncates():
    env = Pendulum(2, max_episode_steps=None)
    steps, _ = roll(env, 250)
    assert not any(td["next", "done"].any() for td in steps)
    assert (env.elapsed == 250).all()


def test_termination_at_the_limit_is_truncated_as_well():
    env = EpisodeCounter(1, max_episode_steps=1)
    td, _ = env.step_and_maybe_reset(env.reset().set("action", torch.tensor([1])))
    assert all(td["next", flag].item() for flag in FLAGS)


def test_identifiable_episodes(device):
    env = EpisodeCounter(2, max_episode_steps=3, device=device)
    td = env.reset()
    log = []
    # Row 0 terminates at its second step of every episode, row 1 runs into the limit.
    for _ in range(6):
        stop = (td["observation"][:, 1] == 1) & (td["observation"][:, 0] == 0)
        td, root = env.step_and_maybe_reset(td.set("action", stop.long()))
        log.append(torch.cat((td["observation"], td["next", "observation"], td["next", "reward"]), -1))
        td = root
    log = torch.stack(log).cpu()
    first = log[0, 0, 2].item()  # the reset above started this episode
    steps = torch.tensor([0.0, 1, 0, 1, 0, 1])
    assert torch.equal(log[:, 0, 1], steps)
    assert torch.equal(log[:, 0, 2], first + torch.tensor([0.0, 0, 1, 1, 2, 2]))
    assert torch.equal(log[:, 0, 4], steps + 1)  # the final observation is the true one
    assert torch.equal(log[:, 0, 6], steps + 1)
    steps = torch.tensor([0.0, 1, 2, 0, 1, 2])
    assert torch.equal(log[:, 1, 1], steps)
    assert torch.equal(log[:, 1, 4], steps + 1)
    assert torch.equal(log[:, 1, 5], log[:, 1, 2])
    assert torch.equal(log[:, 1, 6], 100 + steps + 1)


@pytest.mark.parametrize("kind", ["terminated", "truncated", "both", "none"])
@pytest.mark.parametrize("path", ["step_and_maybe_reset", "preset next"])
def test_is_init_is_done_of_the_step_before(kind, path):
    env = EpisodeCounter(3, max_episode_steps=4 if kind in ("truncated", "both") else None)
    td = env.reset()
    assert td["is_init"].all()
    ends = 0
    for step in range(12):
        stop = torch.tensor([step % 3 == 2, step % 5 == 4, False]) & torch.tensor(kind in ("terminated", "both"))
        td["action"] = stop.long()
        if path == "preset next":
            td["next"] = TensorDict({"hidden": torch.ones(3, 2)}, [3])
        td, root = env.step_and_maybe_reset(td)
        done = td["next", "done"]
        ends += int(done.sum())
        assert not td["next", "is_init"].any()
        assert torch.equal(root["is_init"], done)
        assert not any(root[flag].any() for flag in FLAGS)
        assert torch.equal(root["observation"], env.state)
        assert torch.equal(root["observation"][:, 1] == 0, done.squeeze(-1))
        if path == "preset next":
            assert torch.equal(td["next", "hidden"], torch.ones(3, 2))
        td = root
    assert (ends > 0) == (kind != "none")


def test_what_the_policy_wrote_travels_on_as_in_step_mdp():
    env = EpisodeCounter(2)
    td = env.reset().set("action", torch.zeros(2, dtype=torch.int64))
    td.set("loc", torch.ones(2, 1)).set(("collector", "traj_ids"), torch.arange(2))
    expected = EnvBase._step_mdp.fget(env)(env.step(td.clone()))
    step, root = env.step_and_maybe_reset(td)
    assert set(root.keys(True, True)) == set(expected.keys(True, True))
    root["collector"]["extra"] = torch.zeros(2)
    assert "extra" not in step["collector"].keys()


def test_non_tensor_entries_take_the_general_path():
    env = EpisodeCounter(2)
    td = env.reset().set("action", torch.zeros(2, dtype=torch.int64))
    td["note"] = "kept"
    step, root = env.step_and_maybe_reset(td)
    assert step["note"] == root["note"] == "kept"
    assert root["observation"][:, 1].tolist() == [1, 1]


@pytest.mark.gpu
def test_env_moves_to_cuda():
    env = CartPole(4).to("cuda")
    data = env.rollout(20, break_when_any_done=False)
    assert data.device.type == env.state.device.type == "cuda"


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_masked_reset_redraws_its_rows_only_and_only_once(shape):
    env = Pendulum(4, seed=0)
    _, td = roll(env, 3)
    mask = torch.tensor([True, False, True, False]).view(shape)
    before, elapsed = env.state.clone(), env.elapsed.clone()
    out = env.reset(td.clone().set("_reset", mask.view(4, 1)) if shape == (4, 1) else td.clone().set("_reset", mask))
    changed = (env.state != before).all(-1)
    assert torch.equal(changed, mask.view(4))
    assert torch.equal(env.elapsed, elapsed * ~mask.view(4, 1))
    assert torch.equal(out["observation"], env.observe(env.state))
    assert torch.equal(out["is_init"].view(4) & mask.view(4), mask.view(4))
    # A second reset of the same rows finds them fresh and leaves them alone.
    again = env.state.clone()
    env.reset(td.clone().set("_reset", mask.view(4, 1)))
    assert torch.equal(env.state, again)
    # Without a mask every row is drawn anew, fresh or not.
    env.reset()
    assert (env.state != again).all()


@pytest.mark.parametrize("mask", [torch.zeros(3, 1, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)])
def test_masked_reset_of_none_and_of_all(mask):
    env = CartPole(3, seed=0)
    _, td = roll(env, 2)
    before = env.state.clone()
    out = env._reset(td.clone().set("_reset", mask))
    assert torch.equal((env.state != before).all(-1, keepdim=True), mask)
    assert torch.equal(out["is_init"], mask)
    assert not any(out[flag].any() for flag in FLAGS)


@settings(max_examples=15, deadline=None)
@given(
    ends=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8),
    limit=st.sampled_from([1, 2, 3, None]),
)
def test_auto_reset_equals_a_loop_over_single_episodes(ends, limit):
    env = EpisodeCounter(3, max_episode_steps=limit)
    td = env.reset()
    steps = [0, 0, 0]
    for row_ends in ends:
        td, root = env.step_and_maybe_reset(td.set("action", torch.tensor(row_ends).long()))
        for row, end in enumerate(row_ends):
            assert td["observation"][row, 1] == steps[row]
            steps[row] += 1
            truncated = limit is not None and steps[row] >= limit
            assert td["next", "observation"][row, 1] == steps[row]
            assert td["next", "terminated"][row] == end
            assert td["next", "truncated"][row] == truncated
            if end or truncated:
                steps[row] = 0
            assert root["observation"][row, 1] == steps[row]
            assert env.elapsed[row] == steps[row]
        td = root


@pytest.mark.parametrize("task", TASKS)
def test_nothing_returned_is_internal_or_changed_later(task):
    env = task(4, max_episode_steps=3, seed=0)
    reset = env.reset()
    env.rand_action(reset)
    td, root = env.step_and_maybe_reset(reset.clone())
    stepped = env.step(root.clone().set("action", td["action"]))
    results = [reset, td, root, stepped]
    copies = [result.clone() for result in results]
    roll(env, 5, root.clone())
    env.reset()
    for result, copy in zip(results, copies, strict=True):
        assert_equal(result, copy)
    buffers = {buffer.untyped_storage().data_ptr() for buffer in env.buffers()}
    state, elapsed = env.state.clone(), env.elapsed.clone()
    for result in results:
        for key, value in result.items(True, True):
            assert value.untyped_storage().data_ptr() not in buffers, key
            value.fill_(1)
    assert torch.equal(env.state, state)
    assert torch.equal(env.elapsed, elapsed)


def test_entries_of_one_step_do_not_overlap():
    env = CartPole(4)
    td = env.reset()
    env.rand_action(td)
    td, root = env.step_and_maybe_reset(td)
    spans = set()
    for value in [*td["next"].values(), *(root[key] for key in ("observation", "is_init", *FLAGS))]:
        span = (value.data_ptr(), value.numel())
        assert span not in spans
        spans.add(span)


def test_partial_steps_freeze_the_other_rows():
    env = EpisodeCounter(3)
    td = env.reset().set("action", torch.zeros(3, dtype=torch.int64))
    env.step(td.set("_step", torch.tensor([True, False, True])))
    assert env.state[:, 1].tolist() == [1, 0, 1]
    assert env.elapsed[:, 0].tolist() == [1, 0, 1]
