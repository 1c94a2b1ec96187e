"""Environments whose numbers say where they come from: env, step and episode."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_perf.envs import DeviceEnv

TIME_LIMIT = 4


def episode_length(env: Tensor | int, episode: Tensor | int) -> Tensor | int:
    """Steps until the episode terminates, 2 to 6; the time limit cuts those of 5 and 6."""
    return 2 + (3 * env + 2 * episode) % 5


class CountingEnv(DeviceEnv):
    """Observes (env, step, episode); reward ``10_000 env + 100 episode + step + action / 4``, exact in float32."""

    num_state = 3
    num_reset_noise = 1
    observation_low = (0.0, 0.0, 0.0)
    observation_high = (float("inf"),) * 3
    num_actions = 3

    def initial_state(self, uniform: Tensor) -> Tensor:
        """Step 0 of each env's next episode."""
        index = torch.arange(self.num_envs, dtype=uniform.dtype, device=uniform.device)
        # the parent calls this before it registers the state, for the first episode
        episode = self.state[:, 2] + 1 if "state" in self._buffers else torch.zeros_like(index)
        return torch.stack([index, torch.zeros_like(index), episode], -1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more step of the same episode."""
        env, step, episode = state.unbind(-1)
        step = step + 1
        reward = 10_000 * env + 100 * episode + step + action / 4
        return torch.stack([env, step, episode], -1), reward, step >= episode_length(env, episode)

    def observe(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state


class ReusingEnv(EnvBase):
    """``self.t += 1; return self.t`` for observation and reward: everything it returns is one buffer.

    Args:
        num_envs: N.
        masked: whether a reset leaves the rows outside its mask alone.
        length: steps of an episode, or None for no end.
    """

    def __init__(self, num_envs: int = 2, *, masked: bool = True, length: int | None = None) -> None:
        super().__init__(device="cpu", batch_size=[num_envs])
        column = (num_envs, 1)
        self.masked, self.length = masked, length
        self.t = torch.zeros(column)
        self.observation_spec = Composite(obs=Unbounded(column), shape=[num_envs])
        self.action_spec = Categorical(2, shape=(num_envs,))
        self.reward_spec = Unbounded(column)
        self.full_done_spec = Composite(
            done=Categorical(2, shape=column, dtype=torch.bool),
            terminated=Categorical(2, shape=column, dtype=torch.bool),
            shape=[num_envs],
        )

    def _done(self) -> Tensor:
        return torch.zeros_like(self.t, dtype=torch.bool) if self.length is None else self.t >= self.length

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.t += 1
        done = self._done()
        return TensorDict({"obs": self.t, "reward": self.t, "done": done, "terminated": done.clone()}, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or not self.masked:
            self.t.zero_()
        else:
            self.t.masked_fill_(mask, 0)
        done = torch.zeros_like(self.t, dtype=torch.bool)
        return TensorDict({"obs": self.t, "done": done, "terminated": done.clone()}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        return


def counting_action(observation: Tensor) -> Tensor:
    """The action of :func:`counting_policy`: ``(env + step) % 3``."""
    return ((observation[..., 0] + observation[..., 1]) % 3).long()


def counting_policy() -> TensorDictModule:
    """A deterministic policy that writes one more entry than the action."""
    module = torch.nn.Module()
    module.forward = lambda observation: (counting_action(observation), observation.sum(-1))
    return TensorDictModule(module, in_keys=["observation"], out_keys=["action", "note"])


def expected_rows(num_envs: int, num_steps: int, limit: int = TIME_LIMIT) -> dict[str, Tensor]:
    """What :class:`CountingEnv` gives, by a loop over envs and steps: ``[N, T]`` or ``[N, T, 3]`` entries."""
    rows: dict[str, list] = {
        key: [] for key in ("obs", "next_obs", "action", "reward", "done", "terminated", "truncated", "is_init")
    }
    for env in range(num_envs):
        step, episode = 0, 1  # the first reset begins episode 1; episode 0 is the constructor's
        columns: dict[str, list] = {key: [] for key in rows}
        for _ in range(num_steps):
            action = (env + step) % 3
            columns["obs"].append([env, step, episode])
            columns["is_init"].append(step == 0)
            step += 1
            terminated, truncated = step >= episode_length(env, episode), step >= limit
            columns["next_obs"].append([env, step, episode])
            columns["action"].append(action)
            columns["reward"].append(10_000 * env + 100 * episode + step + action / 4)
            columns["terminated"].append(terminated)
            columns["truncated"].append(truncated)
            columns["done"].append(terminated or truncated)
            if terminated or truncated:
                step, episode = 0, episode + 1
        for key, column in columns.items():
            rows[key].append(column)
    return {key: torch.tensor(value) for key, value in rows.items()}


def expected_trajectory_ids(done: Tensor) -> Tensor:
    """0..N-1 first, then a new number for each ended episode, in order of time, then env; ``done [N, T]``."""
    num_envs, num_steps = done.shape
    current, fresh, ids = list(range(num_envs)), num_envs, torch.zeros(num_envs, num_steps, dtype=torch.int64)
    for t in range(num_steps):
        for env in range(num_envs):
            ids[env, t] = current[env]
        for env in range(num_envs):
            if done[env, t]:
                current[env], fresh = fresh, fresh + 1
    return ids
