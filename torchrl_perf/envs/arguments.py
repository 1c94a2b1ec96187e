"""Checks of the arguments that all envs share; each error says what was expected, what was received, and the remedy."""

from __future__ import annotations

import operator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

__all__ = ["check_count", "check_float", "check_seed", "read_action", "resolve_device"]


def check_count(name: str, argument: str, value: int, least: int = 1) -> None:
    """Raise ValueError unless ``value`` is an int of at least ``least``; ``name`` is the env's."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive int" if least == 1 else f"an int from {least} on"
        raise ValueError(f"{name} expected {argument} >= {least} (int), received {value!r}. Remedy: pass {kind}.")


def check_seed(name: str, seed: Any) -> int:
    """Return a seed as torch takes it, NumPy's integers too, or raise TypeError; ``name`` is the env's."""
    try:
        if isinstance(seed, bool):
            raise TypeError
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"{name} expected seed (int), received {seed!r}. Remedy: pass an int.") from None


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless ``dtype`` is float32 or float64."""
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name} expected dtype torch.float32 or torch.float64, received {dtype}. Remedy: pass one of the two."
        )


def resolve_device(name: str, device: torch.device | str | int | None) -> torch.device:
    """Return the device, or raise ValueError or RuntimeError where it does not exist on this machine."""
    try:
        resolved = torch.get_default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"{name} expected a torch device, received {device!r}. Remedy: pass 'cpu' or 'cuda'."
        ) from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} expected a CPU or CUDA device, received {resolved}. Remedy: pass 'cpu' or 'cuda'.")
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise RuntimeError(
                f"{name} expected one of {count} CUDA devices, received {resolved}. Remedy: pass device='cpu'."
            )
    return resolved


def read_action(
    name: str, tensordict: TensorDictBase, key: NestedKey, shape: torch.Size, *, discrete: bool, dtype: torch.dtype
) -> Tensor:
    """Return the action under ``key``, floats cast to ``dtype``; its shape and kind are known to the host.

    Args:
        name: the env's, for the message.
        tensordict: the root of a step.
        key: where the action is.
        shape: expected.
        discrete: whether indices are expected, else floats.
        dtype: of the floats.

    Raises:
        KeyError: without the entry.
        ValueError: for another shape or kind of numbers.
    """
    action = tensordict.get(key, None)
    if action is None:
        keys = ", ".join(map(repr, sorted(tensordict.keys(True), key=str)))
        raise KeyError(f"{name} expected the key {key!r}, received [{keys}]. Remedy: run a policy that writes it.")
    if action.shape != shape or action.is_floating_point() == discrete or action.dtype == torch.bool:
        wanted = "integer indices" if discrete else "floats"
        label = key if isinstance(key, str) else repr(key)
        raise ValueError(
            f"{name} expected {label} {tuple(shape)} of {wanted}, received {tuple(action.shape)} {action.dtype} on "
            f"{action.device}. Remedy: "
            + ("pass the index of the action, not one-hot." if discrete else "pass one float per action entry.")
        )
    return action if discrete or action.dtype == dtype else action.to(dtype)
