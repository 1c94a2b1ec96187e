"""Activations and their slopes inside of Triton kernels.

Reference: the layers of the same names in ``torch.nn``. Import this module only where Triton is.
"""

import triton
import triton.language as tl

ACTIVATIONS = {"tanh": 0, "relu": 1, "elu": 2, "leaky_relu": 3, "silu": 4, "gelu": 5, "mish": 6}
FROM_VALUE = ("tanh", "relu", "elu", "leaky_relu")
"""Activations whose slope follows from their value; that of the others needs what they were applied to."""


@triton.jit
def activate(u, ACT: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The activation of ``u``. FAST is the hardware's tanh, as exact as the TF32 product before it."""
    if ACT == 1:
        out = tl.where(u < 0.0, 0.0, u)  # not `maximum`, which would hide NaN
    elif ACT == 2:
        out = tl.where(u < 0.0, tl.exp(u) - 1.0, u)
    elif ACT == 3:
        out = tl.where(u < 0.0, 0.01 * u, u)
    elif ACT == 4:
        out = u / (1.0 + tl.exp(-u))
    elif ACT == 5:
        out = 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))
    elif ACT == 6:
        out = u * _tanh_softplus(u)
    elif FAST:
        out = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = 1.0 - 2.0 / (tl.exp(2.0 * u) + 1.0)
    return out


@triton.jit
def slope(h, u, ACT: tl.constexpr) -> tl.tensor:
    """Derivative of the activation, from its value ``h`` or from what it was applied to, ``u``."""
    if ACT == 1:
        out = tl.where(h > 0.0, 1.0, 0.0)
    elif ACT == 2:
        out = tl.where(h > 0.0, 1.0, h + 1.0)
    elif ACT == 3:
        out = tl.where(h > 0.0, 1.0, 0.01)
    elif ACT == 4:
        s = 1.0 / (1.0 + tl.exp(-u))
        out = s * (1.0 + u * (1.0 - s))
    elif ACT == 5:
        out = 0.5 * (1.0 + tl.erf(u * 0.7071067811865476)) + u * 0.3989422804014327 * tl.exp(-0.5 * u * u)
    elif ACT == 6:
        t = _tanh_softplus(u)
        out = t + u * (1.0 - t * t) / (1.0 + tl.exp(-u))
    else:
        out = 1.0 - h * h
    return out


@triton.jit
def _tanh_softplus(u):
    """``tanh(log(1 + exp(u)))``, which is 1 in float32 from 20 on."""
    e = tl.exp(tl.minimum(u, 20.0))
    return e * (e + 2.0) / (e * (e + 2.0) + 2.0)
