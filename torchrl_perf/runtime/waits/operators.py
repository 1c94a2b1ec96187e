"""Which dispatched operations make the host wait, what to write instead, and which reads occur only on a CPU."""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_perf.runtime.waits.frames import Call, innermost, locate, package_root
from torchrl_perf.runtime.waits.rules import RULES

_SCALAR = (
    "keep the value on the device: a 0-d tensor for a number, torch.where for a branch; pass validate_args=False to "
    "distributions; read metrics once per interval"
)
_SIZE = "keep the shape static: a mask with torch.where, torch.nonzero_static, or sums weighted by the mask"
_UNIQUE = "keep the shape static: torch.sort and a comparison of neighbours, or scatter_add into a fixed number of bins"
_COMPARE = "keep the answer on the device: (a == b).all() stays a 0-d tensor for torch.where"
_MASK = "use torch.where(mask, value, x), x.masked_fill(mask, value), or weights from mask.to(x.dtype)"
_COPY = "make the tensor on the device once, before the loop; copy from or to pinned memory with non_blocking=True"
_LINALG = "use the _ex variant (torch.linalg.inv_ex, cholesky_ex, ...), which leaves the check on the device"
_REPEAT = "pass output_size= so that the result's size is known to the host"
_BINS = "use scatter_add_ into a tensor of fixed size"
_METHOD = "keep the data on the device; copy once per logging interval"
_ENDS = "pass Python numbers, or scale torch.linspace(0, 1, n) on the device"
_RANGE = "pass min= and max= as Python numbers, or scatter_add_ into a tensor of fixed size"
_MEMBER = "compare with broadcasting: (x.unsqueeze(-1) == test).any(-1)"
_NORMAL = "mean + std * torch.randn_like(mean): torch.normal checks the signs of std on the host; rsample does not"
_FILL = "use torch.where(mask, value, x), which takes the value from the device"
_SOLVER = "keep it out of the loop, or use a factorisation with an _ex variant (cholesky_ex, inv_ex, lu_factor_ex)"
_CHECKED = "leave out what is checked (sorter=; unsafe=True for lengths that are known to fit)"
_PRINT = "print once per interval, from a copy on the host"
_SAVE = "save once in many iterations: each tensor is copied to the host"
_SYNC = "drop it: work on one stream is in order; wait for one event where the host does need the result"
COPY_TO_HOST, COPY_TO_DEVICE = "copy_to_host", "copy_to_device"
CUDA_REMEDY = (
    "find the wait in the operation above: a CPU index or scalar in a CUDA operation, or a tensor made from Python data"
)

REMEDIES = {
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero"), _SCALAR),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select"), _SIZE),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _UNIQUE),
    **dict.fromkeys(("equal", "allclose"), _COMPARE),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"), _MASK),
    **dict.fromkeys(("_to_copy", "copy_", COPY_TO_DEVICE), _COPY),
    **dict.fromkeys(("tolist", "numpy", "__array__", "cpu", COPY_TO_HOST), _METHOD),
    **dict.fromkeys(("linspace", "logspace"), _ENDS),
    **dict.fromkeys(("masked_fill", "masked_fill_", "index_fill", "index_fill_"), _FILL),
    **dict.fromkeys((name for name in RULES if "linalg" in name or "cholesky" in name), _SOLVER),
    **dict.fromkeys(("searchsorted", "segment_reduce"), _CHECKED),
    "_to_sparse": _SIZE,
    "embedding_renorm_": "leave out max_norm=, or normalise the weights once per update",
    "histc": _RANGE,
    "isin": _MEMBER,
    "normal": _NORMAL,
    "__repr__": _PRINT,
    "pickle": _SAVE,
    **dict.fromkeys(("cuda.synchronize", "Event.synchronize", "Stream.synchronize"), _SYNC),
    "_linalg_check_errors": _LINALG,
    "repeat_interleave": _REPEAT,
    "bincount": _BINS,
}
_MASKED = frozenset(("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"))
_COPIES = frozenset(("_to_copy", "copy_"))
_READS = frozenset(REMEDIES) - _MASKED - _COPIES - frozenset(RULES)
# They read memory without a dispatched operation on the CPU, and copy from the device (or fail) on CUDA.
HOST_METHODS = {
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.__array__: "__array__",
    Tensor.cpu: "cpu",
    Tensor.__repr__: "__repr__",
}
# They take tensors inside lists apart, element by element.
CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
# Without weights they check a number that is on the CPU anyway.
COVARIANCES = (torch.cov, Tensor.cov, torch.corrcoef, Tensor.corrcoef)
# They check arguments on a CPU that they do not check on CUDA, or take tensors that have to be on the CPU.
FREE_ON_CUDA = (
    torch.quantile,
    torch.nanquantile,
    Tensor.quantile,
    Tensor.nanquantile,
    torch.tensor_split,
    Tensor.tensor_split,
)
SYNC_MESSAGE = "called a synchronizing CUDA operation"


