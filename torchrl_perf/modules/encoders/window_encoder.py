"""A window of past steps and what is known besides, as one vector, by attention over the steps."""

import torch
from torch import Tensor, nn

from torchrl_perf.modules.encoders.node_encoder import NodeEncoder

__all__ = ["WindowEncoder"]


class WindowEncoder(nn.Module):
    """A transformer encoder (arXiv:1706.03762) over the steps of a window, for flat observations.

    The observation is W steps of F numbers, the oldest first, and R others. Each step is a token, the sum of a linear
    map of its numbers and of a learnt vector of its place; one more token, of the R others, attends to all of them and
    is the summary. Layers normalise first (arXiv:2002.04745). Shapes are static, and nothing waits for the host.

    Args:
        window: W.
        features: F.
        others: R, at least 1.
        width: of the tokens and the summary.
        num_layers: number of layers.
        num_heads: heads of the attention; a divisor of ``width``.
        precision: of the layers, ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``.
        device: of the parameters.

    Attributes:
        out_features: ``width + R``.

    Raises:
        ValueError: for sizes below 1, heads that do not divide the width, an unknown precision.
    """

    places: Tensor

    def __init__(
        self,
        window: int,
        features: int,
        others: int,
        *,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        precision: str = "tf32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window: expected at least 1 step, received {window}. Remedy: window=24.")
        # the linear map of a one-hot place is a learnt vector of it
        sizes = {"width": width, "num_layers": num_layers, "num_heads": num_heads, "groups": 0}
        self.encoder = NodeEncoder(features + window, others, **sizes, precision=precision, device=device)
        self.steps, self.others, self.out_features = (window, features), others, width + others
        self.register_buffer("places", torch.eye(window, device=device), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        """``[*, W F + R]`` -> the summary and the R others, ``[*, width + R]``."""
        past, others = observation.split([self.steps[0] * self.steps[1], self.others], -1)
        steps = past.unflatten(-1, self.steps)
        places = self.places.to(steps.dtype).expand(*steps.shape[:-1], -1)
        tokens = torch.cat((steps, places), -1)
        mask = torch.ones(steps.shape[:-1], dtype=torch.bool, device=steps.device)
        return torch.cat((self.encoder.graph_embedding(tokens, mask, others), others), -1)
