"""What the two steps of an actor-critic minimise, and what they found."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.trainers.off_policy.slice_memory import SliceMemory

__all__ = ["Outcome", "Pass", "Passes", "share_of"]


class Pass(NamedTuple):
    """Losses of rows ``[b]`` and their gradients; all 0-d without a gradient, but for the last two."""

    losses: dict[str, Tensor]
    """By name: what is minimised is their sum."""
    means: dict[str, Tensor]
    """Other statistics, by name: means over the rows."""
    gradients: list[Tensor]
    """One for each parameter of the optimiser, of the losses times the weight."""
    priority: Tensor | None = None
    """``[b]``, of the critics' pass."""

    @property
    def loss(self) -> Tensor:
        """The losses in all, 0-d."""
        first, *others = self.losses.values()
        return sum(others, first)


class Outcome(NamedTuple):
    """What an update did; the statistics are named by :class:`Pass`, 0 for those of an actor that waits."""

    priority: Tensor
    """``[B]``."""
    statistics: dict[str, Tensor]
    """0-d, with the norms ``grad_norm_critic`` and ``grad_norm_actor``."""
    critic_taken: Tensor
    """bool 0-d, whether the critics' step was."""
    actor_taken: Tensor
    """The same of the actor's; True where it waits."""


class Passes(ABC):
    """The equations of an actor-critic: what each of its two steps minimises.

    A pass gives gradients instead of a loss to differentiate, so that eagerly and within a compiled update the same
    lines are run (:class:`~torchrl_perf.functional.pullback.Differentiable`).
    """

    slices: SliceMemory | None = None
    """Of an algorithm with a memory, whose samples are slices ``[S]``."""

    def compile_alone(self, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Has each differentiated function compiled by itself, see :meth:`Differentiable.compile_alone`."""
        for part in self.differentiated():
            part.compile_alone(compile)

    def differentiated(self) -> Iterator[Differentiable]:
        """The functions that are differentiated, those of passes within these among them."""
        for part in vars(self).values():
            if isinstance(part, Differentiable):
                yield part
            elif isinstance(part, Passes):
                yield from part.differentiated()

    def rows(self, sample: TensorDictBase) -> TensorDictBase:
        """What actor and targets read of a sample: its rows ``[B]``, or with a memory ``[S, T]`` with its features."""
        return sample if self.slices is None else self.slices.rows(sample)

    def learnt(self, sample: TensorDictBase) -> TensorDictBase:
        """What the critics learn from: the same, with a memory that learns with them."""
        return sample if self.slices is None else self.slices.learnt(sample)

    def noise(self, sample: TensorDictBase) -> Tensor | None:
        """``[k B, D]`` numbers that the passes draw with, so that they are the same however often they are repeated."""
        return None

    def actor_context(self, sample: TensorDictBase, noise: Tensor | None) -> Any:
        """What the actor's pass needs where the critics' was made apart from it; arguments as of :meth:`context`."""
        return self.context(sample, noise)

    def context(self, sample: TensorDictBase, noise: Tensor | None, *, to_actor: bool = True) -> Any:
        """What the passes of critics and actor have in common; by default the noise.

        Args:
            sample: the batch ``[b]``.
            noise: what :meth:`noise` gave for these rows, or None for fresh numbers.
            to_actor: whether the actor's pass follows, or only the critics'.
        """
        return noise

    def made_once(self, sample: TensorDictBase) -> None:
        """Both passes of a sample ``[B]``, or of slices with a memory, eagerly and without a step.

        It shows what memory they take, and what they depend on: :attr:`Differentiable.depended_on`.
        """
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            rows = sample if self.slices is None else self.slices.prepared(sample)
            context = self.context(rows, None)
            self.critic(rows, context)
            self.actor(rows, context)

    @abstractmethod
    def critic(self, sample: TensorDictBase, context: Any, weight: float | Tensor = 1.0) -> Pass:
        """The critics' loss ``loss_critic``, the means ``value`` and ``td_error``, and priorities ``[b]``."""

    @abstractmethod
    def actor(self, sample: TensorDictBase, context: Any, weight: float | Tensor = 1.0) -> Pass:
        """The losses of the actor and of what learns with it."""


def share_of(found: Pass, share: float, *, gradients: bool = True) -> Pass:
    """A rank's share of a pass: what the sum over ranks makes the mean of; gradients may be multiplied already."""
    if share == 1.0:
        return found
    return Pass(
        {name: value * share for name, value in found.losses.items()},
        {name: value * share for name, value in found.means.items()},
        list(torch._foreach_mul(found.gradients, share)) if gradients else found.gradients,
        found.priority,
    )
