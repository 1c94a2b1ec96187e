"""Linear recurrences over time, the primitive of GAE, TD(lambda), V-trace and episode statistics.

``y_t = value_t + decay_t * y_(t-1)`` forwards and ``y_t = value_t + decay_t * y_(t+1)`` backwards. A decay of exactly 0
cuts the recurrence: nothing crosses it, not even a NaN or an infinity. On CUDA a Triton kernel solves it in one launch;
elsewhere the shape decides between a loop over time and a scan of logarithmic depth. None of them waits for the host or
branches on a value.
"""

import itertools
from typing import TypeVar

import torch
from torch import Tensor

from torchrl_perf.functional.wide import compute_dtype
from torchrl_perf.kernels import has_scan_kernels, recurrence_rows
from torchrl_perf.runtime.upstream.tensors import is_transformed

FEW = 16
"""Numbers of a step from which on the sequences of a batch, as those of a cell, are scanned where they lie."""
MANY = 65_535
"""Sequences up to which they are; CUDA has no larger second dimension of programs."""
_Signal = TypeVar("_Signal", Tensor, float | Tensor)

# Measured on one CPU core, to choose between the loop and the scan: the dispatch of an operation, its time for one
# contiguous element in the cache, and how many elements of env-major memory a scan and a loop may keep in the cache.
_DISPATCH_US = 1.5
_ELEMENT_US = 0.3e-3
_SCAN_ELEMENTS = 32768
_LOOP_ELEMENTS = 262144


def reverse_linear_recurrence(decay: Tensor, value: Tensor, *, time_dim: int = -2) -> Tensor:
    """``y_t = value_t + decay_t * y_(t+1)``, with ``y_T = 0``, without waiting for the host.

    Args:
        decay: broadcastable to ``value``'s shape; 0 cuts the recurrence.
        value: ``[*batch, T, F]``, any strides, float.
        time_dim: dimension of time in ``value``.

    Returns:
        Tensor of ``value``'s shape and memory order: float64 for float64 inputs, float32 for any other float.

    Raises:
        TypeError: if an input is not floating point.
        ValueError: if shapes or devices do not fit, or there is no such dimension.
    """
    return _recurrence(decay, value, None, time_dim, reverse=True)


def linear_recurrence(decay: Tensor, value: Tensor, initial: Tensor | None = None, *, time_dim: int = -2) -> Tensor:
    """``y_t = value_t + decay_t * y_(t-1)``, with ``y_(-1) = initial``, without waiting for the host.

    Args:
        decay: broadcastable to ``value``'s shape; 0 cuts the recurrence.
        value: ``[*batch, T, F]``, any strides, float.
        initial: ``[*batch, F]`` (``value`` without time), the carry of the steps before, or None for 0.
        time_dim: dimension of time in ``value``.

    Returns:
        Tensor of ``value``'s shape and memory order: float64 for float64 inputs, float32 for any other float.

    Raises:
        TypeError: if an input is not floating point.
        ValueError: if shapes or devices do not fit, or there is no such dimension.
    """
    return _recurrence(decay, value, initial, time_dim, reverse=False)


def describe(**tensors: Tensor) -> str:
    """``name [shape] dtype device`` of each tensor, for error messages."""
    return ", ".join(
        f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"
        for name, tensor in tensors.items()
    )


def resolve_time_dim(time_dim: int, shape: torch.Size) -> int:
    """``time_dim`` as an index from the front; ValueError if ``shape`` has no such dimension or is empty."""
    dim = time_dim + len(shape) if time_dim < 0 else time_dim
    if not 0 <= dim < len(shape):
        raise ValueError(
            f"expected time_dim to be a dimension of a tensor of shape {list(shape)}, received {time_dim}. "
            "Remedy: the default -2 is for [*batch, T, F]"
        )
    if 0 in shape:
        raise ValueError(
            f"expected at least one step and one environment, received a tensor of shape {list(shape)}. Remedy: a "
            "tensor [N, T] with N and T of at least 1"
        )
    return dim


def to_rows(tensor: Tensor, dim: int) -> Tensor:
    """``[T, M]`` with time first: a view whenever the strides allow it."""
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """The inverse of :func:`to_rows`, always a view."""
    rest = [*shape[:dim], *shape[dim + 1 :]]
    return rows.view(shape[dim], *rest).movedim(0, dim)


def needs_functional(*tensors: Tensor) -> bool:
    """Whether a differentiable, traceable form is needed instead of one that writes in place."""
    wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return torch.compiler.is_compiling() or wants_grad or is_transformed()


