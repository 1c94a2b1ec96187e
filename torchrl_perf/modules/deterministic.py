"""A deterministic policy for bounded, continuous actions: DDPG, TD3, AC-IQN."""

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_perf.functional.masked import of_rows
from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.specs import composite_of, leaf_of

Squash = Literal["tanh", "atan"]


class DeterministicActor(TensorDictModuleBase):
    """``a = middle + half width * squash(network(s))``, within the bounds of a spec (arXiv:1509.02971).

    It acts the same whatever the exploration type; other modules add noise. Bounds are buffers: ``.to(device)`` moves
    them, ``state_dict`` holds them. Nothing waits for the host.

    Keys read: ``in_keys``, and ``valid_key`` if given. Written: ``action_key``.

    Args:
        network: maps the inputs to ``[*, D]``.
        spec: the action's spec, bounded and floating point, with the same finite bounds in all rows.
        squash: ``"tanh"``, or ``"atan"``: ``2 / pi * atan(x)``, whose gradient falls as ``1 / x^2`` instead of
            ``exp(-2 |x|)``, so that saturated actions still learn (AC-IQN).
        in_keys: what the network reads.
        action_key: where the action is written.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist; the others get the middle of the bounds.
            A flag of an env, ``[N]`` or ``[N, 1]``, holds for all its agents.

    Attributes:
        module: the network.
        spec: a Composite that holds the action's spec, as TorchRL's collectors ask for.
        low: buffer ``[D]``.
        high: buffer ``[D]``.

    Raises:
        ValueError: for another kind of spec, bounds that are infinite or differ between rows, and an unknown squash.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        spec: TensorSpec,
        squash: Squash = "tanh",
        in_keys: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        valid_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        if squash not in ("tanh", "atan"):
            raise ValueError(f"squash: expected 'tanh' or 'atan', received {squash!r}. Remedy: one of the two.")
        low, high = action_bounds(leaf_of(spec, action_key))
        self.module, self.spec, self.squash = network, composite_of(spec, action_key), squash
        self.network_keys, self.action_key, self.valid_key = list(in_keys), action_key, valid_key
        self.in_keys = [*in_keys] if valid_key is None else [*in_keys, valid_key]  # pyright: ignore
        self.out_keys = [action_key]  # pyright: ignore
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def step(self, frames: int | Tensor = 1) -> None:
        """Nothing changes with time: there is no schedule."""

    def action(self, *inputs: Tensor) -> Tensor:
        """``[*, D]`` actions of the network's inputs, differentiable."""
        return self.bounded(self.module(*inputs))

    def bounded(self, raw: Tensor) -> Tensor:
        """``[*, D]`` actions of the network's outputs ``[*, D]``, differentiable."""
        wide, low, high = widened(raw), widened(self.low), widened(self.high)
        unit = torch.tanh(wide) if self.squash == "tanh" else wide.atan() * (2 / math.pi)
        action = (high + low) / 2 + (high - low) / 2 * unit
        # the rounded middle + half width may lie outside of the bounds
        return action.to(torch.promote_types(raw.dtype, self.low.dtype)).clamp(self.low, self.high)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes the action."""
        action = self.action(*[cast("Tensor", tensordict.get(key)) for key in self.network_keys])
        if self.valid_key is not None:
            valid = of_rows(cast("Tensor", tensordict.get(self.valid_key)), action.shape[:-1])
            # not a product: the network's output for an agent that does not exist may be NaN
            action = torch.where(valid.unsqueeze(-1), action, (self.high + self.low) / 2)
        tensordict.set(self.action_key, action)
        return tensordict
