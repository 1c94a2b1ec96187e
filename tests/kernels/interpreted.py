"""Where kernels can be tried: on CUDA, else on a CPU by Triton's interpreter."""

import os

import pytest
import torch


def kernel_device() -> str:
    """CUDA; where there is none, the CPU with Triton's interpreter (TRITON_INTERPRET=1, read at Triton's import)."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs CUDA, or TRITON_INTERPRET=1")
    pytest.importorskip("triton")
    return "cpu"
