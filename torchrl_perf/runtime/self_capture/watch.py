"""What a recording depends on besides its inputs: the tensors and the switches of a module, compared at each call."""

import operator
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn

from torchrl_perf.runtime.self_capture.closed_over import Place, Read, address, contents, numbers_of, places_of
from torchrl_perf.runtime.upstream.modules import child_dict, hook_dicts, tensor_slots

__all__ = ["Watch"]


class _Slot(NamedTuple):
    """A place that holds a tensor, and the tensor that was there."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor
    kind: tuple[int, bool]
    name: str


class Watch:
    """The parameters, buffers and parts of a module as they were, to be found replaced; its modes and its hooks.

    Args:
        module: the module; networks that it keeps outside its registered children count as well.

    Attributes:
        state: parameters and buffers, each once.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(_parts(module))
        # not the module itself, which would live as long as what watches it
        self._parts = parts[1:]
        # a part that answers for another one, as what torch.compile returns, has no flag of its own
        self._flags = [part.__dict__ for part in parts if "training" in part.__dict__]
        self._slots = [
            _Slot(holder, key, tensor, _kind(tensor), f"{type(part).__name__}.{key}")
            for part in parts
            for holder, key, tensor in tensor_slots(part)
        ]
        # what they hold, in lists, so that looking at all of them is a loop in C
        self._holders, self._names = [slot.holder for slot in self._slots], [slot.key for slot in self._slots]
        self._ids, self._kinds = [id(slot.tensor) for slot in self._slots], [slot.kind for slot in self._slots]
        self._children = [child for part in parts for child in _children(part)]
        self._child_holders = [each[0] for each in self._children]
        self._child_names = [each[1] for each in self._children]
        self._held_children = [each[2] for each in self._children]
        self._hooks = hook_dicts(*self._parts)
        self.state = list({id(slot.tensor): slot.tensor for slot in self._slots}.values())
        # all names of a dict in one call, and doubled, since the getter of one name would return no tuple
        self._plain = [(operator.itemgetter(*names, *names[:1]), names, holder) for holder, names in _all_plain(parts)]
        self._cells = [cell for part in parts for cell in numbers_of(part)[1]]
        self._values: list[Any] = []
        self._settings = _Settings(())
        self._places: list[Place] = []
        self._closed_over: list[tuple[Tensor, int, bool, int | None, str]] = []

    def modes(self) -> tuple[bool, ...]:
        """The ``training`` flag of each part."""
        return tuple([attributes["training"] for attributes in self._flags])

    def settings(self) -> "_Settings":
        """Numbers, words, flags and functions of all parts, as something to compare.

        They are attributes, or numbers and words that functions of the parts close over or name.
        """
        values: list[Any] = []
        for get, names, holder in self._plain:
            try:
                values += get(holder)
            except KeyError:  # one was deleted
                values += [holder.get(name) for name in (*names, *names[:1])]
        values += [contents(cell) for cell in self._cells]
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values, self._settings = values, _Settings(tuple([_comparable(value) for value in values]))
        return self._settings

    def replaced(self) -> str | None:
        """The name of the first tensor or part that is another since; None without one.

        Another is one that is another object, at another address, or frozen since.
        """
        found = list(map(dict.get, self._holders, self._names))
        if list(map(id, found)) != self._ids or list(map(_kind, found)) != self._kinds:
            return next(
                slot.name
                for slot, tensor in zip(self._slots, found, strict=True)
                if tensor is not slot.tensor or _kind(tensor) != slot.kind
            )
        children = map(dict.get, self._child_holders, self._child_names)
        if not all(map(operator.is_, children, self._held_children)):
            return next(name for holder, key, child, name in self._children if holder.get(key) is not child)
        for get, held, name in self._places:
            if get() is not held:
                return name
        for tensor, pointer, requires_grad, version, name in self._closed_over:
            if tensor.data_ptr() != pointer or tensor.requires_grad is not requires_grad:
                return name
            if version is not None and tensor._version != version:
                return name
        return None

    def follow(self, module: nn.Module, reads: list[Read], device: torch.device) -> str | None:
        """Looks from now on at the places of tensors that are read and are no state of the module.

        Args:
            module: the module.
            reads: such tensors. One on another device is a number in a graph, so that writes to it count as well.
            device: that of the recording.

        Returns:
            What one of them is, in words, that no attribute, closure or global name leads to, so that another one would
            be missed; or that is a parameter, whose gradient no graph would find. None where there is none.
        """
        places = places_of([read.tensor for read in reads], [module, *self._parts])
        for tensor, site in reads:
            way = places.get(address(tensor))
            if way is None or tensor.requires_grad:
                what = "neither it nor its argument holds" if way is None else "is no parameter of it, but learns"
                return f"a tensor {list(tensor.shape)} of {tensor.dtype} on {tensor.device} that {what}, at {site}"
            known = {(id(place.held), place.name) for place in self._places}
            self._places += [place for place in way if (id(place.held), place.name) not in known]
            version = None if tensor.device == device or tensor.is_inference() else tensor._version
            name = way[-1].name if way else f"a tensor {list(tensor.shape)}"
            self._closed_over.append((tensor, tensor.data_ptr(), tensor.requires_grad, version, name))
        return None

    def hooked(self) -> str | None:
        """The class of the first part with hooks, which a graph would not call; None without one.

        Those of the module itself stand around the graph, and are called. Hooks of all modules are those of each part.
        """
        if not any(self._hooks):
            return None
        return next((type(part).__name__ for part in self._parts if any(hook_dicts(part))), None)


