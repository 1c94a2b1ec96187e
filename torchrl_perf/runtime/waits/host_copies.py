"""Which CPU tensors stand for copies on the host, where CPU tensors stand in for a device."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

__all__ = ["HostCopies"]

_MANY = 1_000


class HostCopies:
    """Remembers the storages of what ``cpu()`` has returned: reading those waits for nothing more.

    On a CPU ``cpu()`` returns its tensor itself, so that copy and source would be one; :meth:`copied` makes the copy
    that a device would make. Views of a copy share its storage and so count as copies.
    """

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def copied(self, source: Tensor, result: Tensor) -> Tensor:
        """The result of ``source.cpu()`` as a tensor of its own, remembered as a copy."""
        result = result.clone() if result is source or self._key(result) == self._key(source) else result
        self.mark(result)
        return result

    def mark(self, tensor: Tensor) -> None:
        """Remembers a tensor as a copy on the host."""
        key = self._key(tensor)
        if key is None:
            return
        if len(self._storages) > _MANY:
            self._storages = {key: ref for key, ref in list(self._storages.items()) if not ref.expired()}
        self._storages[key] = StorageWeakRef(tensor.untyped_storage())

    def has(self, tensor: Any) -> bool:
        """Whether a tensor is a copy on the host, or looks at one."""
        if not self._storages or not isinstance(tensor, Tensor):
            return False
        ref = self._storages.get(self._key(tensor) or 0)
        return ref is not None and not ref.expired()

    @property
    def has_any(self) -> bool:
        """Whether anything was remembered."""
        return bool(self._storages)

    def are_all(self, args: Any) -> bool:
        """Whether an operation has tensors, and all of them are copies on the host."""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(map(self.has, tensors))

    def marked(self, results: Any) -> Any:
        """Remembers the tensors among an operation's results, and returns them."""
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self.mark(leaf)
        return results

    @staticmethod
    def _key(tensor: Tensor) -> int | None:
        try:
            return tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # sparse tensors and those that are being traced have none
            return None
