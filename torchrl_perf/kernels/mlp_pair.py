"""Triton kernels of two small perceptrons on the same rows, such as actor and critic, in one launch.

The second dim of the grid is the network. Both have the inputs and hidden widths of
:mod:`torchrl_perf.kernels.mlp`, whose kernels they are otherwise; they differ in the number of their outputs alone,
which are padded to the same power of two. The last launch adds the programs' parts of both networks' gradients.

Reference: :func:`torchrl_perf.functional.mlp.mlp` of each. Import this module only where Triton is.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchrl_perf.kernels.activations import activate, slope
from torchrl_perf.kernels.launch import launch
from torchrl_perf.kernels.mlp import _constants, _dot, _grid, _load_vector

Params = list[Tensor]


@triton.jit
def _matrix(ptr, rows, ROWS_PAD: tl.constexpr, COLS: tl.constexpr, COLS_PAD: tl.constexpr):
    """A contiguous ``[rows, COLS]`` matrix as a zero-padded block."""
    r = tl.arange(0, ROWS_PAD)[:, None]
    c = tl.arange(0, COLS_PAD)[None, :]
    return tl.load(ptr + r * COLS + c, mask=(r < rows) & (c < COLS), other=0.0).to(tl.float32)


@triton.jit
def _of(pair, network):
    """One of two tensors."""
    return tl.where(network == 0, pair[0], pair[1])


@triton.jit
def _forward_kernel(
    x_ptr, w1, b1, w2, b2, w3, b3, y, rows, stride_row, stride_col,
    IN: tl.constexpr, OUTS: tl.constexpr, H: tl.constexpr, IN_PAD: tl.constexpr, OUT_PAD: tl.constexpr,
    BLOCK: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1)
    outputs = tl.where(network == 0, OUTS[0], OUTS[1])
    first = tl.trans(_matrix(_of(w1, network), H, H, IN, IN_PAD))
    second = tl.trans(_matrix(_of(w2, network), H, H, H, H))
    last = tl.trans(_matrix(_of(w3, network), outputs, OUT_PAD, H, H))
    i = tl.arange(0, IN_PAD)[None, :]
    o = tl.arange(0, OUT_PAD)[None, :]
    b1_ = _load_vector(_of(b1, network), H, H)
    b2_ = _load_vector(_of(b2, network), H, H)
    b3_ = tl.load(_of(b3, network) + o, mask=o < outputs, other=0.0)
    y_ptr = _of(y, network)
    for start in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        r = (start + tl.arange(0, BLOCK))[:, None]
        x = tl.load(x_ptr + r.to(tl.int64) * stride_row + i * stride_col, mask=(r < rows) & (i < IN), other=0.0).to(
            tl.float32
        )
        h1 = activate(_dot(x, first, PRECISION) + b1_[None, :], ACT, FAST)
        h2 = activate(_dot(h1, second, PRECISION) + b2_[None, :], ACT, FAST)
        out = _dot(h2, last, PRECISION) + b3_
        tl.store(y_ptr + r.to(tl.int64) * outputs + o, out, mask=(r < rows) & (o < outputs))


@triton.jit
def _backward_kernel(
    x_ptr, grads, w1, b1, w2, b2, w3, parts, rows, stride_row, stride_col, row_of_first, col_of_first, row_of_second,
    col_of_second,
    IN: tl.constexpr, OUTS: tl.constexpr, H: tl.constexpr, IN_PAD: tl.constexpr, OUT_PAD: tl.constexpr,
    BLOCK: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    network = tl.program_id(1)
    outputs = tl.where(network == 0, OUTS[0], OUTS[1])
    w1_ = tl.trans(_matrix(_of(w1, network), H, H, IN, IN_PAD))
    w2_out_in = _matrix(_of(w2, network), H, H, H, H)
    w2_ = tl.trans(w2_out_in)
    w3_out_in = _matrix(_of(w3, network), outputs, OUT_PAD, H, H)
    b1_ = _load_vector(_of(b1, network), H, H)
    b2_ = _load_vector(_of(b2, network), H, H)
    g_ptr = _of(grads, network)
    g_row = tl.where(network == 0, row_of_first, row_of_second)
    g_col = tl.where(network == 0, col_of_first, col_of_second)
    grad_w1 = tl.zeros((H, IN_PAD), dtype=tl.float32)
    grad_w2 = tl.zeros((H, H), dtype=tl.float32)
    grad_w3 = tl.zeros((OUT_PAD, H), dtype=tl.float32)
    grad_b1 = tl.zeros((H,), dtype=tl.float32)
    grad_b2 = tl.zeros((H,), dtype=tl.float32)
    grad_b3 = tl.zeros((OUT_PAD,), dtype=tl.float32)
    i = tl.arange(0, IN_PAD)[None, :]
    o = tl.arange(0, OUT_PAD)[None, :]
    for start in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        r = (start + tl.arange(0, BLOCK))[:, None]
        x = tl.load(x_ptr + r.to(tl.int64) * stride_row + i * stride_col, mask=(r < rows) & (i < IN), other=0.0).to(
            tl.float32
        )
        g = tl.load(g_ptr + r.to(tl.int64) * g_row + o * g_col, mask=(r < rows) & (o < outputs), other=0.0)
        g = g.to(tl.float32)
        h1 = activate(_dot(x, w1_, PRECISION) + b1_[None, :], ACT, FAST)
        h2 = activate(_dot(h1, w2_, PRECISION) + b2_[None, :], ACT, FAST)
        # rows beyond the end have g = 0 and so add nothing, whatever their activations are
        grad_w3 += _dot(tl.trans(g), h2, PRECISION)
        grad_b3 += tl.sum(g, axis=0)
        d2 = _dot(g, w3_out_in, PRECISION) * slope(h2, h2, ACT)
        grad_w2 += _dot(tl.trans(d2), h1, PRECISION)
        grad_b2 += tl.sum(d2, axis=0)
        d1 = _dot(d2, w2_out_in, PRECISION) * slope(h1, h1, ACT)
        grad_w1 += _dot(tl.trans(d1), x, PRECISION)
        grad_b1 += tl.sum(d1, axis=0)
    # a program's row of the partial gradients: both networks', each in the order w1, b1, w2, b2, w3, b3
    SHARED: tl.constexpr = H * IN + H + H * H + H
    SIZE0: tl.constexpr = SHARED + OUTS[0] * (H + 1)
    SIZE1: tl.constexpr = SHARED + OUTS[1] * (H + 1)
    base = parts + tl.program_id(0).to(tl.int64) * (SIZE0 + SIZE1) + network * SIZE0
    h = tl.arange(0, H)
    tl.store(base + h[:, None] * IN + i, grad_w1, mask=i < IN)
    base += H * IN
    tl.store(base + h, grad_b1)
    base += H
    tl.store(base + h[:, None] * H + h[None, :], grad_w2)
    base += H * H
    tl.store(base + h, grad_b2)
    base += H
    out = tl.arange(0, OUT_PAD)
    tl.store(base + out[:, None] * H + h[None, :], grad_w3, mask=out[:, None] < outputs)
    base += outputs * H
    tl.store(base + out, grad_b3, mask=out < outputs)


def _pair_constants(
    params: tuple[Params, Params], activation: str, precision: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of both kernels, those before the block of rows and those behind it."""
    hidden, inputs = params[0][0].shape
    outputs = tuple(each[4].shape[0] for each in params)
    found = _constants(inputs, max(outputs), hidden, activation, precision)
    found["FAST"] = found["FAST"] and not triton.knobs.runtime.interpret
    names = ("H", "IN_PAD", "OUT_PAD"), ("ACT", "PRECISION", "FAST")
    shape, rest = ({name: found[name] for name in part} for part in names)
    return {"IN": inputs, "OUTS": outputs, **shape}, rest


