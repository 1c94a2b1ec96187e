"""Envs of users as the tests name them: classes and functions of each kind, and what is none."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_perf.envs import DeviceEnv

LENGTH = 4


class Corridor(gymnasium.Env):
    """Walk right for ``length`` steps; the reward is 1 at the end."""

    def __init__(self, length=LENGTH):
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._observe(), {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        ends = self.place >= self.length
        return self._observe(), float(ends), ends, False, {}

    def _observe(self):
        return np.array([self.place / self.length, 1.0], np.float32)


class Reacher(gymnasium.Env):
    """Move a point to 0; every episode has five steps."""

    def __init__(self):
        self.observation_space = spaces.Box(-10.0, 10.0, (1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.seen = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.np_random.uniform(-2, 2, 1).astype(np.float32), 0
        return self.place, {}

    def step(self, action):
        self.seen.append(float(action[0]))
        self.place, self.time = np.clip(self.place + action, -10, 10).astype(np.float32), self.time + 1
        return self.place, -float(abs(self.place[0])), False, self.time >= 5, {}


class Line(DeviceEnv):
    """A point that goes left or right, in tensors."""

    num_state, num_reset_noise, num_actions = 1, 1, 2
    observation_low, observation_high = (-10.0,), (10.0,)
    default_episode_steps = 6

    def __init__(self, num_envs, *, device=None, speed=0.1):
        self.speed = speed
        super().__init__(num_envs, device=device)

    def initial_state(self, uniform):
        return uniform - 0.5

    def dynamics(self, state, action):
        state = state + self.speed * (2.0 * action.unsqueeze(-1) - 1.0)
        return state, -state.squeeze(-1).abs(), state.squeeze(-1).abs() > 2.0

    def observe(self, state):
        return state


class Single(EnvBase):
    """A TorchRL env without a batch."""

    def __init__(self, device=None, goal=1.0):
        super().__init__(device=device)
        self.goal, self.time = goal, 0
        self.observation_spec = Composite(observation=Unbounded((2,)), shape=())
        self.action_spec = Categorical(2, shape=())
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict):
        self.time = 0
        return TensorDict({"observation": torch.zeros(2)}, [])

    def _step(self, tensordict):
        self.time += 1
        done = torch.tensor([self.time >= 5])
        reward = (tensordict["action"] == self.goal).float().view(1)
        return TensorDict(
            {"observation": torch.full((2,), self.time / 5), "reward": reward, "done": done, "terminated": done}, []
        )

    def _set_seed(self, seed):
        pass


class Batched(Single):
    """A TorchRL env that is told the size of its batch."""

    def __init__(self, batch_size, device=None):
        EnvBase.__init__(self, batch_size=batch_size, device=device)
        self.time = torch.zeros(*batch_size, 1)
        self.observation_spec = Composite(observation=Unbounded((*batch_size, 2)), shape=batch_size)
        self.action_spec = Bounded(-torch.ones(*batch_size, 1), torch.ones(*batch_size, 1))
        self.reward_spec = Unbounded((*batch_size, 1))

    def _reset(self, tensordict):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.time = self.time * 0 if mask is None else torch.where(mask.view_as(self.time), 0.0, self.time)
        return TensorDict({"observation": self.time.expand(-1, 2).clone()}, self.batch_size)

    def _step(self, tensordict):
        self.time = self.time + 1
        done = self.time >= 5
        entries = {"reward": tensordict["action"], "done": done, "terminated": done}
        return TensorDict({"observation": self.time.expand(-1, 2).clone(), **entries}, self.batch_size)


def make_corridor(length=LENGTH):
    """One Gymnasium env."""
    return Corridor(length)


def make_line(num_envs, device):
    """An env in tensors."""
    return Line(num_envs, device=device)


def make_vector(num_envs):
    """A vector env of as many envs as are asked for."""
    from gymnasium.vector import AutoresetMode

    return SyncVectorEnv([Corridor] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def make_three():
    """A vector env of three envs, whatever is asked for."""
    return make_vector(3)


def make_nothing():
    """What is no env."""
    return 3


class Nothing:
    """A class that is no env."""


number = 5


class Mixed(gymnasium.Env):
    """An image, numbers, indices and flags; every episode has three steps."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (16, 16, 3), np.uint8),
        vector=spaces.Box(-1, 1, (3,), np.float64),
        kind=spaces.Discrete(4, start=2),
        grid=spaces.Box(0, 5, (2, 3), np.int32),
        many=spaces.MultiDiscrete([2, 3]),
        action_mask=spaces.MultiBinary(3),
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.time += 1
        return self.observation_space.sample(), 1.0, False, self.time >= 3, {}


class MixedBounded(Mixed):
    """The same with bounded continuous actions."""

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Pixels(Mixed):
    """An image for which there are two kinds of convolutions."""

    observation_space = spaces.Dict(image=spaces.Box(0, 255, (40, 40, 1), np.uint8))


class PixelsBounded(Pixels):
    """The same with bounded continuous actions."""

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)


class MixedChoices(Mixed):
    """The same with several choices at once."""

    action_space = spaces.MultiDiscrete([2, 3])


class Parts(Mixed):
    """The same with an action of two parts."""

    action_space = spaces.Dict(kind=spaces.Discrete(2), amount=spaces.Box(-1.0, 1.0, (1,), np.float32))


class Needy(Corridor):
    """An env that cannot be made without an argument."""

    def __init__(self, goal):
        super().__init__(length=goal)
