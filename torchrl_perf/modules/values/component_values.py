"""A value for each component of a reward."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchrl_perf.modules.ensemble import EnsembleMLP
from torchrl_perf.modules.mlp import FusedMLP


class ComponentValues(nn.Module):
    """A value head for each of C reward components: ``[*, O]`` -> ``[*, C]``.

    As the network of a critic that writes "state_value", it gives :class:`~torchrl_perf.transforms.GAETransform` one
    advantage for each component.

    Args:
        in_features: O.
        names: of the components, in the order of the reward's columns.
        hidden_size: width of both hidden layers.
        activation: ``"tanh"`` or ``"relu"``.
        shared: whether the heads have the hidden layers in common; otherwise each component has a network of its own,
            all of them in one chain of batched matrix products.
        precision: as for :class:`FusedMLP`.
        device: of the parameters.

    Attributes:
        names: tuple of names.

    Raises:
        ValueError: without names, for a name given twice, and as :class:`FusedMLP`.
    """

    def __init__(
        self,
        in_features: int,
        names: Sequence[str],
        *,
        hidden_size: int = 64,
        activation: str = "tanh",
        shared: bool = True,
        precision: str = "tf32",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.names = check_names(names)
        count = len(self.names)
        if shared:
            self.net: nn.Module = FusedMLP(
                in_features,
                count,
                hidden_size=hidden_size,
                activation=activation,
                precision=precision,
                device=device,
            )
        else:
            self.net = EnsembleMLP(
                count,
                in_features,
                1,
                hidden_sizes=(hidden_size, hidden_size),
                activation=activation,
                precision=precision,
                device=device,
            )
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """``[*, O]`` -> ``[*, C]``."""
        values = self.net(x)
        return values if self.shared else values.squeeze(-1).movedim(0, -1)


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of components.

    Raises:
        ValueError: without names, or for a name given twice.
    """
    if isinstance(names, str) or not names or len(set(names)) != len(names):
        raise ValueError(f"names: expected a name for each component, each once, received {names!r}.")
    return tuple(names)
