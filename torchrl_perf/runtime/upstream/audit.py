"""What the audit of host waits needs of torch: which memory a tensor looks at, and kernels that are given back."""

from collections.abc import Callable

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int | None:
    """A number for the memory that a tensor looks at, the same for all its views; None where it has none.

    ``data_ptr`` is 0 for every empty tensor, and the Python object of a storage is made anew by each call.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors and those that are being traced have none
        return None


def take_kernels_back(library: torch.library.Library) -> None:
    """Remove the kernels that a library has registered now, and not when Python collects it."""
    library._destroy()


def once_cuda_is_initialized(function: Callable[[], object]) -> None:
    """Call ``function`` when the program makes its first CUDA context, without making one."""
    torch.cuda._lazy_call(function)
