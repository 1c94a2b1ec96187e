"""Networks of quantiles: fixed levels (QR-DQN), any level (IQN), and IQN's critic of a continuous action."""

import dataclasses
import math
from typing import Literal, Unpack

import torch
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn

from torchrl_perf.functional.atoms import duel
from torchrl_perf.functional.implicit import fusable, fused_implicit_mean
from torchrl_perf.functional.losses.distributional import midpoints
from torchrl_perf.functional.losses.risk import Risk
from torchrl_perf.functional.wide import wide_dtype
from torchrl_perf.modules.aligned import AlignedLinear
from torchrl_perf.modules.values.risk import make_risk
from torchrl_perf.modules.values.value_head import HeadOptions, HeadSettings, ValueHead, activation, complete, linear
from torchrl_perf.modules.wide_buffers import WideBuffers
from torchrl_perf.runtime.precision import autocast, widened

TauKind = Literal["random", "midpoints"]


class QuantileMLP(WideBuffers):
    """K quantiles for each action, at fixed levels (QR-DQN, arXiv:1710.10044); called, it gives their means.

    :class:`QuantileDQNLoss` trains it; :class:`EpsilonGreedy` acts on it.

    Args:
        in_features: size of the input's last dim, or of the trunk's output.
        num_actions: D.
        num_quantiles: K.
        risk: act on this distortion of the distribution; None for the mean.
        trunk: makes features ``[*, F]`` of the inputs; None takes the input itself.
        **options: see :class:`HeadOptions`.

    Attributes:
        taus: buffer ``[K]``, the levels ``(2 i + 1) / (2 K)``.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an option out of range.
    """

    wide_buffers = ("taus", "edges")
    taus: Tensor
    edges: Tensor

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        *,
        num_quantiles: int = 32,
        risk: Risk | None = None,
        trunk: nn.Module | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        self.trunk = nn.Identity() if trunk is None else trunk
        self.head = ValueHead(in_features, num_actions, num_quantiles, has_trunk=trunk is not None, **options)
        self.num_actions, self.num_quantiles = num_actions, num_quantiles
        device = next(self.head.parameters()).device
        self.risk = make_risk(risk, device)
        self.register_buffer("taus", midpoints(num_quantiles, device))
        edges = torch.arange(1, num_quantiles + 1, dtype=torch.float32, device=device) / num_quantiles
        self.register_buffer("edges", edges)

    def quantiles(self, *inputs: Tensor) -> Tensor:
        """``[*, D, K]``."""
        return self.head(self.trunk(*inputs))

    def sample(self, *inputs: Tensor, num_taus: int | None = None) -> tuple[Tensor, Tensor]:
        """Quantiles ``[*, D, K]`` and their levels ``[K]``; ``num_taus``, for IQN, is ignored here."""
        return self.quantiles(*inputs), self.taus

    def means(self, *inputs: Tensor) -> Tensor:
        """``[*, D]`` means of the quantiles."""
        return self.quantiles(*inputs).mean(-1)

    def action_values(self, *inputs: Tensor) -> Tensor:
        """``[*, D]`` values to act on: means, or risk-sensitive ones."""
        if self.risk is None:
            return self.means(*inputs)
        quantiles = self.quantiles(*inputs)
        mass = self.risk.mass(self.edges)
        return (quantiles.sort(-1).values * mass).sum(-1)

    def forward(self, *inputs: Tensor) -> Tensor:
        """:meth:`action_values`."""
        return self.action_values(*inputs)


