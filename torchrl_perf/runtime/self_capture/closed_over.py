"""Tensors that a call reads though it was not given them: which they are, and the places that hold them.

A graph reads such a tensor where it lies. Written in place it is read anew; replaced by another it would be read
stale, so its place has to be looked at before each call, as those of parameters are.
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_perf.runtime.upstream.tensordicts import entries_of
from torchrl_perf.runtime.waits.frames import call_chain, locate

__all__ = ["Place", "Read", "ReadsNoted", "address", "contents", "numbers_of", "places_of"]

NODES = 20_000
"""Objects that are looked through for the holder of a tensor."""
LIBRARIES = ("torch", "tensordict", "torchrl", "torchrl_perf", "numpy", "functools", "builtins")
"""Packages whose functions keep no tensors in their globals."""


class Read(NamedTuple):
    """A tensor that was read, and the line that did."""

    tensor: Tensor
    site: str


class ReadsNoted(TorchDispatchMode):
    """Within it, each operation says which tensors it reads; those that were neither given nor made stay.

    Args:
        given: inputs, and the state of the module.

    Attributes:
        found: the first read of each other tensor.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {address(tensor) for tensor in given}
        self.found: list[Read] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a tensor that Python has just made of a number comes from nowhere
        fresh = func is torch.ops.aten.lift_fresh.default
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.numel() and not fresh and address(leaf) not in self._known:
                self._known.add(address(leaf))
                self.found.append(Read(leaf, str(locate(call_chain(sys._getframe(1))))))
        result = func(*args, **kwargs)
        self._known.update(address(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


class Place(NamedTuple):
    """Something that holds an object on the way from a module to a tensor.

    Attributes:
        get: what is there now.
        held: what was there.
        name: for messages.
    """

    get: Callable[[], Any]
    held: Any
    name: str


def places_of(tensors: list[Tensor], parts: Iterable[nn.Module]) -> dict[int, list[Place]]:
    """The places through which a module and its parts reach some tensors, by the address of each tensor found.

    Looked through are attributes, lists, tuples, dicts and TensorDicts, closures, the globals that a function names,
    arguments of partial functions, and attributes of classes.

    Args:
        tensors: each anywhere.
        parts: a module and its children.
    """
    wanted = {address(tensor) for tensor in tensors}
    found: dict[int, list[Place]] = {}
    waiting: list[tuple[Any, list[Place], str]] = [(part, [], type(part).__name__) for part in parts]
    seen: set[int] = set()
    for holder, way, name in waiting:  # it grows: what is nearer comes first
        if id(holder) in seen or len(seen) > NODES:
            continue
        seen.add(id(holder))
        for get, held, label, stays in _inside(holder):
            full = f"{name}{label}"
            here = way if stays else [*way, Place(get, held, full)]
            if isinstance(held, Tensor):
                if held.numel() and address(held) in wanted:
                    found.setdefault(address(held), here)
            elif not isinstance(held, _LEAVES):
                waiting.append((held, here, full))
    return found


def numbers_of(part: nn.Module) -> tuple[list[tuple[dict[str, Any], list[str]]], list[CellType]]:
    """Where the functions of a module find numbers and words: globals, with the names, and cells of closures.

    Looked at are functions among the attributes, and ``forward`` where it is no library's.
    """
    functions = [value for value in vars(part).values() if isinstance(value, FunctionType)]
    forward = getattr(type(part), "forward", None)
    functions += [forward] if isinstance(forward, FunctionType) else []
    named: list[tuple[dict[str, Any], list[str]]] = []
    cells: list[CellType] = []
    for function in functions:
        if not _is_library(function.__module__ or ""):
            found = function.__globals__
            if names := [name for name in dict.fromkeys(_names(function.__code__)) if type(found.get(name)) in NUMBERS]:
                named.append((found, names))
            cells += [cell for cell in function.__closure__ or () if type(contents(cell)) in NUMBERS]
    return named, cells


NUMBERS = (int, float, bool, str)
_LEAVES = (str, bytes, int, float, complex, bool, type(None), ModuleType, torch.device, torch.dtype, CodeType)
_Held = tuple[Callable[[], Any], Any, str, bool]
"""How to look there again, what is there, its name, and whether it can be no other."""


def _inside(holder: Any) -> Iterator[_Held]:
    """What an object holds."""
    if isinstance(holder, FunctionType):
        yield from _of_function(holder)
    elif isinstance(holder, dict):
        yield from _of_dict(holder, "[{!r}]")
    elif isinstance(holder, list):
        yield from ((functools.partial(_item, holder, i), held, f"[{i}]", False) for i, held in enumerate(holder))
    elif isinstance(holder, tuple):
        yield from ((functools.partial(_item, holder, i), held, f"[{i}]", True) for i, held in enumerate(holder))
    elif isinstance(holder, MethodType):
        yield _fixed(holder.__self__, "")
        yield _fixed(holder.__func__, "")
    elif isinstance(holder, functools.partial):
        yield from (_fixed(held, "") for held in (holder.func, holder.args, holder.keywords))
    elif isinstance(holder, CellType):
        held = contents(holder)
        if held is not None:
            yield functools.partial(contents, holder), held, "", False
    elif type(holder) is TensorDict:
        yield from _of_dict(entries_of(holder), "[{!r}]")
    elif not isinstance(holder, type):
        yield from _of_object(holder)


def _of_object(holder: Any) -> Iterator[_Held]:
    attributes = getattr(holder, "__dict__", None)
    if type(attributes) is dict:
        yield from _of_dict(attributes, ".{}")
    for kind in type(holder).__mro__:
        if not _is_library(kind.__module__):
            for name, held in list(vars(kind).items()):
                yield functools.partial(getattr, kind, name, None), held, f".{name}", isinstance(held, FunctionType)


def _of_function(function: FunctionType) -> Iterator[_Held]:
    yield from (_fixed(held, "") for held in (function.__defaults__, function.__kwdefaults__, function.__dict__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield _fixed(cell, f" closing over {name}")
    if not _is_library(function.__module__ or ""):
        for name in dict.fromkeys(_names(function.__code__)):
            if (held := function.__globals__.get(name)) is not None:
                yield functools.partial(function.__globals__.get, name), held, f" naming {name}", False


def _of_dict(holder: dict[Any, Any], label: str) -> Iterator[_Held]:
    for key, held in list(holder.items()):
        yield functools.partial(holder.get, key), held, label.format(key), False


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function looks up, in the functions inside of it as well."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _fixed(held: Any, label: str) -> _Held:
    return operator.not_, held, label, True


def _item(holder: Any, index: int) -> Any:
    return holder[index] if index < len(holder) else None


def contents(cell: CellType) -> Any:
    """What a cell of a closure holds; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins, which its views have in common."""
    return tensor.untyped_storage().data_ptr()
