"""The tensors in the objects of a VMAS simulation.

VMAS keeps its state in attributes of Python objects: positions of entities, shaping terms of a scenario, integrators of
a controller. Here each such tensor is a named slot.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Found", "MovingSlot", "Slot", "scan"]

SCRATCH = frozenset({"forces_dict", "torques_dict", "entity_index_map", "viewer", "_last_measurement"})
"""Attributes that VMAS writes in each step before it reads them, and those of its viewer window."""

PLAIN = (int, float, complex, str, bytes, bool, type(None), enum.Enum, torch.device, torch.dtype, torch.Size, range)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


@dataclass(frozen=True)
class Slot:
    """A place that holds a tensor: an attribute of an object, an entry of a dict, or an item of a list.

    Attributes:
        owner: the object or container.
        key: of the tensor in it.
        root: where the walk began.
        chain: keys that lead from ``root`` to the tensor, ``key`` the last of them.
    """

    owner: Any
    key: Any
    root: Any
    chain: tuple[Any, ...]

    def get(self) -> Tensor:
        """The tensor that the place holds now."""
        return _child(self.owner, self.key)

    def set(self, value: Tensor) -> None:
        """Put another tensor there, bypassing the setters of a class, which copy and check."""
        if isinstance(self.owner, dict | list | deque):
            self.owner[self.key] = value
        else:
            vars(self.owner)[self.key] = value


class MovingSlot(Slot):
    """A slot whose owner is replaced by a reset or step, and so is looked up each time."""

    def _place(self) -> Slot:
        owner = self.root
        for key in self.chain[:-1]:
            owner = _child(owner, key)
        return Slot(owner, self.key, self.root, self.chain)

    def get(self) -> Tensor:
        """The tensor that the place holds now."""
        return self._place().get()

    def set(self, value: Tensor) -> None:
        """Put another tensor there."""
        Slot.set(self._place(), value)


def _child(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict | list | tuple | deque):
        return owner[key]
    return vars(owner)[key]


@dataclass
class Found:
    """What :func:`scan` found.

    Attributes:
        slots: the tensors, by path such as ``"_world/_agents/0/_state/_pos"``.
        leaves: everything else that has a value, in a form that can be compared.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    leaves: dict[str, object] = field(default_factory=dict)


def scan(root: object) -> Found:
    """Walk all objects reachable from ``root``, each once, and return their tensors and other values.

    Args:
        root: a VMAS scenario, whose world, entities, sensors, controllers and own attributes are walked.
    """
    found = Found()
    seen: dict[int, str] = {}
    todo: list[tuple[str, tuple[Any, ...], object]] = [("", (), root)]
    while todo:
        path, chain, value = todo.pop()
        if id(value) in seen:
            # records that two names share one object, so that a later change of one of them is noticed
            found.leaves[path] = ("same as", seen[id(value)])
            continue
        seen[id(value)] = path
        for key, name, child in _children(value):
            below = f"{path}/{name}" if path else name
            if isinstance(child, Tensor):
                found.slots[below] = Slot(value, key, root, (*chain, key))
            elif isinstance(child, PLAIN):
                found.leaves[below] = repr(child)
            elif isinstance(child, CODE):
                found.leaves[below] = getattr(child, "__qualname__", repr(child))
            elif isinstance(child, dict | list | tuple | deque) or hasattr(child, "__dict__"):
                todo.append((below, (*chain, key), child))
            else:
                found.leaves[below] = _image(child)
    return found


def _children(value: object) -> list[tuple[Any, str, object]]:
    """(key, name in a path, value) of everything directly below an object or container."""
    if isinstance(value, dict):
        named = [(key, key if isinstance(key, str) else str(index)) for index, key in enumerate(value)]
        return [(key, name, value[key]) for key, name in named if name not in SCRATCH]
    if isinstance(value, list | tuple | deque):
        return [(index, str(index), child) for index, child in enumerate(value)]
    return [(name, name, child) for name, child in vars(value).items() if name not in SCRATCH]


def _image(value: object) -> object:
    """A form of a value without attributes, such as an array or a set, that compares by content."""
    image = getattr(value, "tobytes", None)
    if image is not None:
        return type(value).__name__, image()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return type(value).__name__
