"""The five classic-control tasks against Gymnasium's own, step for step."""

import math

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymEnv

from torchrl_perf.envs import Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum

IDS = {
    CartPole: "CartPole-v1",
    Pendulum: "Pendulum-v1",
    Acrobot: "Acrobot-v1",
    MountainCar: "MountainCar-v0",
    MountainCarContinuous: "MountainCarContinuous-v0",
}
TASKS = list(IDS)


def make_gym(task):
    env = gymnasium.make(IDS[task], disable_env_checker=True)
    env.reset(seed=0)
    return env


def set_gym_state(env, row):
    """Put a float64 row of ours into a Gymnasium env."""
    row = row.double().cpu().numpy().copy()
    env.unwrapped.state = tuple(map(float, row)) if isinstance(env.unwrapped.state, tuple) else row
    if hasattr(env.unwrapped, "steps_beyond_terminated"):
        env.unwrapped.steps_beyond_terminated = None


def gym_observation(task, env):
    """Gymnasium's observation in float64: its own is rounded to float32."""
    s = np.asarray(env.unwrapped.state, dtype=np.float64)
    if task is Pendulum:
        return np.array([math.cos(s[0]), math.sin(s[0]), s[1]])
    if task is Acrobot:
        return np.array([math.cos(s[0]), math.sin(s[0]), math.cos(s[1]), math.sin(s[1]), s[2], s[3]])
    return s


def gym_action(task, action):
    return int(action) if task.num_actions is not None else action.double().cpu().numpy().reshape(-1)


def act(task, env, generator, step):
    """Random actions, and for half of the rows the ones that pump energy, so that the hard tasks end as well."""
    n = env.num_envs
    if task.num_actions is not None:
        action = torch.randint(task.num_actions, (n,), generator=generator)
    else:
        # Beyond the bounds on purpose: clipping is part of the task.
        action = torch.randn(n, 1, generator=generator, dtype=env.dtype) * 1.5 * task.action_high[0]
    half = n // 2
    state = env.state.cpu()
    if task in (MountainCar, MountainCarContinuous):
        push = torch.where(state[:half, 1] >= 0, 1.0, -1.0)
        action[:half] = (push + 1).long() if task is MountainCar else push.unsqueeze(-1).to(env.dtype)
    if task is Acrobot:
        action[:half] = torch.where(state[:half, 3] >= 0, 2, 0)
    return action.to(env.device)


def run_against_gym(task, *, dtype, device, steps, num_envs, forced):
    """Step ours and Gymnasium's; return (worst observation error, worst reward error, flag mismatches, ends)."""
    env = task(num_envs, dtype=dtype, device=device)
    env.set_seed(1)
    td = env.reset()
    peers = [make_gym(task) for _ in range(num_envs)]
    for peer, row in zip(peers, env.state, strict=True):
        set_gym_state(peer, row)
    generator = torch.Generator().manual_seed(2)
    worst_obs = worst_reward = 0.0
    mismatches, ends = 0, {"terminated": 0, "truncated": 0}
    for step in range(steps):
        td["action"] = act(task, env, generator, step)
        td, root = env.step_and_maybe_reset(td)
        nxt = td["next"].cpu()
        for i, peer in enumerate(peers):
            _, reward, terminated, truncated, _ = peer.step(gym_action(task, td["action"][i]))
            error = np.abs(gym_observation(task, peer) - nxt["observation"][i].double().numpy()).max()
            worst_obs = max(worst_obs, error)
            worst_reward = max(worst_reward, abs(float(reward) - nxt["reward"][i].item()))
            flags = nxt["terminated"][i].item(), nxt["truncated"][i].item()
            mismatches += flags != (terminated, truncated)
            ends["terminated"] += terminated
            ends["truncated"] += truncated
            if nxt["done"][i]:
                peer.reset()
            if forced or nxt["done"][i]:
                set_gym_state(peer, env.state[i])
        td = root
    return worst_obs, worst_reward, mismatches, ends


# Ends that must occur, steps free-running, steps forced. Acrobot is chaotic: the last bit of a sine, which torch and
# NumPy round differently, grows past 1e-9 after some 250 free steps, so its truncated episode is followed forced.
EXPECTED_ENDS = {
    CartPole: (["terminated"], 300, 300),
    Pendulum: (["truncated"], 420, 210),
    Acrobot: (["terminated"], 200, 510),
    MountainCar: (["terminated", "truncated"], 410, 210),
}


@pytest.mark.parametrize("task", [CartPole, Pendulum, Acrobot, MountainCar])
def test_free_running_float64_follows_gymnasium_over_whole_episodes(task, device):
    ends_expected, steps, _ = EXPECTED_ENDS[task]
    observation, reward, mismatches, ends = run_against_gym(
        task, dtype=torch.float64, device=device, steps=steps, num_envs=4, forced=False
    )
    assert observation < 1e-9
    assert reward < 1e-9
    assert mismatches == 0
    assert all(ends[kind] > 0 for kind in ends_expected)