class CosineEmbedding(WideBuffers):
    """``ReLU(sum_i cos(pi i tau) w_ij + b_j)``, ``i = 0 ... n - 1``: features of a level (IQN, eq. 4).

    Args:
        out_features: F.
        num_cosines: n.
        device: of the parameters.

    Raises:
        ValueError: for sizes below 1.
    """

    wide_buffers = ("frequencies",)
    frequencies: Tensor

    def __init__(self, out_features: int, *, num_cosines: int = 64, device: torch.device | str | None = None) -> None:
        super().__init__()
        if min(out_features, num_cosines) < 1:
            raise ValueError(
                f"sizes: expected at least 1, received {out_features} and {num_cosines}. Remedy: sizes of 1 or more."
            )
        self.layer = nn.Linear(num_cosines, out_features, device=device)
        self.register_buffer("frequencies", math.pi * torch.arange(num_cosines, dtype=torch.float32, device=device))

    def forward(self, taus: Tensor) -> Tensor:
        """``[*, K]`` -> ``[*, K, F]``."""
        cosines = torch.cos(taus.unsqueeze(-1) * self.frequencies)
        return self.layer(cosines.to(self.layer.weight.dtype)).relu()


class _ImplicitQuantiles(nn.Module):
    """``f(psi * phi(tau))``: the layers after the features, with levels that are drawn on the device."""

    def __init__(
        self, features: int, out_features: int, num_cosines: int, taus: TauKind, options: HeadSettings
    ) -> None:
        super().__init__()
        if taus not in ("random", "midpoints"):
            raise ValueError(f"taus: expected 'random' or 'midpoints', received {taus!r}. Remedy: one of the two.")
        self.embedding = CosineEmbedding(features, num_cosines=num_cosines, device=options.device)
        self.hidden = linear(features, options.hidden_size, options)
        self.activation = activation(options)
        self.last = linear(options.hidden_size, out_features, options)
        self.name, self.precision, self.random = options.activation, options.precision, taus == "random"

    def draw(self, rows: torch.Size | tuple[int, ...], num_taus: int) -> Tensor:
        """``[*rows, K]`` fresh levels, uniform in [0, 1), or the ``[K]`` midpoints; float32 at least."""
        like = self.embedding.frequencies
        if self.random:
            return torch.rand(*rows, num_taus, device=like.device, dtype=wide_dtype(like.dtype))
        return midpoints(num_taus, like.device)

    def features(self, psi: Tensor, taus: Tensor) -> Tensor:
        """``[*, F]`` and ``[K]`` or ``[*, K]`` -> ``[*, K, H]``."""
        with autocast(self.precision, psi.device):
            return self.activation(self.hidden(psi.unsqueeze(-2) * self.embedding(taus)))

    def outputs(self, hidden: Tensor) -> Tensor:
        """``[*, H]`` -> ``[*, OUT]``, in the dtype of the last layer's parameters whatever the precision."""
        hidden = hidden.to(next(self.last.parameters()).dtype)
        if self.precision not in ("bf16", "fp16"):
            return self.last(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.last(hidden)

    def values(self, psi: Tensor, taus: Tensor) -> Tensor:
        """``[*, F]`` and ``[K]`` or ``[*, K]`` -> ``[*, K, OUT]``."""
        return self.outputs(self.features(psi, taus))

    def mean_values(self, psi: Tensor, taus: Tensor) -> Tensor:
        """The mean of :meth:`values` over the levels, ``[*, OUT]``.

        Levels ``[K]`` that all rows share run through the hidden layer in one kernel where possible. Elsewhere the mean
        is taken before the last layer, which is linear: one product for all levels together.
        """
        if taus.ndim == 1 and type(self.hidden) is AlignedLinear and type(self.last) is AlignedLinear:
            params: list[Tensor] = [self.hidden.weight, self.hidden.bias, self.last.weight, self.last.bias]
            wide = widened(psi)
            if fusable(wide, params):
                rows = wide.reshape(-1, wide.shape[-1])
                means = fused_implicit_mean(rows, self.embedding(taus), params, self.name, self.precision)
                return means.view(*psi.shape[:-1], means.shape[-1])
        hidden = self.features(psi, taus)
        return self.outputs(hidden.mean(-2, dtype=wide_dtype(hidden.dtype)))


class ImplicitQuantileMLP(nn.Module):
    """Quantiles of the action values at any level (IQN, arXiv:1806.06923); called, it gives means over fresh levels.

    ``Z_tau(s) = f(psi(s) * phi(tau))`` with a cosine embedding ``phi``. Levels are drawn on the device at each call and
    each replay of a graph. To act, all rows share ``num_action_taus`` of them, so that they are embedded once; under
    ``set_exploration_type(DETERMINISTIC)`` and ``torch.no_grad()``, or in eval mode, they are midpoints in their place.
    A loss draws separate ones for each row, see :meth:`sample`.

    Args:
        in_features: size of the input's last dim, or of the trunk's output.
        num_actions: D.
        num_cosines: n of the embedding.
        num_action_taus: K of the means to act on.
        taus: ``"random"``, or ``"midpoints"`` for the fixed levels of QR-DQN everywhere.
        risk: act on this distortion of the levels; None for the mean.
        trunk: makes features ``[*, F]`` of the inputs; None takes the input itself. A layer of ``hidden_size`` follows.
        **options: see :class:`HeadOptions`; noise is in the layers after the embedding.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an option out of range.
    """

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        *,
        num_cosines: int = 64,
        num_action_taus: int = 32,
        taus: TauKind = "random",
        risk: Risk | None = None,
        trunk: nn.Module | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        full = complete(options)
        if min(in_features, num_actions, num_action_taus) < 1:
            raise ValueError(
                f"sizes: expected at least 1 each, received in_features {in_features}, num_actions {num_actions} and "
                f"num_action_taus {num_action_taus}. Remedy: sizes of 1 or more."
            )
        self.trunk = nn.Identity() if trunk is None else trunk
        self.psi = _Features([in_features], full)
        self.dueling = full.dueling
        outputs = num_actions + 1 if self.dueling else num_actions
        self.implicit = _ImplicitQuantiles(full.hidden_size, outputs, num_cosines, taus, full)
        self.num_actions, self.num_action_taus = num_actions, num_action_taus
        self.risk = make_risk(risk, next(self.implicit.parameters()).device)

    @property
    def draws_levels(self) -> bool:
        """Whether levels to act on are drawn; a policy that does not explore acts on the midpoints, always the same."""
        kind = interaction_type()
        return kind is InteractionType.RANDOM or (self.training and (kind is None or torch.is_grad_enabled()))

    def _per_action(self, outputs: Tensor) -> Tensor:
        return duel(outputs, self.num_actions).squeeze(-1) if self.dueling else outputs

    def quantiles(self, *inputs: Tensor, taus: Tensor) -> Tensor:
        """``[*, D, K]`` at the levels ``taus``, ``[K]`` or ``[*, K]``."""
        psi = self.psi(self.trunk(*inputs))
        return self._per_action(self.implicit.values(psi, taus)).mT

    def sample(self, *inputs: Tensor, num_taus: int = 8) -> tuple[Tensor, Tensor]:
        """Quantiles ``[*, D, K]`` at fresh levels, and the levels ``[*, K]`` (``[K]`` with ``"midpoints"``)."""
        psi = self.psi(self.trunk(*inputs))
        taus = self.implicit.draw(psi.shape[:-1], num_taus)
        return self._per_action(self.implicit.values(psi, taus)).mT, taus

    def means(self, *inputs: Tensor, taus: Tensor | None = None) -> Tensor:
        """``[*, D]`` means over ``taus``, ``[K]`` or ``[*, K]``; over fresh levels that all rows share by default."""
        psi = self.psi(self.trunk(*inputs))
        if taus is None:
            taus = self.implicit.draw((), self.num_action_taus)
        return self._per_action(self.implicit.mean_values(psi, taus))

    def action_values(self, *inputs: Tensor, taus: Tensor | None = None) -> Tensor:
        """``[*, D]`` values to act on: means over levels, distorted where a risk is set.

        Args:
            *inputs: of the trunk.
            taus: ``[K]`` or ``[*, K]`` levels instead of fresh ones, or of the midpoints where none are drawn.
        """
        if taus is None and not self.draws_levels:
            taus = midpoints(self.num_action_taus, self.implicit.embedding.frequencies.device)
        if self.risk is not None:
            taus = self.implicit.draw((), self.num_action_taus) if taus is None else taus
            taus = self.risk.levels(taus)
        return self.means(*inputs, taus=taus)

    def forward(self, *inputs: Tensor) -> Tensor:
        """:meth:`action_values`."""
        return self.action_values(*inputs)


class ImplicitQuantileCritic(nn.Module):
    """Quantiles of the value of a continuous action, at any level: the critic of AC-IQN.

    Features of the observation and of the action are multiplied, then by the embedding of the level, as in IQN.

    Args:
        in_features: size of the observation's last dim, or of the trunk's output.
        action_features: D of the action.
        num_cosines: n of the embedding.
        taus: ``"random"`` or ``"midpoints"``.
        trunk: makes features ``[*, F]`` of the observations; None takes the observation itself.
        **options: see :class:`HeadOptions`; a critic has no ``dueling``.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an option out of range.
    """

    def __init__(
        self,
        in_features: int,
        action_features: int,
        *,
        num_cosines: int = 64,
        taus: TauKind = "random",
        trunk: nn.Module | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        full = complete(options)
        if full.dueling:
            raise ValueError(
                "dueling: expected False for the critic of a continuous action, received True. Remedy: leave dueling "
                "out."
            )
        if min(in_features, action_features) < 1:
            raise ValueError(
                f"sizes: expected at least 1, received {in_features} and {action_features}. Remedy: sizes of 1 or more."
            )
        self.trunk = nn.Identity() if trunk is None else trunk
        self.psi = _Features([in_features, action_features], full)
        self.implicit = _ImplicitQuantiles(full.hidden_size, 1, num_cosines, taus, full)

    def quantiles(self, *inputs: Tensor, taus: Tensor) -> Tensor:
        """Observations and, last, action ``[*, D]`` -> ``[*, K]`` at the levels ``taus``, ``[K]`` or ``[*, K]``."""
        *observations, action = inputs
        psi = self.psi(self.trunk(*observations), action)
        return self.implicit.values(psi, taus).squeeze(-1)

    def sample(self, *inputs: Tensor, num_taus: int = 8) -> tuple[Tensor, Tensor]:
        """Quantiles ``[*, K]`` at fresh levels, and the levels ``[*, K]`` (``[K]`` with ``"midpoints"``)."""
        taus = self.implicit.draw(inputs[-1].shape[:-1], num_taus)
        return self.quantiles(*inputs, taus=taus), taus

    def forward(self, *inputs: Tensor, num_taus: int = 32) -> Tensor:
        """``[*, 1]`` mean over fresh levels, in the shape of TorchRL's critics."""
        *observations, action = inputs
        taus = self.implicit.draw(action.shape[:-1], num_taus)
        return self.implicit.mean_values(self.psi(self.trunk(*observations), action), taus)


class _Features(nn.Module):
    """The product of one layer with activation for each input: ``[*, F_i]`` -> ``[*, H]``."""

    def __init__(self, sizes: list[int], options: HeadSettings) -> None:
        super().__init__()
        plain = dataclasses.replace(options, noisy=None)
        self.layers = nn.ModuleList([linear(size, options.hidden_size, plain) for size in sizes])
        self.activation = activation(options)
        self.precision = options.precision

    def forward(self, *inputs: Tensor) -> Tensor:
        with autocast(self.precision, inputs[0].device):
            product: Tensor | None = None
            for layer, value in zip(self.layers, inputs, strict=True):
                features = self.activation(layer(value))
                product = features if product is None else product * features
        assert product is not None
        return product