def log_scan(decay: Tensor, cut: Tensor, value: Tensor, dim: int, *, reverse: bool) -> Tensor:
    """Solve the recurrence in ``ceil(log2 T)`` passes, differentiable and traceable (Hillis and Steele, 1986).

    Args:
        decay: 0-d or of ``value``'s shape.
        cut: bool of ``value``'s shape, True where nothing is passed on, whatever the decay.
        value: any shape.
        dim: dimension of time, from the front.
        reverse: from the last step to the first.

    Returns:
        Tensor of ``value``'s shape.
    """
    num_steps, span = value.shape[dim], 1
    while span < num_steps:
        kept = num_steps - span
        decay, cut = _near(decay, kept, dim, reverse), _near(cut, kept, dim, reverse)
        # Selecting before the product keeps a NaN out of the result and out of the gradient alike.
        passed = torch.where(cut, 0.0, _near(value, kept, dim, not reverse))
        near = _near(value, kept, dim, reverse) + decay * passed
        value = _join(near, _near(value, span, dim, not reverse), dim, reverse)
        if kept > span:
            decay, cut = _extended(decay, cut, kept - span, dim, reverse)
        span *= 2
    return value


def scan_in_place(decay: float | Tensor, cut: Tensor, value: Tensor, dim: int, *, reverse: bool) -> Tensor:
    """Solve the recurrence by whatever is fastest for the shape on a CPU; not differentiable.

    Args:
        decay: a float, a 0-d tensor or a tensor of ``value``'s shape.
        cut: bool of ``value``'s shape, true where nothing is passed on, whatever the decay.
        value: float32 or float64, any shape and strides; overwritten.
        dim: dimension of time, from the front.
        reverse: from the last step to the first.

    Returns:
        The solution: ``value`` itself, or a new tensor where its rows cannot be viewed.
    """
    num_steps = value.shape[dim]
    if num_steps == 1:
        return value
    width = value.numel() // num_steps
    is_strided = width > 1 and value.stride(dim) == 1
    chunk = _LOOP_ELEMENTS // num_steps if is_strided else width
    solve_ = _loop_
    if not _prefers_loop(num_steps, min(width, max(chunk, 1)), is_strided):
        chunk = _SCAN_ELEMENTS // num_steps if is_strided else width
        solve_ = _log_scan_
    if width <= chunk:
        solve_(decay, cut, value, dim, reverse)
        return value
    # In env-major memory the passes run over as many environments at a time as the cache holds.
    rows, cut = to_rows(value, dim), to_rows(cut, dim)
    decay = to_rows(decay, dim) if isinstance(decay, Tensor) and decay.ndim else decay
    for start in range(0, width, max(chunk, 1)):
        part = slice(start, start + max(chunk, 1))
        part_decay = decay[:, part] if isinstance(decay, Tensor) and decay.ndim else decay
        solve_(part_decay, cut[:, part], rows[:, part], 0, reverse)
    return from_rows(rows, value.shape, dim)


def _prefers_loop(num_steps: int, width: int, is_strided: bool) -> bool:
    """Whether two operations a step are cheaper than three a level of the scan, each on all steps, on one CPU core."""
    levels = (num_steps - 1).bit_length()
    # The longer the stride, the fewer cache lines serve several steps.
    element_us = _ELEMENT_US * (3 + num_steps / 20 if is_strided else 1)
    loop_us = 2 * num_steps * (_DISPATCH_US + element_us * width)
    return loop_us < 3 * levels * (2 * _DISPATCH_US + _ELEMENT_US * width * num_steps)