class Artefact(NamedTuple):
    """A host read of a tensor that is on the CPU by design, so that on CUDA it does not wait.

    Attributes:
        package: name of the package that reads.
        path: start of the file's path inside the package.
        functions: names of the reading functions; empty for all.
        source: text that the reading line contains; empty for any.
    """

    package: str
    path: str
    functions: tuple[str, ...] = ()
    source: str = ""


ARTEFACTS = (
    Artefact("torch", "optim/"),
    Artefact("torch", "utils/data/"),  # seeds and permutations, drawn on the CPU
    Artefact("torchrl", "data/replay_buffers/storages/base.py", ("_mutation_revision", "_last_cursor_index")),
    Artefact("torchrl", "collectors/utils.py", ("get_traj_and_increment",), "_traj_id.item()"),
    Artefact("torchrl", "trainers/trainers.py", ("train",), ".item()"),  # the size of a batch
    Artefact("torchrl_perf", "metrics/", (), ".tolist()"),  # of the host's copy
    # the fused kernel, whose form for the CPU reads the numbers that its form for CUDA takes as tensors
    Artefact("torchrl_perf", "functional/adam.py", (), "torch._fused_adam"),
)
# These read values that live where the parameters do.
_OPTIM_READERS = frozenset(("lr_scheduler.py", "lbfgs.py", "swa_utils.py"))


def host_wait(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, cuda: bool) -> str | None:
    """Return the name of the operation if it makes the host wait, else None.

    Args:
        func: the dispatched ``OpOverload``.
        args: its positional arguments.
        kwargs: its keyword arguments.
        cuda: True counts operations on CUDA tensors only, False those on CPU tensors.
    """
    packet = getattr(func, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name not in REMEDIES or getattr(func, "namespace", "") != "aten":
        return None
    if name in RULES:
        return name if _is_ruled(name, func, args, kwargs, cuda=cuda) else None
    if not args or not isinstance(args[0], Tensor):
        return None
    if name in _COPIES:
        return name if cuda and copy_waits(name, args, kwargs) else None
    if args[0].device.type != ("cuda" if cuda else "cpu"):
        return None
    if name in _MASKED:
        return name if _has_mask(args, kwargs, cuda=cuda) else None
    if name == "repeat_interleave":  # of a given size, or with a fixed number of repeats
        known = kwargs.get("output_size") is not None or (len(args) > 1 and not isinstance(args[1], Tensor))
        return None if known else name
    return name if name in _READS else None


def _is_ruled(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, cuda: bool) -> bool:
    tensor = next((value for value in args if isinstance(value, Tensor)), None)
    if tensor is None or tensor.device.type != ("cuda" if cuda else "cpu"):
        return False
    overload = getattr(func, "__name__", "").partition(".")[2]
    return ("" if overload == "default" else overload) in RULES[name].overloads and RULES[name].waits(args, kwargs)


def tensors_within(data: Any) -> int:
    """How many numbers of tensors lie in nested lists and tuples, which a constructor reads one by one."""
    if not isinstance(data, list | tuple):
        return 0
    return sum(value.numel() if isinstance(value, Tensor) else tensors_within(value) for value in data)


def _has_mask(args: tuple[Any, ...], kwargs: dict[str, Any], *, cuda: bool) -> bool:
    if not any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1] or ()):
        return False
    value = args[2] if len(args) > 2 else kwargs.get("values")
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    # torch turns ``x[mask] = number`` into masked_fill_, which does not wait; with CPU tensors the two look the same.
    fills = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and not accumulate
    return not (cuda and fills)


def copy_waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy crosses between the CPU and CUDA without being asynchronous on both sides."""
    if name == "copy_":
        if len(args) < 2 or not isinstance(args[1], Tensor):
            return False
        target, source = args[0].device.type, args[1]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        host = args[0] if target == "cpu" else source
        pinned = host.device.type == "cpu" and host.is_pinned()
    else:
        source, device = args[0], kwargs.get("device")
        target = source.device.type if device is None else torch.device(device).type
        non_blocking = kwargs.get("non_blocking", False)
        # A non-blocking copy to the CPU gets pinned memory from torch; the source of a copy to CUDA must have it.
        pinned = target == "cpu" or (source.device.type == "cpu" and source.is_pinned())
    return {source.device.type, target} == {"cpu", "cuda"} and not (non_blocking and pinned)


def is_artefact(chain: list[Call]) -> bool:
    """Return whether the read at the end of a call chain is one of ``ARTEFACTS``."""
    call = innermost(chain)
    if call is None:
        return False
    path = os.path.abspath(call.file)
    for artefact in ARTEFACTS:
        root = package_root(artefact.package)
        if root is None or not path.startswith(root + artefact.path.replace("/", os.sep)):
            continue
        if artefact.package == "torch" and os.path.basename(path) in _OPTIM_READERS:
            return False
        if artefact.functions and call.function.rpartition(".")[2] not in artefact.functions:
            continue
        return artefact.source in locate([call]).source
    return False
