"""Final observations of envs that write every observation into one buffer, in every vector env and mode."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from host_oracle import MODES, collector, gather
from reused_buffer import Counter

from torchrl_perf.collectors import HostCollector, HostEnvError

KINDS = ["box", "dict", "tuple", "nested"]


class Passing(gym.Wrapper):
    """A wrapper that passes the buffer on."""


def counts(data):
    """Counts of the first env, at the root and below next, of every leaf of its observation."""
    skip = {"action", "done", "terminated", "truncated", "reward", "is_init", "collector", "next"}
    found = []
    for part in (data, data["next"]):
        kept = part.exclude(*skip)
        found.append([kept[key][0].flatten().tolist() for key in kept.keys(True, True)])
    return found


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("vectorised", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("kind", KINDS)
def test_true_final_observation_of_a_reused_buffer(kind, vectorised, wrapped):
    make = (lambda: Passing(Counter(kind))) if wrapped else (lambda: Counter(kind))
    options = {"context": "fork"} if vectorised is AsyncVectorEnv else {}
    envs = vectorised([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP, **options)
    collecting = HostCollector(envs, frames_per_batch=2 * 4)
    data = gather(collecting, 2)
    collecting.shutdown()
    roots, nexts = counts(data)
    assert roots == [[0, 1, 2, 0, 1, 2, 0, 1]] * len(roots)
    assert nexts == [[1, 2, 3, 1, 2, 3, 1, 2]] * len(nexts)


@pytest.mark.parametrize("path", ["direct", "packed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [False, True])
def test_every_mode_and_way_gives_the_same_batch(mode, path, copy):
    envs = [SyncVectorEnv([Counter] * n, autoreset_mode=AutoresetMode(mode), copy=copy) for n in (1, 2)]
    roots, nexts = counts(gather(collector(path, envs, frames_per_batch=3 * 4), 2))
    assert (roots, nexts) == ([[0, 1, 2, 0, 1, 2, 0, 1]], [[1, 2, 3, 1, 2, 3, 1, 2]])


@pytest.mark.parametrize(("context", "shared_memory"), [("fork", False), ("fork", True), ("spawn", True)])
def test_worker_processes_of_every_kind(context, shared_memory):
    envs = AsyncVectorEnv(
        [Counter], autoreset_mode=AutoresetMode.SAME_STEP, context=context, shared_memory=shared_memory
    )
    collecting = HostCollector(envs, frames_per_batch=4, info_keys=["count", ("inner", "count")])
    data = collecting.collect().clone()
    collecting.shutdown()
    assert data["next", "observation"][0].flatten().tolist() == [1, 2, 3, 1]
    assert data["next", "count"][0].flatten().tolist() == [1, 2, 3, 1]
    assert data["next", "inner", "count"][0].tolist() == [1, 2, 3, 1]
    assert data["count"][0].flatten().tolist() == [0, 1, 2, 0]


class Doubled(gym.vector.VectorWrapper):
    """Doubles observations, final ones among them."""

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.env.step(actions)
        if "final_obs" in info:
            for i in np.flatnonzero(info["_final_obs"]):
                info["final_obs"][i] = 2 * info["final_obs"][i]
        return 2 * observation, reward, terminated, truncated, info


def test_vector_wrappers_see_the_true_final_observation():
    envs = Doubled(SyncVectorEnv([Counter, lambda: Counter(length=5)], autoreset_mode=AutoresetMode.SAME_STEP))
    _, nexts = counts(gather(HostCollector(envs, frames_per_batch=2 * 4), 1))
    assert nexts == [[2, 4, 6, 2]]


def test_the_envs_are_left_as_they_were():
    envs = SyncVectorEnv([Counter], autoreset_mode=AutoresetMode.SAME_STEP)
    collecting = HostCollector(envs, frames_per_batch=4)
    collecting.collect()
    collecting.shutdown(close_env=False)
    assert "step" not in vars(envs.envs[0])
    again = HostCollector(envs, frames_per_batch=4)
    assert counts(again.collect())[1] == [[1, 2, 3, 1]]


class OwnVector(gym.vector.VectorEnv):
    """A vector env of unknown make in mode SAME_STEP.

    ``keeps``: "copies" of the final observations, "references" to its envs' buffers, or its own "batch", which the
    reset overwrites.
    """

    def __init__(self, keeps, num_envs=2, home=False):
        self.num_envs, self.keeps, self.home = num_envs, keeps, home
        self.single_observation_space = spaces.Box(-10, 10, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.batch = np.zeros((num_envs, 1), np.float32)
        self.buffers = [np.zeros(1, np.float32) for _ in range(num_envs)]

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self.count = 0
        self.batch[:] = 0
        return self.batch, {}

    def step(self, actions):
        self.count += 1
        end = self.count == 3
        value = 0 if end and self.home else self.count
        self.batch[:] = value
        info = {}
        for buffer in self.buffers:
            buffer[:] = value
        if end:
            final = np.full(self.num_envs, None, dtype=object)
            for i, buffer in enumerate(self.buffers):
                final[i] = buffer.copy() if self.keeps == "copies" else buffer
            info["final_obs"] = self.batch if self.keeps == "batch" else final
            info["_final_obs"] = np.ones(self.num_envs, bool)
            self.count = 0
            self.batch[:] = 0
            for buffer in self.buffers:
                buffer[:] = 0
        ends = np.full(self.num_envs, end)
        return self.batch, np.ones(self.num_envs), ends, np.zeros_like(ends), info


def test_vector_envs_of_unknown_make_that_keep_final_observations_pass():
    data = gather(HostCollector(OwnVector("copies"), frames_per_batch=2 * 6), 3)
    assert data["next", "observation"][0].flatten().tolist() == [1, 2, 3] * 6


@pytest.mark.parametrize(("keeps", "message"), [("batch", "shares the memory"), ("references", "equals the observ")])
def test_vector_envs_of_unknown_make_that_overwrite_them_are_refused(keeps, message):
    with pytest.raises(HostEnvError, match=rf"{message}.*Remedy: let the env return a copy"):
        gather(HostCollector(OwnVector(keeps), frames_per_batch=2 * 6), 1)


def test_random_actions_and_envs_of_one_seed_have_streams_of_their_own():
    envs = SyncVectorEnv([Counter] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    collecting = HostCollector(envs, frames_per_batch=8, seed=0)
    collecting.collect()
    states = [env.np_random.bit_generator.state["state"]["inc"] for env in envs.envs]
    states += [space.np_random.bit_generator.state["state"]["inc"] for space in collecting._action_spaces]
    assert len(set(states)) == 3


def test_a_reset_in_the_middle_begins_new_episodes_of_the_same_streams():
    class Drawing(Counter):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            self.drawn = self.np_random.uniform(-5, 5)
            observation[:] = self.drawn
            return observation, info

    envs = SyncVectorEnv([Drawing], autoreset_mode=AutoresetMode.SAME_STEP)
    collecting = HostCollector(envs, frames_per_batch=1, seed=0)
    first = collecting.collect()["observation"].clone()
    collecting.reset()
    second = collecting.collect()["observation"].clone()
    assert not torch.equal(first, second)
    collecting.set_seed(0)
    assert torch.equal(collecting.collect()["observation"], first)
