"""Where kernels can be tried: on CUDA, else on a CPU by Triton's interpreter."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch


def tries_kernels(test: Callable[..., Any]) -> Any:
    """Marks a test of kernels: it needs CUDA, or TRITON_INTERPRET=1 in the environment (Triton reads it at import)."""
    return test if os.environ.get("TRITON_INTERPRET") == "1" else pytest.mark.gpu(test)


def kernel_device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
