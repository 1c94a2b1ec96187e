"""Model-predictive control by the improved cross-entropy method, for all envs and candidates at once.

Dimension key: ``B`` envs, ``P`` candidates, ``H`` steps of a plan, ``D`` action, ``K`` kept elites, ``S`` state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec, Unbounded

from torchrl_perf.functional.coloured_noise import coloured_filter
from torchrl_perf.functional.losses.information import discounted_return
from torchrl_perf.functional.wide import outside_autocast, wide_dtype, widened
from torchrl_perf.modules.bounds import action_bounds
from torchrl_perf.modules.policy_state import PolicyState

__all__ = ["Decision", "ICEMPlanner", "ICEMSettings"]

PLAN_KEY = "plan"
ELITES_KEY = "plan_elites"
INIT_KEY = "is_init"

Model = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ICEMSettings:
    """How :class:`ICEMPlanner` searches.

    Attributes:
        horizon: H, steps of a plan.
        candidates: fresh plans of the first iteration.
        iterations: rounds of sampling and refitting.
        elites: best plans of a round, to which mean and standard deviation are fitted.
        momentum: share of the old mean and standard deviation in the new ones.
        init_std: standard deviation at the start of a decision, in units of half the range of the actions.
        noise_exponent: colour of the noise along a plan: power ``f^-exponent``; 0 is white.
        shrink: factor by which the number of fresh plans falls from round to round, at least 1. It never falls below
            ``2 * elites`` (or ``candidates``, if that is less).
        kept_share: share of the elites that is evaluated again in the next round.
        shift: also begin a decision with the kept elites of the one before, a step later; their last actions are new.
        mean_action: evaluate the mean itself in the last round, in the place of a fresh plan.
        execute: take the first action of the ``"best"`` plan of the last round, or of the last ``"mean"``.
        discount: of rewards, where the metric returns one for each step.

    Raises:
        ValueError: for numbers outside what is described.
    """

    horizon: int = 10
    candidates: int = 32
    iterations: int = 10
    elites: int = 10
    momentum: float = 0.1
    init_std: float = 0.5
    noise_exponent: float = 1.0
    shrink: float = 1.25
    kept_share: float = 0.3
    shift: bool = True
    mean_action: bool = True
    execute: Literal["best", "mean"] = "best"
    discount: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("horizon", "candidates", "iterations", "elites"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a positive int, received {value!r}.")
        if self.elites > self.candidates:
            raise ValueError(f"elites: expected at most the {self.candidates} candidates, received {self.elites}.")
        limits = {"momentum": (0.0, 1.0), "kept_share": (0.0, 1.0), "discount": (0.0, 1.0)}
        limits |= {"shrink": (1.0, math.inf), "init_std": (0.0, math.inf), "noise_exponent": (-math.inf, math.inf)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)):
                raise ValueError(f"{name}: expected a finite number from {low:g} to {high:g}, received {value!r}.")
        if self.execute not in ("best", "mean"):
            raise ValueError(f"execute: expected 'best' or 'mean', received {self.execute!r}.")

    @classmethod
    def plain(cls, **changes: Any) -> ICEMSettings:
        """The cross-entropy method without the improvements: white noise, constant populations, no kept elites."""
        settings = cls(
            noise_exponent=0.0, shrink=1.0, kept_share=0.0, shift=False, mean_action=False, execute="mean", momentum=0.1
        )
        return replace(settings, **changes)

    @property
    def kept(self) -> int:
        """K, number of elites that are kept; at least 1 where the share is positive."""
        return max(1, round(self.kept_share * self.elites)) if self.kept_share > 0.0 else 0

    @property
    def fresh(self) -> tuple[int, ...]:
        """Number of fresh plans of each round."""
        least = min(self.candidates, 2 * self.elites)
        return tuple(max(least, int(self.candidates * self.shrink**-i)) for i in range(self.iterations))

    @property
    def populations(self) -> tuple[int, ...]:
        """P of each round: fresh plans and kept elites."""
        first = self.kept if self.shift else 0
        return tuple(count + (self.kept if i else first) for i, count in enumerate(self.fresh))

    @property
    def model_calls(self) -> int:
        """Predicted steps of a decision, for each env."""
        return sum(self.populations) * self.horizon


class Decision(NamedTuple):
    """What a planner decides.

    Attributes:
        action: ``[B, D]``.
        plan: ``[B, H, D]``, mean of the last round.
        elites: ``[B, K, H, D]``, the best plans of the last round, best first.
        value: ``[B]``, return of the best plan.
    """

    action: Tensor
    plan: Tensor
    elites: Tensor
    value: Tensor


class ICEMPlanner(TensorDictModuleBase):
    """The improved cross-entropy method (iCEM, Pinneri et al., CoRL 2020, arXiv:2008.06389), without a host wait.

    In each round plans are drawn around a mean, rolled through a model, ranked by a metric, and mean and standard
    deviation are fitted to the best ones. The improvements over plain CEM, each of which :class:`ICEMSettings` can turn
    off: noise that is coloured along the plan, populations that shrink, elites that are kept from round to round and,
    a step later, from decision to decision, the mean among the candidates of the last round, the first action of the
    best plan. TorchRL has plain CEM, whose counterpart is ``ICEMSettings.plain()``.

    All candidates of all envs are one batch ``[B, P]`` for the model. The numbers of rounds, plans and steps are fixed,
    so that a decision has static shapes and may be compiled and captured. Its random numbers are one draw for all
    rounds. A plan whose return is NaN is the worst.

    **State.** Mean and kept elites are state of the environment's TensorDict: the root entries come in, those of "next"
    go out. Give the env the :class:`~torchrl_perf.transforms.PolicyState` of :meth:`make_state`, which adds them to its
    specs. Rows where "is_init" is True begin anew, with the middle of the action's range as their mean.

    Keys read: ``state_key`` ``[*, S]``, "plan" ``[*, H, D]``, with kept elites and ``shift`` "plan_elites"
    ``[*, K, H, D]``, and "is_init" bool ``[*]`` or ``[*, 1]`` where present. Written: ``action_key`` ``[*, D]``, and
    under "next" "plan" and "plan_elites".

    Args:
        model: maps states ``[B, P, S]`` and actions ``[B, P, D]`` to the next states ``[B, P, S]``; S may be several
            dims. It may draw random numbers. A module becomes a submodule.
        metric: maps states ``[B, P, H + 1, S]``, the present one first, and actions ``[B, P, H, D]`` to rewards
            ``[B, P, H]``, which are summed with the discount, or to returns ``[B, P]``; the more the better.
        spec: the action's spec ``[*, D]`` with finite bounds, such as ``env.action_spec``.
        settings: how to search.
        state_key: what the model calls a state.
        action_key: the action.

    Attributes:
        low: buffer ``[D]``.
        high: buffer ``[D]``.
        colour: buffer ``[H, H]``, the filter of the noise.

    Raises:
        ValueError: as :func:`~torchrl_perf.modules.bounds.action_bounds`; when it acts, for a model or a metric that
            returns another shape.
        KeyError: when it acts, without an entry.
    """

    low: Tensor
    high: Tensor
    colour: Tensor

    def __init__(
        self,
        model: Model,
        metric: Metric,
        *,
        spec: TensorSpec,
        settings: ICEMSettings | None = None,
        state_key: NestedKey = "latent",
        action_key: NestedKey = "action",
    ) -> None:
        super().__init__()
        self.model, self.metric, self.spec = model, metric, spec
        self.settings = ICEMSettings() if settings is None else settings
        self.state_key, self.action_key = state_key, action_key
        low, high = action_bounds(spec)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        steps, exponent = self.settings.horizon, self.settings.noise_exponent
        self.register_buffer("colour", coloured_filter(steps, exponent, device=low.device, dtype=low.dtype))
        self.state_keys = [PLAN_KEY, ELITES_KEY] if self.settings.kept and self.settings.shift else [PLAN_KEY]
        self.in_keys = [state_key, *self.state_keys]  # pyright: ignore
        self.out_keys = [action_key, *(("next", key) for key in self.state_keys)]  # pyright: ignore

    def make_state(self) -> PolicyState:
        """Return the transform that keeps the planner's state in an env, zeros after a reset."""
        size = (self.settings.horizon, self.low.shape[0])
        shapes = {PLAN_KEY: size, ELITES_KEY: (self.settings.kept, *size)}
        return PolicyState({key: Unbounded(shape=shapes[key], dtype=self.low.dtype) for key in self.state_keys})

    # -- the search ---------------------------------------------------------------------------------------------------

    def draw(self, rows: int) -> Tensor:
        """Return the coloured standard normal numbers of a decision, ``[B, sum of the populations, H, D]``."""
        steps, size = self.settings.horizon, self.low.shape[0]
        shape = (rows, sum(self._drawn()), size, steps)
        white = torch.randn(shape, device=self.low.device, dtype=wide_dtype(self.low.dtype))
        return _coloured(white, self.colour).transpose(-1, -2)

    def decide(
        self, state: Tensor, plan: Tensor, elites: Tensor | None, first: Tensor | None, noise: Tensor
    ) -> Decision:
        """Search with given random numbers; pure.

        Args:
            state: ``[B, S]``.
            plan: ``[B, H, D]``, that of the decision before.
            elites: ``[B, K, H, D]``, likewise; not looked at without kept elites and ``shift``.
            first: bool ``[B]``, rows without a decision before; None for none.
            noise: as :meth:`draw` makes it.
        """
        settings = self.settings
        # plans are rounded to the actions' dtype where they are acted on; what they are fitted to is not
        dtype, low, high = self.low.dtype, widened(self.low), widened(self.high)
        half, middle = (high - low) / 2, (high + low) / 2
        mean = widened(torch.cat((plan[:, 1:], plan[:, -1:]), 1))
        if first is not None:
            mean = torch.where(first.view(-1, 1, 1), middle, mean)
        mean = mean.clamp(low, high)
        std = (settings.init_std * half).expand_as(mean)
        best = torch.empty_like(noise[:, :0], dtype=dtype)
        value = noise[:, 0, 0, 0]
        for i, draws in enumerate(noise.split(self._drawn(), 1)):
            candidates = (mean.unsqueeze(1) + std.unsqueeze(1) * draws).clamp(low, high).to(dtype)
            if i == 0 and settings.kept and settings.shift:
                candidates = self._carry(candidates, cast("Tensor", elites), first)
            if i == settings.iterations - 1 and settings.mean_action:
                candidates = torch.cat((mean.unsqueeze(1).to(dtype), candidates[:, 1:]), 1)
            if i > 0 and settings.kept:
                candidates = torch.cat((candidates, best[:, : settings.kept]), 1)
            returns, index = self.evaluate(state, candidates).topk(settings.elites, 1)
            best = candidates.gather(1, index[..., None, None].expand(-1, -1, *mean.shape[1:]))
            kept = widened(best)
            mean = torch.lerp(kept.mean(1), mean, settings.momentum)
            std = torch.lerp(kept.std(1, correction=0), std, settings.momentum)
            value = returns[:, 0]
        mean = mean.to(dtype)
        chosen = best[:, 0, 0] if settings.execute == "best" else mean[:, 0]
        return Decision(chosen, mean, best[:, : settings.kept], value)

    def evaluate(self, state: Tensor, actions: Tensor) -> Tensor:
        """Return of each candidate, ``[B, P]``, minus infinity where it is NaN.

        Args:
            state: ``[B, S]``.
            actions: ``[B, P, H, D]``.

        Raises:
            ValueError: where model or metric return another shape than described.
        """
        rows, candidates, steps, _ = actions.shape
        now = state.unsqueeze(1).expand(-1, candidates, *state.shape[1:])
        states = [now]
        for action in actions.unbind(2):
            following = self.model(now, action)
            _check("model", "next states", following, [list(now.shape)])
            states.append(now := following)
        score = self.metric(torch.stack(states, 2), actions)
        _check("metric", "rewards or returns", score, [[rows, candidates, steps], [rows, candidates]])
        returns = discounted_return(score, self.settings.discount) if score.ndim == 3 else score
        return returns.masked_fill(returns.isnan(), -torch.inf)

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and the state after it."""
        batch = tensordict.batch_size
        state, plan = (self._read(tensordict, key) for key in (self.state_key, PLAN_KEY))
        elites = self._read(tensordict, ELITES_KEY).flatten(0, -4) if ELITES_KEY in self.state_keys else None
        first = tensordict.get(INIT_KEY, None)
        first = None if first is None else cast("Tensor", first).reshape(-1)
        state = state.reshape(-1, *state.shape[len(batch) :])
        decision = self.decide(state, plan.reshape(-1, *plan.shape[-2:]), elites, first, self.draw(state.shape[0]))
        tensordict.set(self.action_key, decision.action.reshape(*batch, -1))
        for key, value in ((PLAN_KEY, decision.plan), (ELITES_KEY, decision.elites)):
            if key in self.state_keys:
                tensordict.set(("next", key), value.reshape(*batch, *value.shape[1:]))
        return tensordict

    # -- parts --------------------------------------------------------------------------------------------------------

    def _drawn(self) -> list[int]:
        """Plans drawn in each round; those of the first one that give kept elites their last action included."""
        fresh = list(self.settings.fresh)
        if self.settings.shift:
            fresh[0] += self.settings.kept
        return fresh

    def _carry(self, candidates: Tensor, elites: Tensor, first: Tensor | None) -> Tensor:
        """The last K candidates replaced by the elites of the decision before, a step later."""
        new, spare = candidates.split((self.settings.fresh[0], self.settings.kept), 1)
        shifted = torch.cat((elites[:, :, 1:].clamp(self.low, self.high), spare[:, :, -1:]), 2)
        if first is not None:
            shifted = torch.where(first.view(-1, 1, 1, 1), spare, shifted)
        return torch.cat((new, shifted), 1)

    def _read(self, tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        value = tensordict.get(key, None)
        if value is None:
            keys = sorted(map(str, tensordict.keys(True, True)))
            remedy = "TransformedEnv(env, planner.make_state())" if key in self.state_keys else "set state_key"
            raise KeyError(f"ICEMPlanner: expected {key!r}, received {keys}. Remedy: {remedy}.")
        return cast("Tensor", value)


@outside_autocast
def _coloured(white: Tensor, colour: Tensor) -> Tensor:
    return white @ widened(colour)


def _check(name: str, what: str, received: Any, allowed: list[list[int]]) -> None:
    """Raise ValueError unless a callable's result is a tensor of one of the allowed shapes."""
    if isinstance(received, Tensor) and list(received.shape) in allowed:
        return
    kind = f"{list(received.shape)}" if isinstance(received, Tensor) else type(received).__name__
    raise ValueError(
        f"{name}: expected {what} {' or '.join(map(str, allowed))}, received {kind}. Remedy: a function that acts on "
        "the last dims of tensors of any batch size."
    )
