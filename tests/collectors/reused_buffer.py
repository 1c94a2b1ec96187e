"""An env that writes every observation into one buffer; alone in its file, since worker processes import it."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Counter(gym.Env):
    """Counts 1, 2, 3 and ends; a reset counts from 0. One buffer for all observations and one dict for all infos."""

    def __init__(self, kind="box", length=3):
        box = spaces.Box(-10, 10, (1,), np.float32)
        self.kind, self.length = kind, length
        self.observation_space = {
            "box": box,
            "dict": spaces.Dict({"a": box, "b": box}),
            "tuple": spaces.Tuple([box, box]),
            "nested": spaces.Dict({"a": spaces.Tuple([box, box]), "b": box}),
        }[kind]
        self.action_space = spaces.Discrete(2)
        self.buffers = [np.zeros(1, np.float32) for _ in range(3)]
        self.info = {"count": np.zeros(1, np.float32), "inner": {"count": 0}}

    def _observe(self, count):
        for i, buffer in enumerate(self.buffers):
            buffer[:] = count + 10 * i if i == 0 else count
        self.info["count"][:] = count
        self.info["inner"]["count"] = count
        a, b, c = self.buffers
        return {"box": a, "dict": {"a": a, "b": b}, "tuple": (a, b), "nested": {"a": (a, b), "b": c}}[self.kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(0), self.info

    def step(self, action):
        self.count += 1
        return self._observe(self.count), float(self.count), self.count == self.length, False, self.info
