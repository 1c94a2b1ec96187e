"""How often a program copies between host and device, asks the device for a value, and dispatches an operation."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_perf.runtime import host_syncs, synchronize

READS = {
    Tensor.cpu: "cpu",
    Tensor.item: "item",
    Tensor.tolist: "tolist",
    Tensor.__bool__: "bool",
    Tensor.__int__: "int",
    Tensor.__float__: "float",
    Tensor.__index__: "index",
}
"""What brings a value to the host. ``.numpy()`` is left out: it follows a ``.cpu()`` that is counted."""
MAKERS = {torch.tensor, torch.as_tensor}


class _Calls(TorchFunctionMode):
    """Counts by what is called, so that on a CPU, where ``.cpu()`` does nothing, the same is counted as on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.uploads = Counter[str](), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            self.reads[READS[func]] += 1
        elif func in MAKERS:
            self.uploads += 1
        elif func is Tensor.to:
            targets = [*args[1:], kwargs.get("device")]
            self.uploads += any(isinstance(target, str | torch.device) for target in targets)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Counts what is dispatched, and the bytes of results that are no view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _storage(leaf) not in inputs]
        self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in fresh)
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def counts(call: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """What one call does, the first one left out.

    Returns:
        ``reads`` (values and copies brought to the host), ``uploads`` (tensors made of host data or moved to a device),
        ``operations`` dispatched, ``bytes`` of new tensors; on CUDA ``waits`` of the host and ``peak_bytes``, too.
    """
    call()
    with _Operations() as operations, _Calls() as calls:
        call()
    found = {"reads": calls.reads.total(), "uploads": calls.uploads}
    found |= {"operations": operations.count, "bytes": operations.bytes}
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = call()
        synchronize(device)
        del kept
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        with host_syncs(device) as report:
            call()
        found["waits"] = report.total
    return found
