"""Triton kernels, each beside the functional reference that defines it.

Importing this package imports no Triton: a kernel's module is imported by its first launch on CUDA. The functions here
are the entry points of the time scans and of the rows of a replay buffer. They launch directly in eager mode, where a
dispatcher call would double the host time; under ``torch.compile`` the scans go through a registered operator, which
keeps the graph whole, and the rows through plain indexing.
"""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from torchrl_perf.runtime.upstream.tensors import carries_tangents as _carries_tangents

__all__ = [
    "adam_kernels",
    "cell_kernels",
    "fits_one_layer",
    "gae_rows",
    "gather_rows",
    "has_scan_kernels",
    "has_triton",
    "layer_kernels",
    "linear_kernels",
    "matmul_takes_tf32",
    "processors",
    "rank_kernels",
    "recurrence_rows",
    "row_kernels",
    "slice_kernels",
    "step_kernels",
    "tree_kernels",
    "write_rows",
]

MOST_OF_LAYER = 64
"""Largest input and state of a minGRU layer in one launch: of more, the weights' gradient is too much for registers."""
MOST_STREAMS = 128
"""Streams up to which it is one: a program's walk backwards through 128 steps takes 50 us on an H200, and there is room
for one program a multiprocessor. Of 512 streams the parts take half of its time."""
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 of a CPU, where Triton's interpreter runs programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_HAS_TRITON = _has_triton()


def has_triton() -> bool:
    """Whether Triton is installed."""
    return _HAS_TRITON


def has_scan_kernels(*tensors: Tensor) -> bool:
    """Whether the scan kernels take these tensors: all on CUDA, float32, bfloat16, float16 or bool, Triton installed.

    The kernels have no derivative, so a tensor that needs a gradient is refused too, and all while tangents are
    carried.
    """
    wants_grad = _carries_tangents() or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    dtypes = (*_KERNEL_DTYPES, torch.bool)
    return _HAS_TRITON and not wants_grad and all(tensor.is_cuda and tensor.dtype in dtypes for tensor in tensors)


