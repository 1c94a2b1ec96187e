"""What the kernels of gates share: sequences of any width, of which a step is a matrix product and one launch.

The product of the state and the recurrent weights is cuBLAS's, in the precision that PyTorch's matrix products have.
All else of a step, resets, inputs, gates and what a backward pass needs, is one kernel over the entries of the state.
Import this module only where Triton is.
"""

import logging
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.activations import ACTIVATIONS, activate

__all__ = ["BLOCK", "before_step", "grid_of", "place", "sigmoid", "tanh", "tell_once"]

BLOCK = 256
"""Entries of the state that a program computes."""
TANH = tl.constexpr(ACTIVATIONS["tanh"])
logger = logging.getLogger("torchrl_perf")


@triton.jit
def tanh(x):
    """In float32: a gate is not where the time goes."""
    return activate(x, TANH, False)


@triton.jit
def sigmoid(x):
    """The logistic function, through :func:`tanh`."""
    return 0.5 * tanh(0.5 * x) + 0.5


@triton.jit
def place(num_rows, H: tl.constexpr, BLOCK: tl.constexpr):
    """Row and unit of each entry of the program, and which are of the state."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = entry // H
    return row, entry % H, row < num_rows


@triton.jit
def before_step(after_ptr, initial_ptr, begins, at, first, mask, t, H: tl.constexpr):
    """A state before the step t, 0 where an episode begins.

    It is found at ``at - H`` of the states after each step, and of the first step at ``first`` of those before it.
    """
    value = tl.load(after_ptr + at - H, mask & (t > 0), other=0.0)
    value += tl.load(initial_ptr + first, mask & (t == 0), other=0.0)
    return tl.where(begins, 0.0, value)


def grid_of(state: Tensor) -> tuple[int]:
    """Programs of a launch over ``[N, H]``."""
    return (triton.cdiv(state.numel(), BLOCK),)


@cache
def tell_once(cell: str, hidden: int) -> None:
    """Say in the log what runs, once for each cell and width."""
    logger.warning(
        "%s of %d hidden units: a sequence runs step by step, each a matrix product and one kernel. Expected for a "
        "sequence in one kernel: weights that fit on chip, as up to 128 units do, and TF32 in recurrent layers "
        "(torch.backends.cudnn.allow_tf32). Remedy: none is needed; fewer units are faster.",
        cell,
        hidden,
    )
