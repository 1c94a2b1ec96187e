"""Several observations as the input of one network."""

import torch
from torch import Tensor, nn


class JoinedInputs(nn.Module):
    """A network of one vector, called with several: they are concatenated along the last dim, in the order given.

    Args:
        network: maps ``[*, O]`` to anything, with O the sum of the inputs' sizes.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        """``[*, O_1], [*, O_2], ...`` -> what the network gives."""
        return self.network(torch.cat(inputs, -1))
