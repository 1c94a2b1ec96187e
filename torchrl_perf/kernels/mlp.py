"""Triton kernels of a whole small multilayer perceptron: three linear layers, two activations, weights on chip.

A 64-wide network moves about 4 kB a sample when each layer is a kernel of its own, nearly all of it activations that
the next kernel reads back. Here one program keeps all weights in registers and shared memory, takes a block of rows
through every layer and writes only the output. The backward pass keeps nothing from the forward one but its input: it
recomputes the activations (the idea of fully fused networks, arXiv:2106.12372), accumulates the weight gradients of its
rows on chip, and writes one partial gradient a program, which are then summed in a fixed order: results repeat
bit for bit. Two networks of one input, such as actor and critic, may be one launch: the second dim of the grid is the
network.

Reference: :func:`torchrl_perf.functional.mlp.mlp`, which defines the values. Import this module only where Triton is.
"""

import torch
import triton
import triton.language as tl

from torchrl_perf.kernels.activations import ACTIVATIONS, activate, slope
from torchrl_perf.kernels.dependent import wait_for_previous
from torchrl_perf.kernels.launch import launch

Params = tuple[list[torch.Tensor], ...]
"""Those of one network, or of two."""


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        out = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "fp16":
        out = tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        out = tl.dot(a, b, input_precision=PRECISION)
    return out


@triton.jit
def _load_matrix(ptr, rows, COLS: tl.constexpr, ROWS_PAD: tl.constexpr, COLS_PAD: tl.constexpr):
    """A contiguous [rows, COLS] matrix as a zero-padded block."""
    r = tl.arange(0, ROWS_PAD)[:, None]
    c = tl.arange(0, COLS_PAD)[None, :]
    return tl.load(ptr + r * COLS + c, mask=(r < rows) & (c < COLS), other=0.0).to(tl.float32)


@triton.jit
def _of(each, network):
    """What is this program's network's: of one network, or of two."""
    return each[0] if len(each) == 1 else tl.where(network == 0, each[0], each[1])