def gae_rows(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets of ``[T, N]`` rows in one launch (GAE, arXiv:1506.02438).

    Reference: :func:`torchrl_perf.functional.generalized_advantage_estimate`.

    Args:
        gamma: discount, a float or a 0-d tensor on the same CUDA device.
        lmbda: decay of the trace, a float or a 0-d tensor on the same CUDA device.
        state_value: V(s_t), ``[T, N]`` float32, bfloat16 or float16, any strides (as all tensors here).
        next_state_value: V(s'_t) of the true next observation, ``[T, N]``.
        reward: ``[T, N]``.
        done: ``[T, N]`` bool.
        terminated: ``[T, N]`` bool.

    Returns:
        Advantage and value target, ``[T, N]`` float32, with the memory layout of ``reward``.
    """
    numbers = _split_number(gamma) + _split_number(lmbda)
    if torch.compiler.is_compiling():
        return _gae_op(*numbers, state_value, next_state_value, reward, done, terminated)
    return _launch_gae(*numbers, state_value, next_state_value, reward, done, terminated)


def recurrence_rows(decay: Tensor, value: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """``y_t = value_t + decay_t * y_(t-1)`` over ``[T, N]`` rows, or ``y_(t+1)`` with ``reverse``, in one launch.

    A batch of them, ``[B, T, N]`` in the order of its memory, is one launch too.

    Reference: :mod:`torchrl_perf.functional.scan`.

    Args:
        decay: ``[*, T, N]`` float32, bfloat16 or float16 on CUDA, any strides.
        value: ``[*, T, N]``, likewise.
        initial: ``[*, N]`` carry before the first step of the scan, or None for zero.
        reverse: from the last step to the first.

    Returns:
        ``[*, T, N]`` float32 with the memory layout of ``value``.
    """
    if torch.compiler.is_compiling():
        return _recurrence_op(decay, value, initial, reverse)
    return _launch_recurrence(decay, value, initial, reverse)


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """Rows of ``source`` at ``index``: ``source.index_select(0, index)`` at the speed of memory.

    Args:
        source: ``[R, row_bytes]`` uint8; rows may lie further apart than they are long (a range of columns).
        index: ``[B]`` int64 in [0, R). On CUDA one out of range gives the nearest row, on a CPU an IndexError.

    Returns:
        ``[B, row_bytes]`` uint8, contiguous.
    """
    kernels = row_kernels(source)
    if kernels is None:
        return source.index_select(0, index)
    out = source.new_empty(index.shape[0], source.shape[1])
    kernels.launch_gather(source, index, out)
    return out


def write_rows(
    ring: Tensor, cursor: Tensor, fields: Sequence[Tensor], offsets: Sequence[int], *, num_streams: int
) -> None:
    """Writes the fields of consecutive time rows into a ring of packed rows, from time ``cursor`` on.

    Args:
        ring: ``[steps * num_streams, row_bytes]`` uint8, contiguous; slot ``(time % steps) * num_streams + stream``.
        cursor: 0-d int64 on the device: absolute time of the first row.
        fields: contiguous tensors ``[T * num_streams, *]``, time-major, T at most ``steps``.
        offsets: byte at which each field begins in a row.
        num_streams: streams of a time row.
    """
    kernels, rows = row_kernels(ring), fields[0].shape[0]
    if kernels is not None:
        sizes = tuple([field.numel() * field.itemsize // rows for field in fields])
        kernels.launch_write(ring, cursor, fields, tuple(offsets), sizes, (rows, num_streams), None)
        return
    row = torch.arange(rows, device=ring.device)
    slot = (cursor * num_streams + row) % ring.shape[0]
    for field, offset in zip(fields, offsets, strict=True):
        packed = field.reshape(field.shape[0], -1).view(torch.uint8)
        ring[:, offset : offset + packed.shape[1]].index_copy_(0, slot, packed)


def row_kernels(rows: Tensor) -> ModuleType | None:
    """The kernels of packed rows, :mod:`torchrl_perf.kernels.rows`, or None where torch operations serve.

    Args:
        rows: the rows; the kernels need them on CUDA. Under ``torch.compile`` the answer is None.
    """
    if not (_HAS_TRITON and rows.is_cuda) or torch.compiler.is_compiling():
        return None
    return _module_of_rows()


def tree_kernels(words: Tensor) -> ModuleType | None:
    """The kernels of the sum tree, :mod:`torchrl_perf.kernels.priority_tree`, or None where torch operations do.

    Reference: :mod:`torchrl_perf.functional.priority_tree`.

    Args:
        words: a tensor of the tree; the kernels need it on CUDA. Under ``torch.compile`` the answer is None.
    """
    if not (_HAS_TRITON and words.is_cuda) or torch.compiler.is_compiling():
        return None
    return _module_of_trees()


def adam_kernels(*lists: Sequence[Tensor]) -> ModuleType | None:
    """The kernels of an optimiser's step, :mod:`torchrl_perf.kernels.flat_adam`, or None where torch operations serve.

    Args:
        *lists: parameters, gradients and so on; the kernels need contiguous float32 on CUDA. Under ``torch.compile``
            the answer is None.
    """
    if not (_HAS_TRITON and lists[0] and lists[0][0].is_cuda) or torch.compiler.is_compiling():
        return None
    if not all(each.dtype is torch.float32 and each.is_contiguous() for tensors in lists for each in tensors):
        return None
    return _module_of_adam()


def rank_kernels(tensors: Sequence[Tensor]) -> ModuleType | None:
    """The kernel of sums over ranks, :mod:`torchrl_perf.kernels.rank_sums`, or None where there is none.

    Args:
        tensors: that are to be summed; the kernel needs contiguous float32 on CUDA.
    """
    if adam_kernels(tensors) is None:
        return None
    from torchrl_perf.kernels import rank_sums

    return rank_sums


def slice_kernels(flags: Tensor) -> ModuleType | None:
    """The kernel of slices, :mod:`torchrl_perf.kernels.slices`, or None where torch operations serve.

    Args:
        flags: a tensor of the rows; the kernel needs it on CUDA. Under ``torch.compile`` the answer is None.
    """
    if not (_HAS_TRITON and flags.is_cuda) or torch.compiler.is_compiling():
        return None
    return _module_of_slices()


def cell_kernels(name: str, inputs: Tensor, weight: Tensor) -> ModuleType | None:
    """The kernels of a gated cell's sequences, or None where the loop over steps serves.

    They take float32. A sequence is one launch where recurrent layers may use TF32
    (``torch.backends.cudnn.allow_tf32``, which is so unless a script or ``precision="ieee"`` says otherwise), and
    weights fit on chip, as those of up to 128 hidden units do. Else a step is a matrix product and one launch.

    Args:
        name: ``"gru"`` or ``"lstm"``: :mod:`torchrl_perf.kernels.gru` and :mod:`torchrl_perf.kernels.lstm`, else
            :mod:`torchrl_perf.kernels.gru_steps` and :mod:`torchrl_perf.kernels.lstm_steps`.
        inputs: of a sequence, or their gradient.
        weight: ``[G H, H]``, of G gates.
    """
    if not (_HAS_TRITON and inputs.is_cuda and inputs.numel()):
        return None
    if inputs.dtype != torch.float32 or weight.dtype != torch.float32:
        return None
    rows, hidden = weight.shape
    on_chip = None
    if _cudnn_takes_tf32() and _fits_on_chip(rows // hidden, hidden, inputs.device.index):
        on_chip = _module_of_cells(name)
    return on_chip or _module_of_cells(f"{name}_steps")


def linear_kernels(inputs: Tensor) -> ModuleType | None:
    """The kernels of minGRU's sequences, :mod:`torchrl_perf.kernels.min_gru`, or None where operations and a scan do.

    Args:
        inputs: of a sequence; the kernels take float32 on CUDA.
    """
    if not (_HAS_TRITON and inputs.is_cuda and inputs.numel() and inputs.dtype == torch.float32):
        return None
    return _module_of_cells("min_gru")


def fits_one_layer(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a minGRU layer is one launch, :mod:`torchrl_perf.kernels.min_gru_layer`: small, float32 and on CUDA.

    Args:
        x: ``[N, T, I]``.
        *others: state, weight ``[2 H, I]`` and bias.
    """
    if not (_HAS_TRITON and x.is_cuda and x.numel() and x.shape[0] <= MOST_STREAMS):
        return False
    given = [x, *(each for each in others if each is not None)]
    rows, size = given[2].shape
    return max(rows // 2, size) <= MOST_OF_LAYER and all(each.dtype == torch.float32 for each in given)


def layer_kernels(x: Tensor) -> ModuleType | None:
    """The kernels of a minGRU layer, :mod:`torchrl_perf.kernels.min_gru_layer`, or None where its parts serve.

    Args:
        x: ``[N, T, I]``, of a layer that :func:`fits_one_layer`; the kernels take float32 on CUDA.
    """
    return _module_of_cells("min_gru_layer") if _HAS_TRITON and x.is_cuda else None


def step_kernels(x: Tensor) -> ModuleType | None:
    """The kernels of one step, :mod:`torchrl_perf.kernels.cell_steps`, or None where torch operations serve.

    Args:
        x: input of a step, float32 on CUDA; the kernels serve where recurrent layers may use TF32.
    """
    if not (_HAS_TRITON and x.is_cuda and x.numel() and _cudnn_takes_tf32() and _has_half(x.device.index)):
        return None
    return _module_of_cells("cell_steps")


@functools.cache
def _has_half(index: int) -> bool:
    return torch.cuda.get_device_properties(index).major >= 8


def _cudnn_takes_tf32() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # PyTorch's two settings of it contradict each other
        return False


def matmul_takes_tf32() -> bool:
    """Whether float32 products on CUDA may use TF32; not where PyTorch's two settings of it contradict each other."""
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return False


@functools.cache
def _fits_on_chip(gates: int, hidden: int, index: int) -> bool:
    """Whether a multiprocessor has instructions for float16 and room for the weights and what a step exchanges."""
    device = torch.cuda.get_device_properties(index)
    padded = max(16, 1 << (hidden - 1).bit_length())
    exchanged = 2**14 + 2**12
    return _has_half(index) and 2 * gates * padded**2 + exchanged <= device.shared_memory_per_block_optin


@functools.cache
def _module_of_cells(name: str) -> ModuleType | None:
    """A module of kernels, or None where Triton has no Gluon, or another one."""
    try:
        return importlib.import_module(f"torchrl_perf.kernels.{name}")
    except (ImportError, AttributeError):
        return None


@functools.cache  # an import statement costs a microsecond at each call
def _module_of_rows() -> ModuleType:
    from torchrl_perf.kernels import rows

    return rows


@functools.cache
def _module_of_trees() -> ModuleType:
    from torchrl_perf.kernels import priority_tree

    return priority_tree


@functools.cache
def _module_of_adam() -> ModuleType:
    from torchrl_perf.kernels import flat_adam

    return flat_adam


@functools.cache
def _module_of_slices() -> ModuleType:
    from torchrl_perf.kernels import slices

    return slices


def _split_number(number: float | Tensor) -> tuple[float, Tensor | None]:
    """A number for an operator's schema: as a float, or as a tensor that only the kernel reads."""
    return (0.0, number) if isinstance(number, Tensor) else (float(number), None)


def _launch_gae(
    gamma: float,
    gamma_tensor: Tensor | None,
    lmbda: float,
    lmbda_tensor: Tensor | None,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
) -> tuple[Tensor, Tensor]:
    from torchrl_perf.kernels import scan

    gamma_arg = gamma if gamma_tensor is None else gamma_tensor
    lmbda_arg = lmbda if lmbda_tensor is None else lmbda_tensor
    return scan.launch_gae(gamma_arg, lmbda_arg, state_value, next_state_value, reward, done, terminated)


def _launch_recurrence(decay: Tensor, value: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    from torchrl_perf.kernels import scan

    return scan.launch_recurrence(decay, value, initial, reverse)


_gae_op = torch.library.custom_op("torchrl_perf::gae_rows", _launch_gae, mutates_args=())
_recurrence_op = torch.library.custom_op("torchrl_perf::recurrence_rows", _launch_recurrence, mutates_args=())


@_gae_op.register_fake
def _gae_fake(
    gamma: float,
    gamma_tensor: Tensor | None,
    lmbda: float,
    lmbda_tensor: Tensor | None,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(reward, dtype=torch.float32), torch.empty_like(reward, dtype=torch.float32)


@_recurrence_op.register_fake
def _recurrence_fake(decay: Tensor, value: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    return torch.empty_like(value, dtype=torch.float32)
