"""Linear layers whose compiled form has the sizes that tensor cores take."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_MULTIPLE = 4  # float32 numbers in 16 bytes, the alignment that TF32 kernels ask of each row


def aligned_affine(x: Tensor, weight: Tensor, bias: Tensor, multiple: int = _MULTIPLE) -> Tensor:
    """``x @ weight + bias`` in matrices padded to multiples of 4 rows and columns; for compiled functions.

    A row of 17 observations is not aligned to 16 bytes, and such products run on the slow float32 units even where TF32
    is allowed. The first column of padding carries the bias, whose gradient is then a row of the weight's and no
    reduction over the batch. A compiler makes the padding in the kernels that write ``x`` and ``weight``.

    Args:
        x: ``[*, B, IN]``.
        weight: ``[*, IN, OUT]``.
        bias: ``[*, 1, OUT]``.
        multiple: numbers in 16 bytes: 4 in float32, 8 under autocast.

    Returns:
        ``[*, B, OUT]``.
    """
    inputs, outputs = weight.shape[-2:]
    right = -outputs % multiple
    if inputs % multiple == 0:
        return torch.matmul(x, F.pad(weight, (0, right)) if right else weight)[..., :outputs] + bias
    down = -(inputs + 1) % multiple
    x = F.pad(F.pad(x, (0, 1), value=1.0), (0, down))
    weight = F.pad(torch.cat([weight, bias], -2), (0, right, 0, down))
    return torch.matmul(x, weight)[..., :outputs]


class AlignedLinear(nn.Linear):
    """``nn.Linear`` whose compiled form is :func:`aligned_affine`.

    Parameters, values and state are those of ``nn.Linear``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[*, IN]`` -> ``[*, OUT]``."""
        even = self.in_features % _MULTIPLE == 0 and self.out_features % _MULTIPLE == 0
        if even or self.bias is None or input.ndim < 2 or not torch.compiler.is_compiling():
            return super().forward(input)
        return aligned_affine(input, self.weight.mT, self.bias.unsqueeze(0))