def forward(
    x: Tensor, params: tuple[Params, Params], activation: str, precision: str, processors: int
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, OUT]`` of both networks; arguments as of :func:`torchrl_perf.kernels.mlp.forward`."""
    hidden = params[0][0].shape[0]
    y = tuple(x.new_empty(x.shape[0], each[4].shape[0]) for each in params)
    block, programs = _grid(x.shape[0], 2 * processors if hidden <= 64 else processors, 64)
    shape, rest = _pair_constants(params, activation, precision)
    launch(
        _forward_kernel, (programs, 2), (x, *zip(*params, strict=True), y, x.shape[0], *x.stride()),
        {**shape, "BLOCK": block, **rest}, num_warps=4, num_stages=1,
    )  # fmt: skip
    return y


def backward(
    grads: tuple[Tensor, Tensor], x: Tensor, params: tuple[Params, Params], activation: str, precision: str,
    processors: int,
) -> Tensor:  # fmt: skip
    """Gradients of all twelve parameters, one after the other in one float32 vector, for ``grads [B, OUT]``."""
    hidden = params[0][0].shape[0]
    wide = hidden > 64  # two matrices of 128 x 128 leave shared memory for blocks of 32 rows
    block, programs = _grid(x.shape[0], max(1, processors // 2) if wide else processors, 32 if wide else 64)
    size = sum(p.numel() for each in params for p in each)
    part = x.new_empty(programs, size)
    shape, rest = _pair_constants(params, activation, precision)
    launch(
        _backward_kernel, (programs, 2),
        (x, grads, *list(zip(*params, strict=True))[:5], part, x.shape[0], *x.stride(), *grads[0].stride(),
         *grads[1].stride()),
        {**shape, "BLOCK": block, **rest}, num_warps=8 if wide else 4, num_stages=1,
    )  # fmt: skip
    return part.sum(0) if programs > 1 else part[0]