@pytest.mark.parametrize("task", [CartPole, Pendulum, Acrobot, MountainCar])
def test_float64_follows_gymnasium_from_each_state_over_whole_episodes(task, device):
    ends_expected, _, steps = EXPECTED_ENDS[task]
    observation, reward, mismatches, ends = run_against_gym(
        task, dtype=torch.float64, device=device, steps=steps, num_envs=4, forced=True
    )
    assert observation < 1e-12
    assert reward < 1e-12
    assert mismatches == 0
    assert all(ends[kind] > 0 for kind in {*ends_expected, *(["truncated"] if task is Acrobot else [])})


def test_cartpole_that_is_balanced_is_truncated_at_step_500():
    env, peer = CartPole(1, dtype=torch.float64, seed=0), make_gym(CartPole)
    td = env.reset()
    set_gym_state(peer, env.state[0])
    for step in range(500):
        action = (env.state[:, 2] + 0.5 * env.state[:, 3] + 0.01 * env.state[:, 0] + 0.02 * env.state[:, 1] > 0).long()
        td, root = env.step_and_maybe_reset(td.set("action", action))
        observation, _, terminated, truncated, _ = peer.step(action.item())
        assert (terminated, truncated) == (False, step == 499)
        assert td["next", "truncated"].item() == truncated
        assert td["next", "observation"][0].tolist() == pytest.approx(observation.tolist(), abs=1e-6)
        td = root


def test_mountain_car_continuous_float64_follows_gymnasium_from_each_state(device):
    # Gymnasium stores this task's state in float32, so the observation agrees to that rounding and no further.
    observation, reward, mismatches, ends = run_against_gym(
        MountainCarContinuous, dtype=torch.float64, device=device, steps=1010, num_envs=2, forced=True
    )
    assert observation < 6e-8
    assert reward < 1e-9
    assert mismatches == 0
    assert ends["terminated"] > 0
    assert ends["truncated"] > 0


def test_mountain_car_continuous_float64_free_running_equals_a_scalar_loop():
    env = MountainCarContinuous(1, dtype=torch.float64, seed=3)
    td = env.reset()
    position, velocity = env.state[0].tolist()
    generator = torch.Generator().manual_seed(4)
    for step in range(999):
        action = torch.randn(1, 1, generator=generator, dtype=torch.float64)
        td, root = env.step_and_maybe_reset(td.set("action", action))
        velocity += min(max(action.item(), -1.0), 1.0) * 0.0015 - 0.0025 * math.cos(3 * position)
        velocity = min(max(velocity, -0.07), 0.07)
        position = min(max(position + velocity, -1.2), 0.6)
        if position == -1.2 and velocity < 0:
            velocity = 0.0
        assert td["next", "observation"][0].tolist() == pytest.approx([position, velocity], abs=1e-9)
        assert td["next", "reward"].item() == pytest.approx(-0.1 * action.item() ** 2, abs=1e-9)
        assert td["next", "truncated"].item() == (step == 998)
        td = root


@pytest.mark.parametrize("task", TASKS)
def test_float32_follows_gymnasium_from_each_state(task, device):
    observation, reward, mismatches, _ = run_against_gym(
        task, dtype=torch.float32, device=device, steps=250, num_envs=4, forced=True
    )
    assert observation < 1e-5
    # A pendulum that spins has an angle of tens of radians, of which float32 keeps 4e-6; the reward squares it.
    assert reward < (5e-5 if task is Pendulum else 1e-5)
    assert mismatches == 0


@pytest.mark.parametrize("task", TASKS)
def test_specs_are_those_of_gymnasium(task):
    ours, theirs = task(3), GymEnv(IDS[task], categorical_action_encoding=True)
    assert ours.observation_spec_unbatched["observation"] == theirs.observation_spec["observation"]
    assert ours.action_spec_unbatched == theirs.action_spec
    assert ours.reward_spec_unbatched == theirs.reward_spec
    assert set(ours.done_keys) == set(theirs.done_keys)
    assert all(ours.full_done_spec_unbatched[key] == theirs.full_done_spec[key] for key in ours.done_keys)
    assert ours.max_episode_steps == gymnasium.spec(IDS[task]).max_episode_steps
    assert ours.action_key == "action"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("task", TASKS)
def test_observation_bounds_are_gymnasiums(task, dtype):
    space = make_gym(task).observation_space
    spec = task(2, dtype=dtype).observation_spec["observation"]
    assert torch.allclose(spec.space.low[0].float(), torch.as_tensor(space.low))
    assert torch.allclose(spec.space.high[1].float(), torch.as_tensor(space.high))
    assert spec.dtype == dtype


RESET_RANGES = {
    CartPole: [(-0.05, 0.05)] * 4,
    Pendulum: [(-math.pi, math.pi), (-1.0, 1.0)],
    Acrobot: [(-0.1, 0.1)] * 4,
    MountainCar: [(-0.6, -0.4), None],
    MountainCarContinuous: [(-0.6, -0.4), None],
}


