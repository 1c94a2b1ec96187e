"""HostCollector: every field of every row against scalar loops, in all auto-reset modes and ways to the device."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from host_oracle import (
    MODES,
    PATHS,
    Argmax,
    Maze,
    check_against_loop,
    check_trajectories,
    collector,
    gather,
    make,
    maze_policy,
    vector,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_perf.collectors import HostCollector, host_specs
from torchrl_perf.collectors.host_packed import PackedRows
from torchrl_perf.modules import DeterministicActor, DeviceActor, GumbelCategorical, OUNoise
from torchrl_perf.runtime.seeds import stream_seeds

pytestmark = [
    # mujoco 4: two of gymnasium's models still use an attribute that it retires
    pytest.mark.filterwarnings("ignore:.*settotalmass.*"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
class TestAgainstScalarEnvs:
    @pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1", "maze", "CliffWalking-v1"])
    def test_random_actions(self, name, mode, path):
        options = {"max_episode_steps": 9} if name == "CliffWalking-v1" else {}
        collecting = collector(path, vector(name, 3, mode, copy=False, **options), frames_per_batch=3 * 8, seed=11)
        data = gather(collecting, 5)
        collecting.shutdown()
        assert check_against_loop(data, make(name, **options), 11) > 3
        check_trajectories(data)

    @pytest.mark.parametrize("name", ["Pendulum-v1", "HalfCheetah-v5"])
    def test_continuous_actions_and_time_limits(self, name, mode, path):
        if name == "HalfCheetah-v5":
            pytest.importorskip("mujoco", reason="needs the extra 'mujoco'")
        options = {"max_episode_steps": 7}
        collecting = collector(path, vector(name, 2, mode, **options), frames_per_batch=2 * 5, seed=3)
        data = gather(collecting, 4)
        collecting.shutdown()
        assert check_against_loop(data, make(name, **options), 3) == 4
        assert not data["next", "terminated"].any()
        assert data["observation"].dtype == torch.float32

    @pytest.mark.parametrize(("num_envs", "num_steps"), [(1, 1), (4, 1), (1, 9)])
    def test_small_shapes(self, num_envs, num_steps, mode, path):
        collecting = collector(path, vector("maze", num_envs, mode), frames_per_batch=num_envs * num_steps, seed=5)
        data = gather(collecting, 20 if num_steps == 1 else 4)
        assert check_against_loop(data, Maze, 5) >= num_envs
        check_trajectories(data)

    def test_groups(self, mode, path):
        envs = [vector("maze", n, mode) for n in (2, 1, 3)]
        data = gather(collector(path, envs, frames_per_batch=6 * 4, seed=7), 6)
        assert check_against_loop(data, Maze, 7) > 6
        check_trajectories(data)

    def test_policy_acts_on_the_root_of_its_row(self, mode, path):
        policy = maze_policy("cuda" if path == "cuda" else "cpu")
        data = gather(collector(path, vector("maze", 4, mode), policy, frames_per_batch=4 * 3, seed=1), 9)
        check_against_loop(data, Maze, 1)
        scores = data["state", "pos"] @ policy.module.weight.cpu().T + policy.module.bias.cpu()
        torch.testing.assert_close(data["scores"], scores)
        assert torch.equal(data["action"], scores.argmax(-1))

    def test_two_resets_in_a_row(self, mode, path):
        """Episodes of one step: in NEXT_STEP every second step is a reset."""
        options = {"max_episode_steps": 1}
        envs = vector("CartPole-v1", 2, mode, **options)
        data = gather(collector(path, envs, frames_per_batch=2 * 4, seed=2), 3)
        assert check_against_loop(data, make("CartPole-v1", **options), 2) == 24


class TestOtherVectorEnvs:
    @pytest.mark.parametrize("mode", MODES)
    def test_async(self, mode):
        envs = [vector("maze", 2, mode, kind="async", copy=False), vector("maze", 1, mode, kind="async")]
        collecting = HostCollector(envs, frames_per_batch=3 * 5, seed=4)
        data = gather(collecting, 4)
        collecting.shutdown()
        assert check_against_loop(data, Maze, 4) > 3
        check_trajectories(data)

    def test_vector_entry_point(self):
        """CartPoleVectorEnv draws from one generator for all envs: the oracle is its own streams without resets."""
        envs = gym.make_vec("CartPole-v1", 5, vectorization_mode="vector_entry_point")
        data = gather(HostCollector(envs, frames_per_batch=5 * 30, seed=0), 4)
        other = gym.make_vec("CartPole-v1", 5, vectorization_mode="vector_entry_point")
        streams = next_step_streams(other, 0, data["action"].numpy())
        for key, value in streams.items():
            assert torch.equal(data[key].squeeze(-1), torch.as_tensor(value)), key
        assert data["next", "done"].sum() > 15
        check_trajectories(data)

    @pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
    def test_atari(self, mode):
        vector_env = pytest.importorskip("ale_py.vector_env")
        options = {"max_num_frames_per_episode": 60, "noop_max": 9, "img_height": 20, "img_width": 16}
        make_envs = lambda mode: vector_env.AtariVectorEnv("pong", 3, autoreset_mode=mode, **options)  # noqa: E731
        data = gather(HostCollector(make_envs(mode), frames_per_batch=3 * 8, seed=6), 5)
        assert data["observation"].dtype == torch.uint8
        streams = next_step_streams(make_envs("NextStep"), np.array(stream_seeds(6, 3)), data["action"].numpy())
        for key, value in streams.items():
            assert torch.equal(data[key].squeeze(-1), torch.as_tensor(value)), key
        assert data["next", "done"].sum() >= 6

    def test_envpool(self):
        envpool = pytest.importorskip("envpool")
        envs = [envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=5) for _ in range(3)]
        data = gather(HostCollector(envs[:2], frames_per_batch=8 * 25, seed=0), 4)[:4]
        for key, value in next_step_streams(envs[2], None, data["action"].numpy()).items():
            assert torch.equal(data[key].squeeze(-1), torch.as_tensor(value)), key
        assert data["next", "done"].sum() > 8

    def test_mode_of_one_atari_env_is_not_that_of_another(self):
        vector_env = pytest.importorskip("ale_py.vector_env")
        first = vector_env.AtariVectorEnv("pong", 1, autoreset_mode="SameStep")
        vector_env.AtariVectorEnv("pong", 1, autoreset_mode="NextStep")  # shares its metadata
        assert HostCollector(first, frames_per_batch=4).groups[0].mode == "same_step"

    def test_wrapped(self):
        envs = gym.wrappers.vector.RecordEpisodeStatistics(vector("maze", 3, "SameStep"))
        data = gather(HostCollector(envs, frames_per_batch=3 * 6, seed=8), 3)
        assert check_against_loop(data, Maze, 8) > 3


def next_step_streams(envs, seed, actions):
    """Streams of real transitions of a NEXT_STEP vector env, by a loop over single values."""
    num_envs, steps = actions.shape
    rows = [[] for _ in range(num_envs)]
    observation, _ = envs.reset(seed=seed)
    resetting = np.zeros(num_envs, bool)
    while min(map(len, rows)) < steps:
        chosen = np.array([actions[n, min(len(rows[n]), steps - 1)] for n in range(num_envs)])
        following, reward, terminated, truncated, _ = envs.step(chosen)
        for n in range(num_envs):
            if not resetting[n]:
                rows[n].append((observation[n].copy(), following[n].copy(), reward[n], terminated[n], truncated[n]))
        resetting = terminated | truncated
        observation = following
    keys = ["observation", ("next", "observation"), ("next", "reward"), ("next", "terminated"), ("next", "truncated")]
    streams = {k: np.stack([np.stack([row[i] for row in r[:steps]]) for r in rows]) for i, k in enumerate(keys)}
    streams["next", "reward"] = streams["next", "reward"].astype(np.float32)
    return streams


class TestGymEnvsFaults:
    def test_no_zeroed_final_observation_and_no_transition_out_of_a_reset(self):
        """What GymEnv(name, num_envs=N) stores of a NEXT_STEP vector env, and this collector does not."""
        data = gather(HostCollector(vector("CartPole-v1", 4, "NextStep"), frames_per_batch=4 * 50, seed=0), 4)
        final = data["next", "observation"][data["next", "terminated"].squeeze(-1)]
        assert len(final) > 10
        fallen = (final[:, 0].abs() > 2.4) | (final[:, 2].abs() > 12 * 2 * torch.pi / 360)
        assert fallen.all()
        assert (data["next", "reward"] == 1).all()
        root_fallen = (data["observation"][..., 0].abs() > 2.4) | (data["observation"][..., 2].abs() > 0.2095)
        assert not root_fallen.any()


class TestNextStepIsCarried:
    @settings(max_examples=15, deadline=None)
    @given(
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
        num_steps=st.integers(1, 7),
        packed=st.booleans(),
    )
    def test_envs_at_any_pace(self, lengths, num_steps, packed):
        """Time limits that differ by env: the buffers grow, rows are carried over several batches, none is lost."""
        fns = [make("CartPole-v1", max_episode_steps=limit) for limit in lengths]
        envs = gym.vector.SyncVectorEnv(fns, autoreset_mode=AutoresetMode.NEXT_STEP)
        path = "packed" if packed else "direct"
        collecting = collector(path, envs, frames_per_batch=len(fns) * num_steps, seed=3)
        data = gather(collecting, 12)
        for n, fn in enumerate(fns):
            check_against_loop(data[n : n + 1], fn, 3, first=n)
        check_trajectories(data)
        assert collecting.frames == 12 * len(fns) * num_steps


class TestPolicies:
    @pytest.mark.parametrize("path", PATHS)
    def test_ways_agree_with_any_policy(self, path):
        device = "cuda" if path == "cuda" else "cpu"
        torch.manual_seed(0)
        net = nn.Linear(4, 2, device=device)
        spec = HostCollector(vector("CartPole-v1", 4, "SameStep"), frames_per_batch=4).specs.full_action_spec
        actor = DeviceActor(net, distribution_class=GumbelCategorical, param_keys=["logits"], spec=spec.to(device))
        envs = [vector("CartPole-v1", 2, "SameStep"), vector("CartPole-v1", 2, "SameStep")]
        collecting = collector(path, envs, actor, frames_per_batch=4 * 10, seed=0)
        data = gather(collecting, 4)
        check_against_loop(data, make("CartPole-v1"), 0)
        logits = net.cpu()(data["observation"])
        torch.testing.assert_close(data["logits"], logits, rtol=1e-4, atol=1e-5)
        log_prob = logits.log_softmax(-1).gather(-1, data["action"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(data["action_log_prob"], log_prob, rtol=1e-4, atol=1e-5)
        assert 0.2 < data["action"].float().mean() < 0.8

    def test_direct_and_packed_are_equal_bit_for_bit(self):
        batches = []
        for path in ("direct", "packed"):
            torch.manual_seed(0)
            policy = maze_policy()
            envs = vector("maze", 3, "NextStep")
            collecting = collector(path, envs, policy, frames_per_batch=3 * 4, init_random_frames=10, seed=2)
            batches.append(gather(collecting, 6))
        for key, value in batches[0].items(True, True):
            assert torch.equal(value, batches[1][key]), key

    def test_captured_on_a_cpu(self):
        collecting = collector("packed", vector("maze", 3, "SameStep"), maze_policy(), frames_per_batch=12, seed=2)
        collecting.mode = "graph"  # capture runs the function itself where there is no graph
        collecting._rows = [collecting._rows_of(group) for group in collecting.groups]
        check_against_loop(gather(collecting, 5), Maze, 2)

    def test_compiled_policy(self, traced):
        torch.manual_seed(0)
        policy = maze_policy()
        envs = vector("maze", 3, "SameStep")
        compiled = gather(HostCollector(envs, policy, frames_per_batch=12, mode="compile", seed=2), 3)
        eager = gather(HostCollector(vector("maze", 3, "SameStep"), policy, frames_per_batch=12, seed=2), 3)
        assert torch.equal(compiled["action"], eager["action"])
        torch.testing.assert_close(compiled["scores"], eager["scores"])

    def test_any_callable(self):
        policy = lambda td: td.set("action", td["state", "step"] % 5)  # noqa: E731
        data = gather(HostCollector(vector("maze", 2, "SameStep"), policy, frames_per_batch=6, seed=0), 3)
        assert torch.equal(data["action"], data["state", "step"] % 5)

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("mode", MODES)
    def test_noise_with_a_memory_begins_anew_with_each_episode(self, mode, path):
        """Brownian motion that never restarted would be far from its mean after ten episodes."""
        device = "cuda" if path == "cuda" else "cpu"
        envs = vector("Pendulum-v1", 8, mode, max_episode_steps=4)
        net = nn.Linear(3, 1, device=device)
        nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
        actor = DeterministicActor(net, spec=host_specs(envs, device).action_spec)
        noise = OUNoise(actor, theta=0.0, sigma_start=0.01)
        data = gather(collector(path, envs, noise, frames_per_batch=8 * 5, seed=0), 8)
        assert torch.equal(data["is_init"].view(8, 10, 4), torch.tensor([True, False, False, False]).expand(8, 10, 4))
        drawn = data["action"].view(8, 10, 4)
        step = drawn.diff(dim=-1).std()
        assert drawn[:, :, 0].abs().max() < 4 * step
        assert 0.7 < drawn[:, :, 0].std() / step < 1.4

    @pytest.mark.parametrize("mode", MODES)
    def test_random_frames_come_first_and_are_counted(self, mode):
        policy = TensorDictModule(Argmax(4, 2), in_keys=["observation"], out_keys=["scores", "action"])
        envs = vector("CartPole-v1", 4, mode)
        collecting = HostCollector(envs, policy, frames_per_batch=4 * 5, init_random_frames=30, seed=0)
        data = gather(collecting, 4)
        acted = data["scores"].abs().sum(-1) > 0
        assert not acted[:, :8].any()  # 30 frames of 4 envs: 8 steps
        assert acted[:, 12:].all()
        if mode != "NextStep":
            assert acted[:, 8:].all()
        assert (data["action"][:, :8] == 1).any()
        assert (data["action"][:, :8] == 0).any()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, 1.0, (2, 2), np.float32),
        spaces.Box(-1.0, 1.0, (3,), np.float64),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiDiscrete([3, 4], start=[1, -1]),
        spaces.MultiBinary(3),
        spaces.Discrete(4),
    ],
    ids=str,
)
def test_action_spaces(space):
    envs = vector("maze", 3, "SameStep", actions=space)
    collecting = HostCollector(envs, frames_per_batch=3 * 6, seed=1)
    data = gather(collecting, 2)  # the env itself checks that each action is one of its space's
    assert data["action"].dtype == collecting.action_spec.dtype
    assert data["action"].shape == (3, 12, *collecting.action_spec.shape[1:])
    assert all(collecting.action_spec.is_in(data["action"][:, t]) for t in range(12))


def test_calls_are_made_once(monkeypatch):
    made = []
    make_calls = PackedRows._make_calls
    monkeypatch.setattr(PackedRows, "_make_calls", lambda rows: (made.append(rows), make_calls(rows)))
    collecting = collector("packed", vector("maze", 3, "SameStep"), maze_policy(), frames_per_batch=12, seed=2)
    gather(collecting, 3)
    assert len(made) == len(set(made)) == 1  # a graph would be captured anew at each step
