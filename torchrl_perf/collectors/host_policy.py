"""A policy as a function of observation leaves, without a TensorDict where the policy needs none."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_perf.collectors.host_spaces import DONE_KEYS
from torchrl_perf.runtime.upstream.modules import has_hooks

Policy = Callable[[TensorDictBase], TensorDictBase]


def policy_device(policy: Policy | None, device: torch.device | str | None) -> torch.device:
    """``device``, or else the one of the policy's parameters or buffers, or else the CPU; with its index on CUDA.

    Raises:
        ValueError: for CUDA where there is none.
    """
    if device is None:
        tensors = (*policy.parameters(), *policy.buffers()) if isinstance(policy, torch.nn.Module) else ()
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    if not torch.cuda.is_available():
        raise ValueError(
            f"device: expected one of this machine, received {device}, and PyTorch sees no CUDA. Remedy: device='cpu'."
        )
    return torch.device("cuda", torch.cuda.current_device())


class PolicyCall:
    """Calls a policy on a list of root entries (observation leaves, ``is_init``) and gives back the listed outputs.

    A plain ``TensorDictModule`` is unwrapped: its network is called on the tensors themselves, which on a CPU saves
    more time than a small network takes. Any other policy gets a TensorDict with these entries and the done flags
    (false, since a root is never done).

    Args:
        policy: a TensorDict module or function.
        keys: of the root entries.
        out_keys: outputs to give back, in this order.
    """

    def __init__(self, policy: Policy, keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]) -> None:
        self.policy, self.keys, self.out_keys = policy, list(keys), list(out_keys)
        self._network: torch.nn.Module | None = None
        if type(policy) is TensorDictModule and self._is_plain(policy):
            self._network = policy.module
            self._inputs = [self.keys.index(key) for key in policy.in_keys]
            self._order = [list(policy.out_keys).index(key) for key in self.out_keys]

    def _is_plain(self, policy: TensorDictModule) -> bool:
        known = set(policy.in_keys) <= set(self.keys) and set(self.out_keys) == set(policy.out_keys)
        return known and not has_hooks(policy)

    def __call__(self, observation: list[Tensor]) -> list[Tensor]:
        """Outputs ``[n, *shape]`` for leaves ``[n, *shape]``."""
        if self._network is not None:
            values: Any = self._network(*[observation[i] for i in self._inputs])
            values = (values,) if isinstance(values, Tensor) else values
            return [values[i] for i in self._order]
        first = observation[0]
        root: dict[Any, Any] = dict(zip(self.keys, observation, strict=True))
        flag = torch.zeros((len(first), 1), dtype=torch.bool, device=first.device)
        td = TensorDict(root | dict.fromkeys(DONE_KEYS, flag), [len(first)], device=first.device)
        acted = self.policy(td)
        return [acted.get(key) for key in self.out_keys]