@pytest.mark.parametrize("task", TASKS)
def test_reset_states_have_gymnasiums_distribution(task, device):
    env = task(4000, device=device, dtype=torch.float64)
    env.set_seed(5)
    env.reset()
    states = env.state.cpu().numpy()
    for column, bounds in zip(states.T, RESET_RANGES[task], strict=True):
        if bounds is None:
            assert (column == 0).all()
            continue
        low, high = bounds
        assert low <= column.min()
        assert column.max() <= high
        # Kolmogorov-Smirnov against the uniform law; the bound is passed by chance once in a thousand.
        quantiles = (np.sort(column) - low) / (high - low)
        ranks = np.arange(column.size + 1) / column.size
        distance = max(np.abs(quantiles - ranks[1:]).max(), np.abs(quantiles - ranks[:-1]).max())
        assert distance < 1.95 / math.sqrt(column.size)
    correlation = np.corrcoef(states[:, [i for i, b in enumerate(RESET_RANGES[task]) if b]].T)
    assert (np.abs(np.atleast_2d(correlation) - np.eye(len(np.atleast_2d(correlation)))) < 0.07).all()


@pytest.mark.parametrize("task", TASKS)
def test_reset_ranges_cover_gymnasiums_samples(task):
    peer = make_gym(task)
    for seed in range(20):
        peer.reset(seed=seed)
        for value, bounds in zip(np.asarray(peer.unwrapped.state), RESET_RANGES[task], strict=True):
            low, high = bounds or (0.0, 0.0)
            assert low - 1e-7 <= value <= high + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("task", TASKS)
def test_one_env_equals_its_row_of_a_thousand_bit_for_bit(task, dtype, device):
    many, one = task(1000, dtype=dtype, device=device, seed=0), task(1, dtype=dtype, device=device)
    td = many.reset()
    for step in range(60):
        many.rand_action(td)
        before = many.state.clone()
        td, root = many.step_and_maybe_reset(td)
        for row in (0, 7, 500, 999):
            one.state.copy_(before[row : row + 1])
            one.elapsed.zero_()
            alone = one.step(td[row : row + 1].select("action"))["next"]
            for key in ("observation", "reward", "terminated"):
                assert torch.equal(alone[key][0], td["next", key][row]), (key, step, row)
        td = root
    noise = torch.rand(1000, task.num_reset_noise, dtype=dtype, device=device)
    assert torch.equal(one.initial_state(noise[3:4]), many.initial_state(noise)[3:4])


def test_cartpole_hand_computed_step():
    # From rest and upright, push right: push = 10 / 1.1, angular acceleration = -push / (0.5 (4/3 - 0.1 / 1.1)).
    env = CartPole(1, dtype=torch.float64)
    env.state.zero_()
    nxt = env.step(env.reset().set("action", torch.tensor([1])))
    env.state.zero_()
    nxt = env.step(env.fake_tensordict().exclude("next").set("action", torch.tensor([1])))["next"]
    push = 10 / 1.1
    angular = -push / (0.5 * (4 / 3 - 0.1 / 1.1))
    expected = [0.0, 0.02 * (push - 0.05 * angular / 1.1), 0.0, 0.02 * angular]
    assert nxt["observation"][0].tolist() == pytest.approx(expected, abs=1e-12)
    assert nxt["reward"].item() == 1.0


def test_pendulum_hand_computed_step():
    env = Pendulum(1, dtype=torch.float64)
    env.state.copy_(torch.tensor([[3 * math.pi / 2, 1.0]], dtype=torch.float64))
    nxt = env.step(env.fake_tensordict().exclude("next").set("action", torch.tensor([[5.0]]).double()))["next"]
    # The angle wraps to -pi/2, the torque clips to 2; velocity 1 + (15 sin(3 pi / 2) + 3 * 2) 0.05 = 0.55.
    assert nxt["reward"].item() == pytest.approx(-((math.pi / 2) ** 2 + 0.1 + 0.004), abs=1e-12)
    angle = 3 * math.pi / 2 + 0.55 * 0.05
    assert nxt["observation"][0].tolist() == pytest.approx([math.cos(angle), math.sin(angle), 0.55], abs=1e-12)


@pytest.mark.parametrize("turns", [-2, -1, 0, 1, 2])
def test_acrobot_angles_wrap_as_gymnasiums_loop(turns):
    from gymnasium.envs.classic_control.acrobot import wrap

    from torchrl_perf.envs.classic_control.acrobot import _wrap_angle

    base = torch.linspace(-math.pi, math.pi, 21, dtype=torch.float64)
    angles = base + turns * 2 * math.pi
    expected = torch.tensor([wrap(a, -math.pi, math.pi) for a in angles.tolist()], dtype=torch.float64)
    inside = _wrap_angle(angles)
    assert torch.allclose(inside, expected, atol=1e-12)
    if turns == 0:
        assert torch.equal(inside, base)
