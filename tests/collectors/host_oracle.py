"""A scalar gymnasium loop that replays the actions of a host collector's batches, and the envs of its tests."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_perf.collectors import HostCollector
from torchrl_perf.collectors.host_packed import PackedRows
from torchrl_perf.runtime.seeds import stream_seeds

MODES = ["NextStep", "SameStep", "Disabled"]
PATHS = ["direct", "packed", pytest.param("cuda", marks=pytest.mark.gpu)]


class Maze(gym.Env):
    """Dict observations that name step, episode and env, in buffers that each step overwrites; both kinds of end.

    A reset makes new buffers: gymnasium's vector envs in mode SAME_STEP keep the final observation by reference and
    reset before anyone can copy it.

    Episode k of an env with seed s lasts ``2 + (s + k) % 4`` steps and ends by truncation if k is odd.
    """

    def __init__(self, actions=None):
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (2, 3), np.uint8),
                "state": spaces.Dict({"step": spaces.Discrete(10, start=1), "pos": spaces.Box(-1e6, 1e6, (2,))}),
            }
        )
        self.action_space = actions or spaces.Discrete(5, start=-2)
        self.identity, self.episode = 0, -1

    def _observe(self):
        self.image[:] = (10 * self.episode + self.elapsed) % 256
        self.pos[:] = self.identity, self.episode
        return {"image": self.image, "state": {"step": self.elapsed + 1, "pos": self.pos}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.identity, self.episode = seed, -1
        self.episode += 1
        self.elapsed = 0
        self.image, self.pos = np.zeros((2, 3), np.uint8), np.zeros(2, np.float32)
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.elapsed += 1
        ended = self.elapsed >= 2 + (self.identity + self.episode) % 4
        reward = self.elapsed + 0.1 * float(np.sum(action))
        return self._observe(), reward, ended and self.episode % 2 == 0, ended and self.episode % 2 == 1, {}


def make(name, **options):
    """A function that makes the env: of gymnasium by id, or the one above."""
    return partial(Maze, **options) if name == "maze" else partial(gym.make, name, **options)


def vector(name, num_envs, mode, *, kind="sync", copy=True, **options):
    """A vector env of equal envs."""
    fns = [make(name, **options)] * num_envs
    if kind == "async":
        return AsyncVectorEnv(fns, autoreset_mode=AutoresetMode(mode), context="fork", copy=copy)
    return SyncVectorEnv(fns, autoreset_mode=AutoresetMode(mode), copy=copy)


class PackedCollector(HostCollector):
    """Takes the way over packed records on a CPU too."""

    def _rows_of(self, group):
        lockstep = group.mode != "next_step"
        return PackedRows(
            self._store, group.offset, group.num_envs, lockstep=lockstep, graph=self.mode != "eager", policy=self._act
        )


def collector(path, envs, policy=None, **options):
    """A collector on one of the ways: arrays on a CPU, packed records on a CPU, CUDA graphs."""
    if path == "direct":
        return HostCollector(envs, policy, **options)
    if path == "packed":
        return PackedCollector(envs, policy, **options)
    return HostCollector(envs, policy, device="cuda", **options)


def gather(collecting, batches):
    """``batches`` batches along time, on the CPU."""
    return torch.cat([collecting.collect().clone() for _ in range(batches)], 1).cpu()


def leaves(space, observation, key=()):
    """``{key: array}`` of one observation."""
    if isinstance(space, spaces.Dict):
        return {k: v for name, sub in space.items() for k, v in leaves(sub, observation[name], (*key, name)).items()}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return {
            k: v
            for i, sub in parts
            for k, v in leaves(sub, observation[i], (*(key or ("observation",)), str(i))).items()
        }
    value = np.array(observation)
    if isinstance(space, spaces.Discrete):
        value = value - space.start
    return {key or ("observation",): torch.as_tensor(value)}


def check_against_loop(data, make_env, seed, *, first=0, start=0, total=None):
    """Every field of every row, env by env, against a scalar env that gets the same actions."""
    ids = 0
    seeds = stream_seeds(seed, data.shape[0], first=first, start=start, total=total)
    for n in range(data.shape[0]):
        env = make_env()
        observation, _ = env.reset(seed=seeds[n])
        began = True
        for t in range(data.shape[1]):
            row = data[n, t]
            same(row, leaves(env.observation_space, observation), (), (n, t))
            action = np.asarray(row["action"])
            if isinstance(env.action_space, spaces.Discrete):
                action = int(action) + int(env.action_space.start)
            observation, reward, terminated, truncated, _ = env.step(action)
            same(row, leaves(env.observation_space, observation), ("next",), (n, t))
            assert torch.equal(row["next", "reward"], torch.tensor([reward], dtype=torch.float32)), (n, t)
            flags = [row["next", key].item() for key in ("terminated", "truncated", "done")]
            assert flags == [terminated, truncated, terminated or truncated], (n, t)
            assert not any(row[key].item() for key in ("terminated", "truncated", "done", ("next", "is_init")))
            assert row["is_init"].tolist() == [began], (n, t)
            began = terminated or truncated
            if began:
                observation, _ = env.reset()
                ids += 1
        env.close()
    return ids


def same(row, expected, prefix, place):
    """Each leaf of an observation, bit for bit, float64 as float32."""
    for key, value in expected.items():
        got = row[(*prefix, *key)]
        assert torch.equal(got, value.to(got.dtype)), (place, prefix, key, got, value)


def check_trajectories(data):
    """A number belongs to one env, changes behind each end and nowhere else."""
    ids, done = data["collector", "traj_ids"], data["next", "done"].squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    owners = [set(row.tolist()) for row in ids]
    assert sum(map(len, owners)) == len(set().union(*owners))
    assert (ids[:, 1:] >= ids[:, :-1]).all()


class Argmax(nn.Linear):
    """Scores and the best action."""

    def forward(self, x):
        scores = super().forward(x)
        return scores, scores.argmax(-1)


def maze_policy(device="cpu", out_keys=("scores", "action")):
    """A greedy policy of the maze."""
    return TensorDictModule(Argmax(2, 5, device=device), in_keys=[("state", "pos")], out_keys=list(out_keys))
