"""Time limits that name the env that hangs, entries of ``info`` as observations, and seeds that share no stream."""

import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from host_oracle import MODES, collector, gather
from tensordict.nn import TensorDictModule
from torchrl.data import Binary, Unbounded

from torchrl_perf.collectors import HostCollector, HostEnvError
from torchrl_perf.runtime.seeds import block_seed, independent_seed, stream_seeds


class Hanging(gym.Env):
    """Hangs in its step or reset where it is env ``unlucky`` of its vector env."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, number, unlucky, where, release=None):
        self.hangs, self.where, self.release = number == unlucky, where, release

    def _maybe_hang(self, where):
        if self.hangs and where == self.where:
            self.release.wait(30) if self.release is not None else time.sleep(30)

    def reset(self, *, seed=None, options=None):
        self._maybe_hang("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._maybe_hang("step")
        return np.zeros(1, np.float32), 0.0, False, False, {}


def hanging(kind, where, release=None, num_envs=3):
    fns = [lambda i=i: Hanging(i, 1, where, release) for i in range(num_envs)]
    if kind == "sync":
        return SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    return AsyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP, context="fork")


class TestTimeout:
    @pytest.mark.parametrize("where", ["step", "reset"])
    @pytest.mark.parametrize("kind", ["async", "wrapped"])
    def test_a_worker_process_that_hangs_is_named_and_ended(self, kind, where):
        inner = hanging("async", where)
        envs = gym.wrappers.vector.RecordEpisodeStatistics(inner) if kind == "wrapped" else inner
        collecting = HostCollector(envs, frames_per_batch=3 * 4, timeout=0.5)
        begin = time.monotonic()
        with pytest.raises(
            HostEnvError, match=rf"env 1 .*a {where} to take at most timeout=0.5 s.*for env 1"
        ) as caught:
            collecting.collect()
        assert time.monotonic() - begin < 60
        assert caught.value.env_index == 1
        assert not any(process.is_alive() for process in inner.processes)

    @pytest.mark.parametrize("where", ["step", "reset"])
    @pytest.mark.parametrize("groups", [1, 2])
    def test_an_env_in_a_thread_that_hangs_is_named(self, where, groups):
        release = threading.Event()
        others = [hanging("sync", "never")] * 0 + [hanging("sync", "never") for _ in range(groups - 1)]
        collecting = HostCollector(
            [*others, hanging("sync", where, release)], frames_per_batch=12 * groups, timeout=0.5
        )
        index = 3 * (groups - 1) + 1
        with pytest.raises(HostEnvError, match=rf"env {index} \(number 1 of its group\)") as caught:
            collecting.collect()
        release.set()
        assert (caught.value.env_index, caught.value.group) == (index, groups - 1)

    def test_envs_that_answer_in_time_are_left_alone(self):
        plain = gather(HostCollector(SyncVectorEnv([lambda: gym.make("CartPole-v1")]), frames_per_batch=8, seed=0), 3)
        limited = HostCollector(
            SyncVectorEnv([lambda: gym.make("CartPole-v1")]), frames_per_batch=8, seed=0, timeout=60
        )
        assert (plain == gather(limited, 3)).all()
        limited.shutdown()

    @pytest.mark.parametrize("timeout", [0, -1.0, True, "soon"])
    def test_refused(self, timeout):
        with pytest.raises(ValueError, match="timeout: expected 'auto', None or seconds above 0"):
            HostCollector(hanging("sync", "never"), frames_per_batch=3, timeout=timeout)


class Informed(gym.Env):
    """Tells in its info which actions are allowed (never the last one taken), and more where it ends."""

    observation_space = spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length=3, extra=True):
        self.length, self.extra = length, extra

    def _info(self):
        mask = np.ones(3, bool)
        mask[self.count % 3] = False
        info = {"mask": mask, "inner": {"count": self.count}}
        if self.extra:
            info["late"] = float(self.count)
        return info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), self._info()

    def step(self, action):
        assert self._info()["mask"][action], "an action that the mask forbids"
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, self.count == self.length, False, self._info()


def informed(mode, kind="sync", lengths=(3, 2)):
    fns = [lambda n=n: Informed(n, extra=n == 3) for n in lengths]
    if kind == "async":
        return AsyncVectorEnv(fns, autoreset_mode=AutoresetMode(mode), context="fork")
    return SyncVectorEnv(fns, autoreset_mode=AutoresetMode(mode))


def masked_policy():
    """The allowed action with the lowest number."""
    return TensorDictModule(lambda mask: mask.long().argmax(-1), in_keys=["mask"], out_keys=["action"])


SPECS = {
    "mask": Binary(3, dtype=torch.bool),
    ("inner", "count"): Unbounded((), dtype=torch.int64),
    "late": Unbounded(()),
}


class TestInfoKeys:
    @pytest.mark.parametrize("path", ["direct", "packed"])
    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize("mode", MODES)
    def test_values_at_every_step_end_and_reset(self, mode, kind, path):
        envs = informed(mode, kind)
        collecting = collector(path, envs, masked_policy(), frames_per_batch=2 * 6, info_keys=SPECS)
        data = gather(collecting, 2)
        collecting.shutdown()
        for n, length in enumerate((3, 2)):
            count = torch.tensor([t % length for t in range(12)])
            assert torch.equal(data["inner", "count"][n], count)
            assert torch.equal(data["next", "inner", "count"][n], count + 1)
            assert torch.equal(data["mask"][n], ~torch.nn.functional.one_hot(count % 3, 3).bool())
            assert torch.equal(data["next", "mask"][n], ~torch.nn.functional.one_hot((count + 1) % 3, 3).bool())
            late = count if length == 3 else 0 * count  # the second env never tells: its `_late` is false
            assert torch.equal(data["late"][n], late.float())
        assert data["mask"].dtype == torch.bool
        assert collecting.observation_spec["mask"].shape == (2, 3)

    def test_specs_are_learned_from_a_reset(self):
        envs = informed("SameStep")
        collecting = HostCollector(envs, masked_policy(), frames_per_batch=12, info_keys=["mask", ("inner", "count")])
        data = collecting.collect()
        assert data["mask"].dtype == torch.bool
        assert data["next", "inner", "count"][0].tolist() == [1, 2, 3, 1, 2, 3]

    def test_spaces(self):
        keys = {"mask": spaces.MultiBinary(3), "late": spaces.Box(0, 9, (), np.float32)}
        data = HostCollector(informed("SameStep"), masked_policy(), frames_per_batch=2, info_keys=keys).collect()
        assert data["mask"].dtype == torch.int8

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            (["absent"], "expected 'absent' in the info of a reset, received .*'mask'.*Remedy"),
            (["action"], "info_keys: expected keys other than"),
            (["observation"], "info_keys: expected keys other than"),
            ({"mask": 3}, "expected a gymnasium space or a TorchRL spec"),
            ("mask", "expected a list or a mapping"),
            ([("inner",)], "expected an array below"),
        ],
    )
    def test_refused_at_construction(self, keys, message):
        with pytest.raises(ValueError, match=message):
            HostCollector(informed("SameStep"), frames_per_batch=12, info_keys=keys)

    def test_values_of_another_shape(self):
        with pytest.raises(HostEnvError, match=r"info_keys\['mask'\]: expected values of shape \[4\], received \[3\]"):
            HostCollector(informed("SameStep"), frames_per_batch=12, info_keys={"mask": Binary(4)}).collect()


class Seeded(gym.Env):
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    seeds = ()

    def reset(self, *, seed=None, options=None):
        Seeded.seeds = [*Seeded.seeds, seed]
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


def seeds_of(seed, sizes, load=None):
    Seeded.seeds = []
    envs = [SyncVectorEnv([Seeded] * n, autoreset_mode=AutoresetMode.DISABLED) for n in sizes]
    collecting = HostCollector(envs, frames_per_batch=sum(sizes), seed=seed)
    if load is not None:
        collecting.load_state_dict(load)
    collecting.collect()
    state = collecting.state_dict()
    collecting.shutdown()
    return [s for s in Seeded.seeds if s is not None], state


class TestSeeds:
    @pytest.mark.parametrize("sizes", [(1,), (8,), (3, 5), (64,)])
    def test_seeds_of_runs_share_no_stream(self, sizes):
        runs = [seeds_of(seed, sizes)[0] for seed in (0, 1, 2, 7, 8, 46_340, 123_456)]
        every = [seed for run in runs for seed in run]
        assert len(set(every)) == len(every) == 7 * sum(sizes)
        assert all(type(seed) is int and seed >= 0 for seed in every)

    def test_groups_get_what_one_vector_env_gets(self):
        assert seeds_of(3, (8,))[0] == seeds_of(3, (3, 5))[0]

    def test_a_resumed_run_and_one_resumed_later_share_no_stream(self):
        first, state = seeds_of(0, (8,))
        later = {**state, "iter": state["iter"] + 5}
        runs = [first, seeds_of(0, (8,), state)[0], seeds_of(0, (8,), later)[0], seeds_of(1, (8,))[0]]
        assert len({seed for run in runs for seed in run}) == 32
        assert seeds_of(0, (8,), state)[0] == runs[1]

    def test_any_number_of_envs(self):
        every = [number for seed in range(4) for number in stream_seeds(seed, 50_000)]
        assert len(set(every)) == len(every)

    def test_small_runs_fit_31_bits_and_so_do_all_their_resumptions(self):
        numbers = [n for start in (0, 1, 50, 10_000) for n in stream_seeds(7, 1_000, start=start)]
        assert max(numbers) < 2**31
        assert len(set(numbers)) == len(numbers)

    def test_blocks_do_not_overlap(self):
        starts = sorted(block_seed(seed, 5, number=number) for seed in range(20) for number in range(3))
        assert min(np.diff(starts)) >= 5

    def test_other_generators_are_independent(self):
        numbers = [independent_seed(seed, purpose) for seed in range(50) for purpose in range(4)]
        assert len(set(numbers)) == 200
        assert min(numbers) > 2**64

    @pytest.mark.parametrize("seed", [-1, 1.5, True, "0"])
    def test_refused(self, seed):
        with pytest.raises(ValueError, match="seed: expected None or an integer from 0 on, received"):
            seeds_of(seed, (2,))