@triton.jit
def _load_vector(ptr, size, PAD: tl.constexpr):
    i = tl.arange(0, PAD)
    return tl.load(ptr + i, mask=i < size, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x_ptr, w1_ptrs, b1_ptrs, w2_ptrs, b2_ptrs, w3_ptrs, b3_ptrs, y_ptrs, rows, stride_row, stride_col,
    IN: tl.constexpr, OUTS: tl.constexpr, H: tl.constexpr, IN_PAD: tl.constexpr, OUT_PAD: tl.constexpr,
    BLOCK: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    network = tl.program_id(1)
    outputs = _of(OUTS, network)
    w1 = tl.trans(_load_matrix(_of(w1_ptrs, network), H, IN, H, IN_PAD))
    w2 = tl.trans(_load_matrix(_of(w2_ptrs, network), H, H, H, H))
    w3 = tl.trans(_load_matrix(_of(w3_ptrs, network), outputs, H, OUT_PAD, H))
    b1 = _load_vector(_of(b1_ptrs, network), H, H)
    b2 = _load_vector(_of(b2_ptrs, network), H, H)
    b3 = _load_vector(_of(b3_ptrs, network), outputs, OUT_PAD)
    y_ptr = _of(y_ptrs, network)
    i = tl.arange(0, IN_PAD)[None, :]
    o = tl.arange(0, OUT_PAD)[None, :]
    for start in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        r = (start + tl.arange(0, BLOCK))[:, None]
        x = tl.load(x_ptr + r.to(tl.int64) * stride_row + i * stride_col, mask=(r < rows) & (i < IN), other=0.0).to(
            tl.float32
        )
        h1 = activate(_dot(x, w1, PRECISION) + b1[None, :], ACT, FAST)
        h2 = activate(_dot(h1, w2, PRECISION) + b2[None, :], ACT, FAST)
        y = _dot(h2, w3, PRECISION) + b3[None, :]
        tl.store(y_ptr + r.to(tl.int64) * outputs + o, y, mask=(r < rows) & (o < outputs))


@triton.jit
def _put_gradients(
    base, outputs, grad_w1, grad_b1, grad_w2, grad_b2, grad_w3, grad_b3, IN: tl.constexpr, H: tl.constexpr,
    IN_PAD: tl.constexpr, OUT_PAD: tl.constexpr,
):  # fmt: skip
    """Writes a program's gradients of a network one behind the other."""
    i = tl.arange(0, IN_PAD)[None, :]
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


@triton.jit
def _backward_kernel(
    x_ptr, g_ptrs, w1_ptrs, b1_ptrs, w2_ptrs, b2_ptrs, w3_ptrs, partial_ptr, rows, stride_row, stride_col, g_row, g_col,
    second_row, second_col,
    IN: tl.constexpr, OUTS: tl.constexpr, H: tl.constexpr, IN_PAD: tl.constexpr, OUT_PAD: tl.constexpr,
    BLOCK: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    network = tl.program_id(1)
    outputs = _of(OUTS, network)
    g_ptr = _of(g_ptrs, network)
    if len(OUTS) > 1:
        g_row = tl.where(network == 0, g_row, second_row)
        g_col = tl.where(network == 0, g_col, second_col)
    w1 = tl.trans(_load_matrix(_of(w1_ptrs, network), H, IN, H, IN_PAD))
    w2_out_in = _load_matrix(_of(w2_ptrs, network), H, H, H, H)
    w2 = tl.trans(w2_out_in)
    w3_out_in = _load_matrix(_of(w3_ptrs, network), outputs, H, OUT_PAD, H)
    b1 = _load_vector(_of(b1_ptrs, network), H, H)
    b2 = _load_vector(_of(b2_ptrs, network), H, H)
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
        g = tl.load(g_ptr + r.to(tl.int64) * g_row + o * g_col, mask=(r < rows) & (o < outputs), other=0.0).to(
            tl.float32
        )
        h1 = activate(_dot(x, w1, PRECISION) + b1[None, :], ACT, FAST)
        h2 = activate(_dot(h1, w2, PRECISION) + b2[None, :], ACT, FAST)
        # rows beyond the end have g = 0 and so add nothing, whatever their activations are
        grad_w3 += _dot(tl.trans(g), h2, PRECISION)
        grad_b3 += tl.sum(g, axis=0)
        d2 = _dot(g, w3_out_in, PRECISION) * slope(h2, h2, ACT)
        grad_w2 += _dot(tl.trans(d2), h1, PRECISION)
        grad_b2 += tl.sum(d2, axis=0)
        d1 = _dot(d2, w2_out_in, PRECISION) * slope(h1, h1, ACT)
        grad_w1 += _dot(tl.trans(d1), x, PRECISION)
        grad_b1 += tl.sum(d1, axis=0)
    # one row of the partial gradients a program, of each network in the order w1, b1, w2, b2, w3, b3
    HIDDEN: tl.constexpr = H * IN + H + H * H + H
    SIZE: tl.constexpr = HIDDEN + OUTS[0] * (H + 1)
    if len(OUTS) == 1:
        base = partial_ptr + tl.program_id(0) * SIZE
    else:
        base = partial_ptr + tl.program_id(0) * (SIZE + HIDDEN + OUTS[1] * (H + 1)) + network * SIZE
    _put_gradients(base, outputs, grad_w1, grad_b1, grad_w2, grad_b2, grad_w3, grad_b3, IN, H, IN_PAD, OUT_PAD)


def _constants(params: Params, activation: str, precision: str) -> dict:
    """Constants of both kernels but for the rows of a block, which come first in their order."""
    (hidden, inputs), outputs = params[0][0].shape, tuple([each[4].shape[0] for each in params])
    return {
        "IN": inputs,
        "OUTS": outputs,
        "H": hidden,
        "IN_PAD": max(16, triton.next_power_of_2(inputs)),
        "OUT_PAD": max(16, triton.next_power_of_2(max(outputs))),
        "BLOCK": 16,
        "ACT": ACTIVATIONS[activation],
        "PRECISION": precision,
        "FAST": precision != "ieee",
    }


def _grid(rows: int, programs: int, largest: int) -> tuple[int, int]:
    """(block of rows, number of programs): small blocks until the device is full, then persistent programs."""
    block = 16
    while block < largest and triton.cdiv(rows, block) > programs:
        block *= 2
    return block, max(1, min(triton.cdiv(rows, block), programs))


def forward(
    x: torch.Tensor, params: list[torch.Tensor], activation: str, precision: str, processors: int
) -> torch.Tensor:
    """``y [B, OUT]`` of ``x [B, IN]`` float32; contiguous w1 [H, IN], b1, w2 [H, H], b2, w3 [OUT, H], b3 in params."""
    return forward_of((params,), x, activation, precision, processors)[0]


def backward(
    grad: torch.Tensor, x: torch.Tensor, params: list[torch.Tensor], activation: str, precision: str, processors: int
) -> torch.Tensor:
    """Gradients of all six parameters, one after the other in one float32 vector, for ``grad [B, OUT]``."""
    return backward_of((grad,), (params,), x, activation, precision, processors)


def forward_of(
    params: Params, x: torch.Tensor, activation: str, precision: str, processors: int
) -> tuple[torch.Tensor, ...]:
    """:func:`forward` of one network, or of two of equal widths but for their outputs, in one launch."""
    hidden, count = params[0][0].shape[0], len(params)
    y = tuple([x.new_empty(x.shape[0], each[4].shape[0]) for each in params])
    block, programs = _grid(x.shape[0], max(1, (4 if hidden <= 64 else 2) * processors // count), 64)
    launch(
        _forward_kernel, (programs, count), (x, *zip(*params, strict=True), y, x.shape[0], *x.stride()),
        {**_constants(params, activation, precision), "BLOCK": block}, num_warps=4, num_stages=1,
    )  # fmt: skip
    return y


def backward_of(
    grads: tuple[torch.Tensor, ...], params: Params, x: torch.Tensor, activation: str, precision: str, processors: int
) -> torch.Tensor:
    """:func:`backward` of the networks of :func:`forward_of`: their gradients one network after the other."""
    hidden, count = params[0][0].shape[0], len(params)
    # two matrices of 128 x 128 leave shared memory for blocks of 32 rows, and 64 rows of TF32 do not fit into registers
    wide = hidden > 64
    most = max(1, (1 if wide else 2) * processors // count)
    block, programs = _grid(x.shape[0], most, 32 if wide or precision == "tf32" else 64)
    size = sum(p.numel() for each in params for p in each)
    partial = x.new_empty(programs, size)
    tensors = list(zip(*params, strict=True))[:5]
    launch(
        _backward_kernel, (programs, count),
        (x, grads, *tensors, partial, x.shape[0], *x.stride(), *grads[0].stride(), *grads[-1].stride()),
        {**_constants(params, activation, precision), "BLOCK": block},
        num_warps=8 if wide else 4, num_stages=1,
    )  # fmt: skip
    return partial.sum(0) if programs > 1 else partial[0]
