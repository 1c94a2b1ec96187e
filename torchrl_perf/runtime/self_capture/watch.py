"""What a recording depends on besides its inputs: the tensors and the switches of a module, compared at each call."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchrl_perf.runtime.upstream.modules import hook_dicts, tensor_slots

__all__ = ["Watch"]


class _Slot(NamedTuple):
    """A place that holds a tensor, and the tensor that was there."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor
    kind: tuple[int, bool]
    name: str


class Watch:
    """The parameters and buffers of a module as they were, to be found replaced; its modes and its hooks.

    Args:
        module: the module; networks that it keeps outside its registered children count as well.

    Attributes:
        state: parameters and buffers, each once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = list(_parts(module))
        self._slots = [
            _Slot(holder, key, tensor, _kind(tensor), f"{type(part).__name__}.{key}")
            for part in self.parts
            for holder, key, tensor in tensor_slots(part)
        ]
        # what they hold, in lists, so that looking at all of them is a loop in C
        self._holders, self._names = [slot.holder for slot in self._slots], [slot.key for slot in self._slots]
        self._ids, self._kinds = [id(slot.tensor) for slot in self._slots], [slot.kind for slot in self._slots]
        self._hooks = [hooks for part in self.parts[1:] for hooks in hook_dicts(part)]
        self.state = list({id(slot.tensor): slot.tensor for slot in self._slots}.values())
        self._attributes = module.__dict__
        self._plain = [name for name, value in module.__dict__.items() if type(value) in _PLAIN]

    def modes(self) -> tuple[bool, ...]:
        """The ``training`` flag of each part."""
        return tuple([part.training for part in self.parts])

    def settings(self) -> tuple[Any, ...]:
        """Numbers, words and flags among the attributes of the module itself."""
        return tuple(map(self._attributes.get, self._plain))

    def replaced(self) -> str | None:
        """The name of the first tensor that is another object, at another address or frozen since; None without one."""
        found = list(map(dict.get, self._holders, self._names))
        if list(map(id, found)) == self._ids and list(map(_kind, found)) == self._kinds:
            return None
        return next(
            slot.name
            for slot, tensor in zip(self._slots, found, strict=True)
            if tensor is not slot.tensor or _kind(tensor) != slot.kind
        )

    def hooked(self) -> str | None:
        """The class of the first part with hooks, which a graph would not call; None without one.

        Those of the module itself stand around the graph, and are called.
        """
        if not any(self._hooks):
            return None
        return next(type(part).__name__ for part in self.parts[1:] if any(hook_dicts(part)))


def _kind(tensor: Tensor) -> tuple[int, bool]:
    """Where its numbers lie, and whether it is trained."""
    return tensor.data_ptr(), tensor.requires_grad


_PLAIN = (int, float, str, bool, type(None))


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
