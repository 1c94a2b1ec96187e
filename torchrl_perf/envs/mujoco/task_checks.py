"""Checks of the functions that make a task: what they read and what they return.

Dimension key: ``N`` worlds, ``O`` observed numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_functions", "check_pose", "check_rows", "check_unwritten", "try_function", "versions_of"]

METHODS = {"observe": "features", "reward": "reward", "terminated": "is_terminated"}
"""Of an env, which stand in for functions that were not given."""

FORMS = {"observe": "float32 [N, O]", "reward": "float32 [N]", "terminated": "bool [N]"}
REMEDIES = {
    "observe": "torch.cat of parts [N, ...] along the last dimension, and .to(torch.float32)",
    "reward": "one number for each world: [:, 0] of a column, .to(torch.float32)",
    "terminated": "a comparison of a column, such as state['qpos'][:, 2] < 0.2",
}


def check_functions(kind: type, base: type, **functions: Any) -> None:
    """Refuse functions of a task that are none, and those that would not be called.

    Args:
        kind: class of the env.
        base: the class whose methods call the functions.
        **functions: by name; None where none was given.

    Raises:
        TypeError: naming the argument.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"{name}: expected a function of states, received {type(function).__name__}. Remedy: {name}=lambda ..."
            )
        method = METHODS[name]
        if function is not None and getattr(kind, method) is not getattr(base, method):
            raise TypeError(
                f"{name}: expected none for {kind.__name__}, whose own method {method} is what counts, received a "
                f"function. Remedy: a subclass of {kind.__name__} with another {method}."
            )


def check_rows(name: str, value: Any, num_worlds: int) -> Tensor:
    """Return what a function of a task has returned; shapes and dtypes alone are read, and nothing waits.

    Args:
        name: ``"observe"``, ``"reward"`` or ``"terminated"``.
        value: what it returned.
        num_worlds: N.

    Raises:
        ValueError: for another form, which would be spread over the worlds in silence.
    """
    dtype, dims = torch.bool if name == "terminated" else torch.float32, 2 if name == "observe" else 1
    if isinstance(value, Tensor) and value.dtype == dtype and value.ndim == dims and value.shape[0] == num_worlds:
        return value
    found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"{name}: expected {FORMS[name]} with N = {num_worlds}, received {found}. Remedy: {REMEDIES[name]}."
    )


def check_pose(name: str, value: Any, shape: tuple[int, int]) -> None:
    """Refuse first positions or velocities that are no rows of the worlds.

    Raises:
        ValueError: naming them.
    """
    if not (isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == shape):
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"draw_pose: expected {name} float32 {list(shape)}, received {found}. Remedy: self.around(0.1) and "
            "self.normal(0.1) have this form."
        )


def try_function(name: str, function: Callable[..., Any], state: Mapping[str, Tensor], *inputs: Any) -> Tensor:
    """Call a function of a task once, before the first step does, and return what it returned.

    Args:
        name: as :func:`check_rows` has it.
        function: of a user.
        state: what it may read, by name.
        *inputs: what it is called with.

    Raises:
        KeyError: for a quantity that a state does not have.
        ValueError: as :func:`check_rows`, and for a function that writes into a state, which physics would go on from.
    """
    versions = versions_of(state)
    try:
        value = function(*inputs)
    except KeyError as error:
        raise KeyError(
            f"{name}: expected quantities among {', '.join(state)}, received {error}. Remedy: observed=({error},)."
        ) from error
    check_rows(name, value, state["qpos"].shape[0])
    check_unwritten(name, versions, state)
    return value


def versions_of(*states: Mapping[str, Tensor]) -> list[int]:
    """How often each tensor of states has been written to; nothing while a compiler looks on, which cannot say."""
    if torch.compiler.is_compiling():
        return []
    return [0 if value.is_inference() else value._version for state in states for value in state.values()]


def check_unwritten(name: str, versions: list[int], *states: Mapping[str, Tensor]) -> None:
    """Refuse a function, or a method in its place, that has written into states, from which physics would go on.

    Args:
        name: of the function.
        versions: :func:`versions_of` the states before.
        *states: those that it read.

    Raises:
        ValueError: naming what was written to.
    """
    if (after := versions_of(*states)) != versions:
        keys = [key for state in states for key in state]
        changed = dict.fromkeys(key for key, old, new in zip(keys, versions, after, strict=True) if old != new)
        raise ValueError(
            f"{name}: expected a function that leaves states as they are, received one that writes into "
            f"{', '.join(changed)}. Remedy: new tensors: x + 1 in place of x.add_(1) and x += 1."
        )
