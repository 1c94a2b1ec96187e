"""A policy over options: which one runs, when it ends, and which one comes next, for all rows at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.masked import gumbel_argmax, masked_log_softmax, of_rows
from torchrl_perf.functional.schedules import exponential
from torchrl_perf.functional.wide import widened
from torchrl_perf.modules.option_set import (
    ACTIVE_KEY,
    AGE_KEY,
    AVAILABLE_KEY,
    LOG_PROB_KEY,
    OPTION_KEY,
    START_KEY,
    OptionSet,
)


class OptionChoice(NamedTuple):
    """The decision of a controller at a step.

    Attributes:
        option: int64 ``[*]``, the option of the step.
        start: bool ``[*]``, whether it was chosen at this step.
        log_prob: ``[*]`` logarithm of the probability with which it was chosen; 0 where it goes on.
        available: bool ``[*, O]``, the options that it was chosen among, at least one in each row.
    """

    option: Tensor
    start: Tensor
    log_prob: Tensor
    available: Tensor


class OptionController(TensorDictModuleBase):
    """Keeps an option running, ends it, and chooses the next one, for all rows at once and without a host wait.

    At each step the running option ends with the probability of its termination rule, but not before its minimum
    duration; where it ends, or none runs, the next one is drawn from ``softmax(logits / temperature)`` over the options
    that the initiation rule allows. Where the rule allows none, the fallback runs, with log-probability 0. Options are
    drawn if TorchRL's exploration type is RANDOM; otherwise the most probable one is taken. Termination belongs to the
    option and is drawn in either case. Random numbers are drawn for all rows at each step, so that the step has static
    shapes.

    With ``interrupts`` an option also ends, from its minimum duration on, where the selector likes another one better
    that may begin there. Where logits rise with the values of the options, a policy of options that are interrupted for
    a better one is at least as good as the one that lets them end (Sutton, Precup and Singh, 1999, theorem 2). No
    option is interrupted where options are drawn at random, because exploration is to last longer than one step. What
    is learnt from that exploration is the policy with interruptions: :meth:`write_following` writes the option that
    would run with them.

    **State.** The running option is kept in the environment's TensorDict, like the hidden state of a recurrent network:
    "option" and "option_age" are read at the root and written under "next". Give the env the
    :class:`~torchrl_perf.transforms.OptionState` transform, which adds them to its specs and sets them to 0 at a reset.
    An age of 0 means that no option runs; "is_init", where there is one, means the same.

    An agent that does not exist has the fallback without choosing it: "option_start" is False, and the age after the
    step is 0. Its observations are ignored, NaN included.

    Keys read: ``in_keys``, "option" and "option_age" (int64 ``[*]``), "is_init" (where present), ``valid_key`` if
    given, what the rules read. Written: "active_option" int64 ``[*]``, "option_start" bool ``[*]``, "option_log_prob"
    ``[*]``, "option_available" bool ``[*, O]``, and ("next", "option") and ("next", "option_age") int64 ``[*]``.

    Args:
        selector: maps the inputs to logits ``[*, O]``.
        options: names and rules.
        example: a TensorDict of the env, such as ``env.reset()`` or ``env.fake_tensordict()``: selector and rules are
            called on it at construction to check that they fit.
        in_keys: what the selector reads.
        temperature: of the choice, at the start.
        temperature_end: from ``temperature_steps`` on; None is ``temperature``.
        temperature_steps: calls of :meth:`step` over which it falls, by the same factor in each.
        valid_key: bool ``[*]`` or ``[*, 1]``, True for the agents that exist; all do by default.
        interrupts: whether an option ends where another one is better. The selector then has to know the running option
            where it may not begin, see :meth:`candidates`.

    Attributes:
        temperature: 0-d buffer, the present one.
        ends_by_chance: whether an option ends with the probability of its rule, or where that is above one half, which
            needs no random number.

    Raises:
        ValueError: where the selector or a rule returns another shape or dtype, or probabilities outside [0, 1], and
            for temperatures that are not positive.
    """

    temperature: Tensor
    steps: Tensor
    temperature_start: Tensor
    temperature_end: Tensor
    temperature_steps: Tensor
    min_duration: Tensor
    fallback: Tensor

    def __init__(
        self,
        selector: nn.Module,
        options: OptionSet,
        *,
        example: TensorDictBase,
        in_keys: Sequence[NestedKey] = ("observation",),
        temperature: float = 1.0,
        temperature_end: float | None = None,
        temperature_steps: int = 0,
        valid_key: NestedKey | None = None,
        interrupts: bool = False,
    ) -> None:
        super().__init__()
        last = temperature if temperature_end is None else temperature_end
        if not (temperature > 0 and last > 0):
            raise ValueError(
                f"temperature: expected positive ones, received {temperature} and {temperature_end}. Remedy: "
                "temperatures above 0."
            )
        self.selector, self.options = selector, options
        self.initiation, self.termination = options.initiation, options.termination  # modules become submodules
        self.num_options = options.num_options
        self.network_keys = list(in_keys)
        self.valid_key = valid_key
        self.ends_by_chance = True
        self.interrupts = interrupts
        self.in_keys = [*in_keys, OPTION_KEY, AGE_KEY, *([] if valid_key is None else [valid_key])]  # pyright: ignore
        written = [ACTIVE_KEY, START_KEY, LOG_PROB_KEY, AVAILABLE_KEY, ("next", OPTION_KEY), ("next", AGE_KEY)]
        self.out_keys = written  # pyright: ignore
        device = next((p.device for p in selector.parameters()), example.device)
        for rule in (self.initiation, self.termination):
            if isinstance(rule, nn.Module):
                rule.to(device)
        self.register_buffer("temperature", torch.tensor(float(temperature), device=device))
        self.register_buffer("temperature_start", torch.tensor(float(temperature), device=device))
        self.register_buffer("temperature_end", torch.tensor(float(last), device=device))
        self.register_buffer("temperature_steps", torch.tensor(temperature_steps, device=device))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("min_duration", torch.tensor(options.min_durations, device=device))
        fallback = [index == options.fallback_index for index in range(self.num_options)]
        self.register_buffer("fallback", torch.tensor(fallback, device=device))
        self._probe(example)

    # -- parts --------------------------------------------------------------------------------------------------------

    def step(self, frames: int | Tensor = 1) -> None:
        """Advances the temperature's schedule, in place and without a host read: once for each update, or frame."""
        self.steps += frames
        at = exponential(self.steps, self.temperature_start, self.temperature_end, self.temperature_steps)
        self.temperature.copy_(at)

    def available(self, tensordict: TensorDictBase) -> Tensor:
        """Bool ``[*, O]``: the options to choose among; only the fallback where the rule allows none.

        Where options continue, see :class:`OptionSet`, the running one is among them unless its end is certain here.
        """
        if self.initiation is None:
            return torch.ones_like(self.fallback).expand(*tensordict.shape, -1)
        allowed = self.initiation(tensordict)
        if self.options.continues:
            allowed = allowed | self._running(tensordict, self.termination_prob(tensordict) < 1)
        return allowed | (self.fallback & ~allowed.any(-1, keepdim=True))

    def candidates(self, tensordict: TensorDictBase, available: Tensor) -> Tensor:
        """Bool ``[*, O]``: those of ``available``, and the running option, which may go on where it may not begin.

        With ``interrupts`` their logits are compared; without, it is ``available``.
        """
        return available | self._running(tensordict, True) if self.interrupts else available

    def _running(self, tensordict: TensorDictBase, where: Tensor | bool) -> Tensor:
        """Bool ``[*, O]``: the option that runs, in the rows ``[*]`` where one does."""
        option, runs = tensordict.get(OPTION_KEY), (tensordict.get(AGE_KEY) > 0) & where
        first = tensordict.get("is_init", None)
        if first is not None:
            runs = runs & ~first.view(runs.shape)
        every = torch.arange(self.num_options, device=option.device)
        return (every == option.unsqueeze(-1)) & runs.unsqueeze(-1)

    def interrupted(self, tensordict: TensorDictBase, available: Tensor, logits: Tensor) -> Tensor:
        """Bool ``[*]``: where another option than the running one has the greatest logit ``[*, O]``."""
        option = tensordict.get(OPTION_KEY)
        best = torch.where(self.candidates(tensordict, available), logits, -torch.inf).argmax(-1)
        return (best != option) & (tensordict.get(AGE_KEY) >= self.min_duration[option])

    def termination_prob(self, tensordict: TensorDictBase) -> Tensor:
        """``[*]``: the probability that the running option ends before this step; 0 before its minimum duration."""
        option, age = tensordict.get(OPTION_KEY), tensordict.get(AGE_KEY)
        if self.termination is None:
            return torch.zeros_like(age, dtype=self.temperature.dtype)
        prob = self.termination(tensordict).gather(-1, option.unsqueeze(-1)).squeeze(-1)
        return torch.where(age >= self.min_duration[option], prob, 0.0)

    def logits(self, tensordict: TensorDictBase) -> Tensor:
        """``[*, O]``: what the selector says of all options, divided by the temperature.

        They are float32 at least, whatever it returns, so that draws match the log-probabilities written.
        """
        found = self.selector(*[tensordict.get(key) for key in self.network_keys])
        return widened(found) / widened(self.temperature)

    def log_probs(self, tensordict: TensorDictBase, available: Tensor) -> Tensor:
        """``[*, O]``: logarithms of the probabilities of the choice, ``-inf`` for options that are not available."""
        return masked_log_softmax(self.logits(tensordict), available)

    def exists(self, tensordict: TensorDictBase) -> Tensor | None:
        """Bool ``[*]``, the agents that exist; None where all do."""
        if self.valid_key is None:
            return None
        return of_rows(tensordict.get(self.valid_key), tensordict.get(AGE_KEY).shape)

    def choose(self, tensordict: TensorDictBase, *, explore: bool, interrupts: bool | None = None) -> OptionChoice:
        """The option of this step, given the one that runs; writes nothing.

        Args:
            tensordict: ``[*]``, with the state of the options.
            explore: draw the next options, or take the most probable ones.
            interrupts: whether options that are interrupted end; by default where it does not explore.
        """
        option, age = tensordict.get(OPTION_KEY), tensordict.get(AGE_KEY)
        chance = 0.5
        if self.ends_by_chance:
            chance = torch.rand(age.shape, dtype=torch.float32, device=age.device)
        ended = self.termination_prob(tensordict) > chance
        start = ended | (age <= 0)
        first = tensordict.get("is_init", None)
        if first is not None:
            start = start | first.view(start.shape)
        available, logits = self.available(tensordict), self.logits(tensordict)
        if self.interrupts and (not explore if interrupts is None else interrupts):
            start = start | self.interrupted(tensordict, available, logits)
        log_probs = masked_log_softmax(logits, available)
        following = gumbel_argmax(log_probs) if explore else log_probs.argmax(-1)
        log_prob = log_probs.gather(-1, following.unsqueeze(-1)).squeeze(-1)
        chosen = torch.where(start, following, option)
        if (exists := self.exists(tensordict)) is not None:
            start = start & exists
            chosen = torch.where(exists, chosen, self.options.fallback_index)
        return OptionChoice(chosen, start, torch.where(start, log_prob, 0.0), available)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the option of the step and the state after it; explore or not as TorchRL's exploration type says."""
        choice = self.choose(tensordict, explore=interaction_type() is InteractionType.RANDOM)
        tensordict.set(ACTIVE_KEY, choice.option)
        tensordict.set(START_KEY, choice.start)
        tensordict.set(LOG_PROB_KEY, choice.log_prob)
        tensordict.set(AVAILABLE_KEY, choice.available)
        tensordict.set(("next", OPTION_KEY), choice.option)
        age = torch.where(choice.start, 0, tensordict.get(AGE_KEY)) + 1
        exists = self.exists(tensordict)
        tensordict.set(("next", AGE_KEY), age if exists is None else torch.where(exists, age, 0))
        return tensordict

    @torch.no_grad()
    def write_following(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes ("next", "active_option"), the option of the next step, drawn from the present controller.

        A critic conditioned on the option needs it for its targets. Its expectation is that of intra-option learning,
        ``U(s', o) = (1 - beta) V(s', o) + beta sum_o' pi(o' | s') V(s', o')``.

        Args:
            tensordict: transitions ``[*]``, whose "next" holds observations, "option" and "option_age".
        """
        return tensordict.set(("next", ACTIVE_KEY), self.following_option(tensordict))

    @torch.no_grad()
    def following_option(self, tensordict: TensorDictBase) -> Tensor:
        """The option that :meth:`write_following` writes, int64 ``[*]``, without writing it."""
        following = cast("TensorDictBase", tensordict.get("next"))
        return self.choose(following.exclude("is_init"), explore=True, interrupts=True).option

    # -- construction -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _probe(self, example: TensorDictBase) -> None:
        """Calls selector and rules on rows of the example and checks what they return."""
        rows = 3 if self.num_options == 2 else 2  # neither 1 nor O, so that no wrong shape passes by accident
        td = example.exclude("next")
        td = cast("TensorDictBase", (td.reshape(-1) if td.ndim else td.unsqueeze(0))[:1].expand(rows).clone())
        for key in (OPTION_KEY, AGE_KEY):
            td.set(key, torch.zeros(rows, dtype=torch.int64, device=self.fallback.device))
        shape = [rows, self.num_options]
        needed = self.network_keys if self.valid_key is None else [*self.network_keys, self.valid_key]
        if absent := [key for key in needed if td.get(key, None) is None]:
            raise ValueError(
                f"in_keys: expected keys among {_names(td)}, which the example holds, received {absent}. Remedy: set "
                "in_keys and valid_key, or the transforms of the env that the example comes from."
            )
        inputs = [td.get(key) for key in self.network_keys]
        _check_output("selector", lambda _: self.selector(*inputs), td, shape, "float")
        if self.initiation is not None:
            _check_output("initiation", self.initiation, td, shape, "bool")
        if self.termination is not None:
            prob = _check_output("termination", self.termination, td, shape, "float")
            if bool(((prob < 0) | (prob > 1)).any()):
                raise ValueError(
                    f"termination: expected probabilities in [0, 1], received {prob.amin()} to {prob.amax()}. Remedy: "
                    "torch.sigmoid of scores, or clamp(0, 1)."
                )


def _check_output(name: str, function: Any, td: TensorDictBase, shape: list[int], kind: str) -> Tensor:
    """The result of a rule, after checking its dtype and shape."""
    expected = f"a function of a TensorDict [B] that returns {kind} [B, O] with O = {shape[-1]} options"
    try:
        result = function(td.copy())
    except (RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{name}: expected {expected}, received {type(error).__name__}: {error} from an example with the keys "
            f"{_names(td)}. Remedy: read keys that the env gives, and index the last dims of their entries."
        ) from error
    is_kind = isinstance(result, Tensor) and (
        result.dtype == torch.bool if kind == "bool" else result.dtype.is_floating_point
    )
    if not is_kind or list(result.shape) != shape:
        received = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"{name}: expected {expected}, received {received} for B = {shape[0]}. Remedy: one column for each option, "
            f"torch.stack([...], -1), "
            + ("of comparisons (bool)." if kind == "bool" else "and of a floating-point dtype.")
        )
    return result


def _names(td: TensorDictBase) -> list[str]:
    return sorted(map(str, td.keys(True, True)))
