"""From observations to beliefs about a latent state, and back.

Dimension key: ``O`` channels, ``S`` numbers of the latent state, ``D`` of the action, ``H`` of the hidden state.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from torchrl_perf.envs.latent_field import ObservationMap
from torchrl_perf.functional.losses.elbo import MAX_LOG_RATE, gaussian_log_likelihood, poisson_log_likelihood

__all__ = ["Belief", "DecoderKind", "EncoderKind", "LatentDecoder", "Likelihood", "ObservationEncoder"]

EncoderKind = Literal["mlp", "gru"]
DecoderKind = Literal["linear", "log_linear", "mlp"]
Likelihood = Literal["gaussian", "poisson"]
MIN_VARIANCE = 1e-4
FIRST_LOG_VARIANCE = -3.0


class Belief(NamedTuple):
    """A diagonal Gaussian over the latent state, and the hidden state for the next step.

    Attributes:
        loc: ``[*, S]``.
        var: ``[*, S]``, positive.
        hidden: ``[*, H]``; None without a recurrence.
    """

    loc: Tensor
    var: Tensor
    hidden: Tensor | None


class ObservationEncoder(nn.Module):
    """One step of a filter: from observation, last action and hidden state to belief and hidden state.

    ``"mlp"`` sees only the observation. ``"gru"`` is a recurrent cell: a step costs the same however long the episode
    is, and the belief equals that of encoding the whole episode.

    Args:
        observation_size: O.
        latent_size: S.
        action_size: D, for "gru", which sees the last action; "mlp" does not.
        kind: ``"mlp"`` or ``"gru"``.
        hidden_size: H, also the width of the perceptron.
        counts: whether observations are counts, which are seen as ``log(1 + y)``.
        device: of the parameters.

    Attributes:
        state_shapes: entries that the cell carries from step to step, and their sizes: "hidden" and "previous_action",
            or none.

    Raises:
        ValueError: for an unknown kind.
    """

    def __init__(
        self,
        observation_size: int,
        latent_size: int = 2,
        action_size: int = 2,
        *,
        kind: EncoderKind = "gru",
        hidden_size: int = 32,
        counts: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(EncoderKind):
            raise ValueError(f"kind: expected one of {get_args(EncoderKind)}, received {kind!r}. Remedy: one of these.")
        self.kind, self.counts, self.hidden_size = kind, counts, hidden_size
        recurrent = kind == "gru"
        self.state_shapes: dict[str, tuple[int, ...]] = (
            {"hidden": (hidden_size,), "previous_action": (action_size,)} if recurrent else {}
        )
        if recurrent:
            self.cell = nn.GRUCell(observation_size + action_size, hidden_size, device=device)
        else:
            self.layer = nn.Linear(observation_size, hidden_size, device=device)
        self.loc = nn.Linear(hidden_size, latent_size, device=device)
        self.log_var = nn.Linear(hidden_size, latent_size, device=device)
        nn.init.constant_(self.log_var.bias, FIRST_LOG_VARIANCE)

    def forward(
        self, observation: Tensor, previous_action: Tensor | None = None, hidden: Tensor | None = None
    ) -> Belief:
        """The belief after an observation.

        Args:
            observation: ``[*, O]``.
            previous_action: ``[*, D]``, 0 at the first step of an episode; ignored without a recurrence.
            hidden: ``[*, H]``, likewise.

        Raises:
            ValueError: with a recurrence, for a state that is missing.
        """
        seen = torch.log1p(observation) if self.counts else observation
        if self.kind == "mlp":
            code, following = torch.tanh(self.layer(seen)), None
        else:
            if previous_action is None or hidden is None:
                raise ValueError(
                    "ObservationEncoder: expected previous_action [*, D] and hidden [*, H] with kind='gru', received "
                    "None. Remedy: zeros at the first step."
                )
            inputs = torch.cat((seen, previous_action), -1)
            flat = self.cell(inputs.reshape(-1, inputs.shape[-1]), hidden.reshape(-1, self.hidden_size))
            code = following = flat.view(*hidden.shape)
        variance = nn.functional.softplus(self.log_var(code)) + MIN_VARIANCE
        return Belief(self.loc(code), variance, following)


class LatentDecoder(nn.Module):
    """The likelihood of an observation given the latent state.

    ``"linear"``: ``C z + b``; ``"log_linear"``: ``exp(C z + b)``; ``"mlp"``: one hidden layer of tanh, whose result is
    the log of the rate with the Poisson likelihood. Gaussian channels have a learned variance each.

    Args:
        observation_size: O.
        latent_size: S.
        kind: of the map.
        likelihood: ``"gaussian"`` or ``"poisson"``.
        hidden_size: width of the perceptron of kind "mlp"; the other kinds have no hidden layer.
        device: of the parameters.

    Raises:
        ValueError: for an unknown name, or Poisson counts of a linear map, whose means may be negative.
    """

    def __init__(
        self,
        observation_size: int,
        latent_size: int = 2,
        *,
        kind: DecoderKind = "log_linear",
        likelihood: Likelihood = "poisson",
        hidden_size: int = 32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kind not in get_args(DecoderKind) or likelihood not in get_args(Likelihood):
            raise ValueError(
                f"decoder: expected one of {get_args(DecoderKind)} with one of {get_args(Likelihood)}, received "
                f"{kind!r} with {likelihood!r}. Remedy: one of each."
            )
        if kind == "linear" and likelihood == "poisson":
            raise ValueError(
                "decoder: expected means that are positive with likelihood='poisson', received kind='linear'. Remedy: "
                "kind='log_linear'."
            )
        self.likelihood = likelihood
        self.exponential = kind == "log_linear" or likelihood == "poisson"
        if kind == "mlp":
            first = nn.Linear(latent_size, hidden_size, device=device)
            self.net = nn.Sequential(first, nn.Tanh(), nn.Linear(hidden_size, observation_size, device=device))
        else:
            self.net = nn.Linear(latent_size, observation_size, device=device)
        if likelihood == "gaussian":
            self.log_var = nn.Parameter(torch.full((observation_size,), FIRST_LOG_VARIANCE, device=device))

    @torch.no_grad()
    def be(self, known: ObservationMap) -> None:
        """Take the weights of a known map; they are not learnt from then on.

        Args:
            known: ``"linear"`` or ``"identity"`` for kind "linear", ``"log_linear"`` for kind "log_linear".

        Raises:
            ValueError: for any other map.
        """
        net, kind = self.net, known.kind
        fits = isinstance(net, nn.Linear) and kind in (("log_linear",) if self.exponential else ("linear", "identity"))
        if not fits or net.weight.shape != (known.size, 2):
            raise ValueError(
                f"LatentDecoder: expected a map that the decoder can equal, received {kind!r} of {known.size} "
                "channels. Remedy: a decoder of the same kind and size."
            )
        net.bias.zero_()
        if kind == "identity":
            net.weight.copy_(torch.eye(2))
        else:
            net.weight.copy_(known.weight)
        if kind == "log_linear":
            net.bias.copy_(known.bias + math.log(known.dt))  # counts of a bin
        net.requires_grad_(False)

    def forward(self, latent: Tensor) -> Tensor:
        """Mean observations ``[*, O]`` at ``[*, S]``."""
        score = self.net(latent)
        return score.clamp(max=MAX_LOG_RATE).exp() if self.exponential else score

    def log_likelihood(self, observation: Tensor, latent: Tensor) -> Tensor:
        """Log likelihood ``[*]`` of observations ``[*, O]`` at ``[*, S]``; both broadcast."""
        if self.likelihood == "poisson":
            return poisson_log_likelihood(observation, self.net(latent))
        return gaussian_log_likelihood(observation, self.forward(latent), self.log_var.exp())
