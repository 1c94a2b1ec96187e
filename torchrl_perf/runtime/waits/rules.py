"""Operators that wait for some of their arguments and not for others, each with the reason in its kernel on CUDA.

Measured with ``torch.cuda.set_sync_debug_mode`` on CUDA where that mode sees them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["RULES", "Rule"]


class Rule(NamedTuple):
    """When an operator waits.

    Attributes:
        overloads: names of its overloads that may wait.
        waits: of positional and keyword arguments.
        reads: whether kernels on the CPU call it with numbers of their own, which do not count.
    """

    overloads: tuple[str, ...]
    waits: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda args, kwargs: True
    reads: bool = False


def _get(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _ends_are_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(_get(args, kwargs, i, name), Tensor) for i, name in enumerate(("start", "end")))


def _range_is_open(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _get(args, kwargs, 2, "min", 0) == _get(args, kwargs, 3, "max", 0)


def _sorts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = _get(args, kwargs, 0, "elements"), _get(args, kwargs, 1, "test_elements")
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return other.numel() >= int(10.0 * one.numel() ** 0.145)


def _std_is_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return isinstance(_get(args, kwargs, 1, "std"), Tensor)


def _has_sorter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("sorter") is not None


def _value_is_on_device(position: int) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    def waits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        value = _get(args, kwargs, position, "value")
        return isinstance(value, Tensor) and value.device == args[0].device

    return waits


def _checks_lengths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("lengths") is not None and not kwargs.get("unsafe", False)


_TENSOR_ENDS = ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")

RULES = {
    # the ends are read, since the kernel takes numbers
    "linspace": Rule(_TENSOR_ENDS, _ends_are_tensors),
    "logspace": Rule(_TENSOR_ENDS, _ends_are_tensors),
    # without a range it takes the smallest and the largest value, read on the host
    "histc": Rule(("",), _range_is_open),
    # beyond a few test elements it sorts and takes unique ones, whose number the host needs
    "isin": Rule(("Tensor_Tensor",), _sorts),
    # checks on the host that no standard deviation is negative
    "normal": Rule(("Tensor_Tensor", "float_Tensor"), _std_is_tensor),
    # checks on the host that the sorter's indices are in range
    "searchsorted": Rule(("Tensor", "Scalar"), _has_sorter),
    # a 0-d tensor as value is read, since the kernel takes a number
    "masked_fill": Rule(("Tensor",), _value_is_on_device(2), reads=True),
    "masked_fill_": Rule(("Tensor",), _value_is_on_device(2), reads=True),
    "index_fill": Rule(("int_Tensor",), _value_is_on_device(3), reads=True),
    "index_fill_": Rule(("int_Tensor",), _value_is_on_device(3), reads=True),
    # checks lengths on the host unless unsafe=True
    "segment_reduce": Rule(("",), _checks_lengths),
    # the number of different indices is a size of the next kernel (embeddings with max_norm)
    "embedding_renorm_": Rule(("",)),
    # solvers whose convergence or degree the host reads
    "_linalg_eigh": Rule(("",)),
    "_linalg_svd": Rule(("",)),
    "linalg_pinv": Rule(("atol_rtol_tensor",)),
    "cholesky": Rule(("",)),
    "cholesky_inverse": Rule(("",)),
    "linalg_eig": Rule(("",)),
    "_linalg_eigvals": Rule(("",)),
    "linalg_lstsq": Rule(("",)),
    "linalg_matrix_exp": Rule(("",)),
    # the number of entries that are not zero
    "_to_sparse": Rule(("", "sparse_dim")),
}
