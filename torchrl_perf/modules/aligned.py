"""Linear layers whose compiled form has sizes that tensor cores support."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def aligned_affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x @ weight + bias`` in matrices padded to rows of 16 bytes; for compiled functions.

    A row of 17 observations is not aligned to 16 bytes, and such products run on the slow float32 units even where TF32
    is allowed. The first column of padding carries the bias, whose gradient is then a row of the weight's gradient
    instead of a reduction over the batch. A compiler makes the padding in the kernels that write ``x`` and ``weight``.

    Args:
        x: ``[*, B, IN]``.
        weight: ``[*, IN, OUT]``.
        bias: ``[*, 1, OUT]``.

    Returns:
        ``[*, B, OUT]``.
    """
    inputs, outputs = weight.shape[-2:]
    multiple = _numbers_in_16_bytes(x)
    right = -outputs % multiple
    if inputs % multiple == 0:
        return torch.matmul(x, F.pad(weight, (0, right)) if right else weight)[..., :outputs] + bias
    down = -(inputs + 1) % multiple
    x = F.pad(F.pad(x, (0, 1), value=1.0), (0, down))
    weight = F.pad(torch.cat([weight, bias], -2), (0, right, 0, down))
    return torch.matmul(x, weight)[..., :outputs]


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(x, weight, bias)``, compiled as :func:`aligned_affine` where the sizes are not aligned.

    Args:
        x: ``[*, IN]``.
        weight: ``[OUT, IN]``.
        bias: ``[OUT]`` or None.

    Returns:
        ``[*, OUT]``.
    """
    multiple = _numbers_in_16_bytes(x)
    even = weight.shape[0] % multiple == 0 and weight.shape[1] % multiple == 0
    if even or bias is None or x.ndim < 2 or not torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return aligned_affine(x, weight.mT, bias.unsqueeze(0))


class AlignedLinear(nn.Linear):
    """``nn.Linear`` as :func:`aligned_linear`. Parameters, values and state are those of ``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:
        """``[*, IN]`` -> ``[*, OUT]``."""
        return aligned_linear(input, self.weight, self.bias)


def _numbers_in_16_bytes(x: Tensor) -> int:
    """The alignment that kernels need for each row: 4 numbers of float32, 8 of 16 bits under autocast."""
    return 8 if torch.is_autocast_enabled(x.device.type) else 4
