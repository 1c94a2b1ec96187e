"""Shapes of nested inputs and outputs, for comparing one call with the next."""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

Leaf = tuple[str, object]

_CONSTANT = bool | int | float | str | None
"""Asked about first: tensordict notes each type that it is asked about, and compiled code made before is void then."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value with their paths.

    Args:
        value: tensor, TensorDict or tensorclass, or a nested tuple, list or dict of them; anything else is a leaf.
        path: path of ``value`` itself.

    Yields:
        ``(path, leaf)``, TensorDict keys in their stored order.
    """
    if isinstance(value, Tensor | _CONSTANT):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif is_tensor_collection(value):
        for key, leaf in value.items(True, True):
            yield f"{path}[{key!r}]", leaf
    else:
        yield path, value


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors among the leaves, in order."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def signature(value: Any, path: str = "") -> dict[str, object]:
    """Return what must not change from call to call: path to (shape, dtype, device), or to the value of a constant."""
    return {path: _kind(leaf) for path, leaf in leaves(value, path)}


def _kind(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    if isinstance(leaf, _CONSTANT):
        return leaf
    return type(leaf)


def _text(kind: object) -> str:
    if isinstance(kind, tuple):
        shape, dtype, device = kind
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    return kind.__name__ if isinstance(kind, type) else repr(kind)


def difference(expected: dict[str, object], received: dict[str, object]) -> str | None:
    """Return the first difference between two signatures in words, or None.

    Args:
        expected: signature of the first call.
        received: signature of this call.
    """
    if expected == received:
        return None
    missing = [path for path in expected if path not in received]
    added = [path for path in received if path not in expected]
    if missing or added:
        return f"expected the entries {list(expected)}, received {list(received)} (missing {missing}, new {added})"
    path = next(path for path, kind in expected.items() if received[path] != kind)
    return f"expected {_text(expected[path])} at {path or 'the value'}, received {_text(received[path])}"


def detached(value: Any) -> Any:
    """Return a value without its autograd graph; objects that need no gradient come back as they are."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(detached(item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(detached(item) for item in value)
    if not isinstance(value, _CONSTANT) and is_tensor_collection(value):
        return value.detach() if any(leaf.requires_grad for leaf in tensors(value)) else value
    return value


def shallow(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with each TensorDict copied without its tensors, so that new keys stay in the copy."""
    return tuple(arg if isinstance(arg, Tensor) else arg.copy() for arg in args)


def cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with fresh memory, strides kept."""
    return tuple(torch.clone(arg.detach()) if isinstance(arg, Tensor) else arg.detach().clone() for arg in args)