def _recurrence(decay: Tensor, value: Tensor, initial: Tensor | None, time_dim: int, *, reverse: bool) -> Tensor:
    tensors = {"decay": decay, "value": value} | ({} if initial is None else {"initial": initial})
    if not all(tensor.is_floating_point() for tensor in tensors.values()):
        raise TypeError(
            f"expected floating point tensors, received {describe(**tensors)}. Remedy: convert with .float()."
        )
    dim = resolve_time_dim(time_dim, value.shape)
    carry_shape = [*value.shape[:dim], *value.shape[dim + 1 :]]
    if initial is not None and list(initial.shape) != carry_shape:
        raise ValueError(
            f"expected initial {carry_shape}, value's shape without time, received {describe(**tensors)}. Remedy: "
            "drop the time dimension of initial"
        )
    if any(tensor.device != value.device for tensor in tensors.values()):
        raise ValueError(
            f"expected all tensors on one device, received {describe(**tensors)}. Remedy: move them with .to(device)."
        )
    try:
        decay = decay.expand(value.shape)
    except RuntimeError as error:
        raise ValueError(
            f"expected decay to broadcast to value, received {describe(**tensors)}. Remedy: a decay with size 1 in "
            "each dimension along which it is constant"
        ) from error

    tensors = (decay, value) if initial is None else (decay, value, initial)
    if has_scan_kernels(*tensors):
        if value.ndim == 3 and dim == 1 and value.shape[-1] >= FEW and len(value) <= MANY:  # not copied to [T, N]
            return recurrence_rows(decay, value, initial, reverse)
        carry = None if initial is None else initial.reshape(-1)
        return from_rows(recurrence_rows(to_rows(decay, dim), to_rows(value, dim), carry, reverse), value.shape, dim)

    initial = None if initial is None else initial.unsqueeze(dim)
    dtype = compute_dtype(*tensors)
    is_functional = value.is_cuda or needs_functional(*tensors)
    decay, cut = decay.to(dtype), decay == 0
    solved = value.to(dtype) if is_functional else torch.empty_like(value, dtype=dtype).copy_(value)
    if initial is not None:
        passed = torch.where(_near(cut, 1, dim, not reverse), 0.0, initial.to(dtype))
        first = _near(solved, 1, dim, not reverse) + _near(decay, 1, dim, not reverse) * passed
        solved = _join(_near(solved, value.shape[dim] - 1, dim, reverse), first, dim, reverse)
    if is_functional:
        return log_scan(decay, cut, solved, dim, reverse=reverse)
    return scan_in_place(decay, cut, solved, dim, reverse=reverse)


def _near(tensor: _Signal, count: int, dim: int, reverse: bool) -> _Signal:
    """The ``count`` steps that the scan reaches last (the earliest if ``reverse``); a number is returned as it is."""
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        return tensor
    return tensor.narrow(dim, 0 if reverse else tensor.shape[dim] - count, count)


def _join(near: Tensor, far: Tensor, dim: int, reverse: bool) -> Tensor:
    return torch.cat([near, far] if reverse else [far, near], dim)


def _extended(decay: _Signal, cut: Tensor, count: int, dim: int, reverse: bool) -> tuple[_Signal, Tensor]:
    """Product of the decays, and whether any cuts, over twice the steps, for ``count`` steps that still need them."""
    near_cut, far_cut = _near(cut, count, dim, reverse), _near(cut, count, dim, not reverse)
    return _near(decay, count, dim, reverse) * _near(decay, count, dim, not reverse), near_cut | far_cut


def _add_scaled_(value: Tensor, decay: float | Tensor, carry: Tensor) -> None:
    """``value += decay * carry``, in place."""
    if isinstance(decay, Tensor):
        value.addcmul_(decay, carry)
    else:
        value.add_(carry, alpha=decay)


def _loop_(decay: float | Tensor, cut: Tensor, value: Tensor, dim: int, reverse: bool) -> None:
    """Two operations a step."""
    values, cuts = value.unbind(dim), cut.unbind(dim)
    decays = decay.unbind(dim) if isinstance(decay, Tensor) and decay.ndim else [decay] * len(values)
    steps = range(len(values))
    for before, t in itertools.pairwise(steps[::-1] if reverse else steps):
        _add_scaled_(values[t], decays[t], torch.where(cuts[t], 0.0, values[before]))


def _log_scan_(decay: float | Tensor, cut: Tensor, value: Tensor, dim: int, reverse: bool) -> None:
    """:func:`log_scan` in place; a number for the decay needs no products. Small tensors feel each call made here."""
    num_steps, span = value.shape[dim], 1
    zero = value.new_zeros(())
    kept = num_steps - 1
    cut, decay = _near(cut, kept, dim, reverse), _near(decay, kept, dim, reverse)
    while True:
        near, far = (0, span) if reverse else (span, 0)
        passed = torch.where(cut, zero, value.narrow(dim, far, kept))
        if isinstance(decay, Tensor):
            value.narrow(dim, near, kept).addcmul_(decay, passed)
        else:
            value.narrow(dim, near, kept).add_(passed, alpha=decay)
        if kept <= span:
            return
        kept -= span
        cut = cut.narrow(dim, near, kept) | cut.narrow(dim, far, kept)
        if isinstance(decay, Tensor) and decay.ndim:
            decay = decay.narrow(dim, near, kept) * decay.narrow(dim, far, kept)
        else:
            decay = decay * decay
        span *= 2
