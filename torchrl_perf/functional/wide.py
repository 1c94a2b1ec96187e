"""Sixteen bits are for storage: results are computed in float32, or in float64 if an input is, and rounded once.

A noise, product, power or sum in bfloat16 has 8 bits: a discount of .97 times a trace of .95 becomes .9219, a thousand
equal choices are drawn with shares that differ by a factor of 40. Functions with these decorators avoid that.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

__all__ = ["compute_dtype", "computed_wide", "outside_autocast", "result_dtype", "wide_dtype", "widened"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_FLOAT32 = torch.float32
_WIDE = (torch.float32, torch.float64)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where numbers of a dtype are drawn and computed: float64 for float64, float32 for any other."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def widened(tensor: Tensor) -> Tensor:
    """A tensor of 16 bits as float32, any other as it is."""
    dtype = tensor.dtype
    return tensor if dtype is _FLOAT32 or dtype in _WIDE or not dtype.is_floating_point else tensor.to(_FLOAT32)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is float64, else float32: half precision is never used for a recurrence."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def result_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """What floating-point tensors promote to; as everywhere in PyTorch, 0-d ones count only among themselves."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    counted = [tensor.dtype for tensor in floats if tensor.ndim] or [tensor.dtype for tensor in floats]
    return functools.reduce(torch.promote_types, counted) if counted else torch.float32


def computed_wide(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: the function computes in float32 or float64, whatever the dtype of its arguments.

    All floating-point arguments are cast to one dtype before anything is computed: float64 where their
    :func:`result_dtype` is, else float32. Results are rounded to 16 bits if that is the result dtype. A call with only
    float32 arguments is the plain call.

    Args:
        function: takes tensors by position or name (not within lists) and returns a tensor, or a tuple of them.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, Tensor) and x.dtype is not _FLOAT32 and x.dtype.is_floating_point:
                break
        else:
            return function(*args, **kwargs)
        dtype = result_dtype(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        wide = wide_dtype(dtype)
        named = {name: _cast(value, wide) for name, value in kwargs.items()}
        out = cast("Any", function)(*[_cast(value, wide) for value in args], **named)
        if dtype in _WIDE:
            return out
        return cast("_R", tuple(_cast(part, dtype) for part in out) if isinstance(out, tuple) else _cast(out, dtype))

    return call


def outside_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator for functions whose matrix products belong to no network: autocast leaves their operands alone."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        kind = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
        if not torch.is_autocast_enabled(kind):
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    return call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype.is_floating_point else value
