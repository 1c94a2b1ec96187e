"""The state of a recurrent policy between the steps of one group of host envs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.envs import Compose, TensorDictPrimer
from torchrl.modules.utils import get_primers_from_module

from torchrl_perf.collectors.delivery import under_next

__all__ = ["CarriedState", "carried_specs"]


def carried_specs(policy: Any) -> dict[NestedKey, tuple[TensorSpec, float]]:
    """The states that the modules of a policy ask an env for: spec of one row, and the number that it begins with.

    Args:
        policy: a module, or anything else, which carries nothing.
    """
    primer = get_primers_from_module(policy, warn=False, strict=False) if isinstance(policy, nn.Module) else None
    found: dict[NestedKey, tuple[TensorSpec, float]] = {}
    for part in primer.transforms if isinstance(primer, Compose) else [primer]:
        if isinstance(part, TensorDictPrimer):
            items = part.primers.items(True, True)
            found |= {key: (spec, float(part.default_value[key])) for key, spec in items}
    return found


class CarriedState:
    """Calls a policy with the state that it wrote at the step before, and with initial values where an episode begins.

    The state has one place in memory, which is written in place, so that a captured graph may hold the call.

    Args:
        call: the policy, which reads the observation, "is_init" and the states in this order, and gives back the
            values of ``out_keys``.
        out_keys: each state under "next" among them.
        specs: of one row of each state, and the number that it begins with.
        num_envs: n, envs of the group.
        device: where the policy acts.
    """

    def __init__(
        self,
        call: Callable[[list[Tensor]], list[Tensor]],
        out_keys: Sequence[NestedKey],
        specs: Mapping[NestedKey, tuple[TensorSpec, float]],
        num_envs: int,
        device: torch.device,
    ) -> None:
        self._call = call
        self._initial = list(specs.items())
        self._states = [
            torch.full((num_envs, *spec.shape), number, dtype=spec.dtype, device=device)
            for spec, number in specs.values()
        ]
        self._after = [list(out_keys).index(under_next(key)) for key in specs]

    def __call__(self, observation: list[Tensor]) -> list[Tensor]:
        """Outputs of the policy for observation leaves ``[n, *shape]`` and "is_init" ``[n, 1]``, its last entry."""
        began = observation[-1]
        states = []
        for state, (_, (_, number)) in zip(self._states, self._initial, strict=True):
            states.append(torch.where(began.view(-1, *(1,) * (state.ndim - 1)), number, state))
        values = self._call([*observation, *states])
        for state, index in zip(self._states, self._after, strict=True):
            state.copy_(values[index])
        return values

    def restart(self) -> None:
        """Begin anew: the policy did not act at this step."""
        for state, (_, (_, number)) in zip(self._states, self._initial, strict=True):
            state.fill_(number)
