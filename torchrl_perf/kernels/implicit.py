"""Triton kernel of the mean over quantile levels: the levels are a loop inside of a program.

Written out layer by layer, 4,096 rows of 32 levels and 64 features are matrices of 33 MB, each written and read again.
Here a program keeps the features of its rows and the weights on chip, takes them through the hidden layer once for each
level, and writes the last layer's product with the mean.

Reference: :func:`torchrl_perf.functional.implicit.implicit_mean`. Import this module only where Triton is.
"""

import torch
import triton
import triton.language as tl

from torchrl_perf.kernels.activations import ACTIVATIONS, activate
from torchrl_perf.kernels.mlp import _dot, _load_matrix, _load_vector


@triton.jit
def _mean_kernel(
    psi_ptr, phi_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, y_ptr, rows, stride_row, stride_col,
    LEVELS: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, OUT_PAD: tl.constexpr, BLOCK: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, LAST: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    w1 = tl.trans(_load_matrix(w1_ptr, H, H, H, H))
    b1 = _load_vector(b1_ptr, H, H)
    h = tl.arange(0, H)
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    psi = tl.load(psi_ptr + r.to(tl.int64) * stride_row + h[None, :] * stride_col, mask=r < rows, other=0.0).to(
        tl.float32
    )
    total = tl.zeros((BLOCK, H), dtype=tl.float32)
    for level in range(LEVELS):
        phi = tl.load(phi_ptr + level * H + h).to(tl.float32)
        total += activate(_dot(psi * phi[None, :], w1, PRECISION) + b1[None, :], ACT, FAST)
    w2 = tl.trans(_load_matrix(w2_ptr, OUT, H, OUT_PAD, H))
    b2 = _load_vector(b2_ptr, OUT, OUT_PAD)
    y = _dot(total * (1.0 / LEVELS), w2, LAST) + b2[None, :]
    o = tl.arange(0, OUT_PAD)[None, :]
    tl.store(y_ptr + r.to(tl.int64) * OUT + o, y, mask=(r < rows) & (o < OUT))


def forward(
    psi: torch.Tensor,
    phi: torch.Tensor,
    params: list[torch.Tensor],
    activation: str,
    precision: str,
    processors: int,
) -> torch.Tensor:
    """``y [B, OUT]`` of ``psi [B, H]``, contiguous ``phi [K, H]``, and w1 [H, H], b1, w2 [OUT, H], b2 in params."""
    rows, hidden = psi.shape
    outputs = params[2].shape[0]
    y = psi.new_empty(rows, outputs)
    if rows == 0:
        return y
    block = 16
    while block < 64 and triton.cdiv(rows, block) > processors:
        block *= 2
    _mean_kernel[(triton.cdiv(rows, block),)](
        psi, phi, *params, y, rows, psi.stride(0), psi.stride(1),
        LEVELS=phi.shape[0], OUT=outputs, H=hidden, OUT_PAD=max(16, triton.next_power_of_2(outputs)), BLOCK=block,
        ACT=ACTIVATIONS[activation], PRECISION=precision, LAST="ieee" if precision == "ieee" else "tf32",
        FAST=precision != "ieee", num_warps=4 if hidden <= 64 else 8, num_stages=1,
    )  # fmt: skip
    return y