def _kind(tensor: Tensor) -> tuple[int, bool]:
    """Where its numbers lie, and whether it is trained."""
    return tensor.data_ptr(), tensor.requires_grad


_SIMPLE = (int, float, str, bool, type(None), tuple, torch.dtype, FunctionType, BuiltinFunctionType, type)
_INERT = (nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Tanh, nn.ReLU, TensorDictParams)
"""Modules whose attributes say what they were made of, and change nothing."""


class _Object:
    """Something that equals itself alone, and is kept, so that no other takes its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Settings:
    """Values to compare as one, whose hash is found once."""

    __slots__ = ("_hash", "values")

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values, self._hash = values, hash(values)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Settings) and self.values == other.values)

    def __hash__(self) -> int:
        return self._hash


def _comparable(value: Any) -> Any:
    """A value to compare settings by: 1 and True differ, and objects are equal to themselves alone."""
    if isinstance(value, tuple):
        return tuple([_comparable(each) for each in value])
    return (type(value), value) if type(value) in _SIMPLE else _Object(value)


def _all_plain(parts: list[nn.Module]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The dicts that hold the settings of parts, and their names: a part's own, its dataclasses' (keys), globals."""
    for part in parts:
        yield from numbers_of(part)[0]
        if type(part) in _INERT:
            continue
        own = part.__dict__
        keys = [name for name, value in own.items() if is_dataclass(value) and type(_fields(value)) is dict]
        simple = [name for name, value in own.items() if type(value) in _SIMPLE and name != "training"]  # a mode
        for holder, names in ((own, [*simple, *keys]), *((fields := _fields(own[key]), list(fields)) for key in keys)):
            if found := [name for name in names if holder is own or type(holder[name]) in _SIMPLE]:
                yield holder, found


def _fields(value: Any) -> Any:
    return getattr(value, "__dict__", None)


def _children(part: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Module, str]]:
    """The dicts in which a module keeps other modules, with the name, the module, and a name for messages."""
    for holder in (child_dict(part), part.__dict__):
        for name, value in holder.items():
            if isinstance(value, nn.Module):
                yield holder, name, value, f"{type(part).__name__}.{name}"


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module, its children, and modules that it holds without registering them, each once."""
    seen: set[int] = set()
    waiting: list[nn.Module] = [module]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += part.children()
        waiting += [value for value in part.__dict__.values() if isinstance(value, nn.Module)]
