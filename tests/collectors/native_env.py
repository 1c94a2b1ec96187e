"""An env that resets itself and has lost its final observations, as GPU simulators do."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase


class NativeEnv(EnvBase):
    """Observes ``100 episode + step``; env i is truncated at ``3 + i``; ``resets`` counts the calls of a reset.

    Args:
        num_envs: N, or None for no batch dim.
        keeps_final: whether the env overrides TorchRL's method and keeps the final observation under "next".
        dtype: of the observation.
    """

    def __init__(
        self,
        num_envs: int | None = None,
        *,
        keeps_final: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        batch = () if num_envs is None else (num_envs,)
        super().__init__(device=device, batch_size=batch)
        column = (*batch, 1)
        self.observation_spec = Composite(obs=Unbounded(column, dtype=dtype, device=device), shape=batch, device=device)
        self.action_spec = Categorical(2, shape=batch, device=device)
        self.reward_spec = Unbounded(column, device=device)
        names = ("done", "terminated", "truncated")
        flags = {name: Categorical(2, shape=column, dtype=torch.bool, device=device) for name in names}
        self.full_done_spec = Composite(**flags, shape=batch, device=device)
        self.dtype, self.keeps_final, self.resets = dtype, keeps_final, 0
        self.episode = torch.zeros(column, device=device)
        self.elapsed = torch.zeros(column, device=device)
        self.length = 3 + torch.arange(max(num_envs or 1, 1), device=device).reshape(column).float()
        self._torchrl_native_autoreset = True

    def _observed(self) -> Tensor:
        return (100 * self.episode + self.elapsed).to(self.dtype)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        self.resets += 1
        self.episode.add_(1)
        self.elapsed.zero_()
        return TensorDict({"obs": self._observed()}, self.batch_size).update(self.full_done_spec.zero())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.elapsed.add_(1)
        done = self.elapsed >= self.length
        self.final = self._observed()
        self.episode.add_(done)
        self.elapsed.masked_fill_(done, 0)
        entries = {"obs": self._observed(), "reward": torch.ones_like(self.elapsed)}
        flags = {"done": done, "truncated": done.clone(), "terminated": torch.zeros_like(done)}
        return TensorDict({**entries, **flags}, self.batch_size)

    def _native_autoreset_set_invalid_next_observation(self, tensordict: TensorDictBase) -> dict:
        if not self.keeps_final:
            return super()._native_autoreset_set_invalid_next_observation(tensordict)
        following = tensordict.get("next")
        fresh = following.get("obs").clone()
        following.set("obs", torch.where(following.get("done"), self.final, fresh))
        return {"obs": fresh}

    def _set_seed(self, seed: int | None) -> None:
        return
