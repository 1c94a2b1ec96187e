"""Gradients that are means over ranks: one flat buffer, one all-reduce a step, loss and statistics in it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_perf.functional.adam import widest_dtype
from torchrl_perf.parallel.join import joined
from torchrl_perf.parallel.ranks import Ranks
from torchrl_perf.runtime.waits.audit import may_wait

__all__ = ["Reduced", "SharedGradients"]

ALIGNED_BYTES = 16
"""Of the beginning of each gradient in the flat buffer, as wide as the widest load of a GPU."""


class Reduced(NamedTuple):
    """Gradients of all ranks, which the next call may overwrite, and values."""

    flat: Tensor
    """All gradients one after the other, with zeros between them where the next one has to be aligned."""
    gradients: list[Tensor]
    """Views of it, one for each parameter, in the dtype of the parameter."""
    values: list[Tensor]
    """What else was averaged, in the order and the dtypes in which it was given; no call overwrites them."""
    absent: frozenset[int]
    """Numbers of the parameters that had a gradient on no rank; that of :attr:`gradients` is 0."""
    norms: Tensor | None
    """Of each gradient, ``[P]``, where the kernel that summed them has found them as well."""


class SharedGradients:
    """The gradients of parameters that several processes learn together; for a loop of your own, captured or not.

    Each rank computes gradients of its own rows; :meth:`mean_` makes them those of all rows. Parameters begin as those
    of the first rank, and stay equal on all ranks to the last bit with any optimiser whose step depends on gradients
    alone::

        ranks = join()                                      # under torchrun; alone otherwise
        shared = SharedGradients(loss_module)               # its target networks become the first rank's as well
        optimizer = GuardedAdam(loss_module.parameters(), lr=3e-4, max_grad_norm=0.5)
        for batch in collector:                             # envs with a seed of this rank
            loss = loss_module(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            (loss,) = shared.mean_(loss.detach())           # the loss of all ranks as well
            optimizer.step()

    Flags need no collective of their own: a loss or gradient that is NaN on one rank is NaN in the mean, so that all
    ranks skip the step. A parameter without a gradient on a rank has one of 0 there. One that has none on any rank, as
    one that is frozen or that no loss depends on, keeps none, so that an optimiser leaves it alone as in one process:
    with zeros it would decay, and go on by its momentum. The ranks say so in the same sum, a number for each parameter,
    which only a rank reads that lacks the gradient of one that is not frozen. A CUDA graph keeps what the last call
    before its capture has found.

    Args:
        params: in the same order on all ranks, on one device; or a module for all of its parameters. TorchRL's losses
            keep target networks in buffers, which only a module has.
        ranks: the processes; by default those that :func:`join` has found.
        broadcast: whether parameters, and buffers of a module, become those of the first rank, at once. What a loop
            changes later without gradients, as a normalisation its statistics, each rank changes by its own rows.
        compile: wraps a function that is worth compiling; by default none is.

    Attributes:
        ends: where each gradient ends in :attr:`Reduced.flat`, int64 ``[P]``.

    Raises:
        ValueError: for no parameter, parameters on several devices, and complex ones.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Module,
        *,
        ranks: Ranks | None = None,
        broadcast: bool = True,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.params = list(params.parameters() if isinstance(params, nn.Module) else params)
        devices = {param.device for param in self.params}
        if len(devices) != 1:
            raise ValueError(
                f"params: expected parameters on one device, received {len(self.params)} on {sorted(map(str, devices))}"
                ". Remedy: a module that was moved as a whole."
            )
        if others := sorted({str(param.dtype) for param in self.params if not param.is_floating_point()}):
            raise ValueError(
                f"params: expected real floating-point parameters, received {', '.join(others)}. Remedy: real and "
                "imaginary parts as parameters of their own."
            )
        self.ranks = joined(devices.pop()) if ranks is None else ranks
        wide = max((widest_dtype(param.dtype) for param in self.params), key=lambda dtype: dtype.itemsize)
        self._dtype, self._flat = wide, torch.empty(0)
        self._shapes: list[torch.Size] = []
        self._starts: list[int] = []
        self._views: list[Tensor] = []
        self._absent: dict[tuple[int, ...], frozenset[int]] = {}
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._exchange: Any = None
        self._zeros = torch.empty(0)
        self._weigh = _weigh if compile is None else compile(_weigh)
        ends = [start + param.numel() for start, param in zip(self._places(self.params), self.params, strict=False)]
        self.ends = torch.tensor(ends, device=self.params[0].device)
        if broadcast:
            self.ranks.broadcast_([params] if isinstance(params, nn.Module) else self.params)

    @torch.no_grad()
    def mean_(self, *values: Tensor, weight: Tensor | None = None) -> list[Tensor]:
        """Makes the gradients at the parameters means over ranks.

        Args:
            *values: what else is to be averaged, such as loss and statistics; the same shapes at each call.
            weight: 0-d, how much this rank's mean counts, such as its number of rows; all count the same by default.

        Returns:
            The means of the values, new tensors; the values themselves of a process alone.

        Raises:
            ValueError: for values that are no floating-point numbers, whose means would not be whole.
        """
        if not self.ranks.several:
            return list(values)
        found = self.reduced([param.grad for param in self.params], *values, weight=weight)
        self.put_back(found)
        return found.values

    def put_back(self, found: Reduced) -> None:
        """Puts gradients at the parameters; those that have none on any rank stay without."""
        for number, (param, grad) in enumerate(zip(self.params, found.gradients, strict=True)):
            if number not in found.absent:
                param.grad = grad

    @torch.no_grad()
    def reduced(
        self, grads: Sequence[Tensor | None], *values: Tensor, weight: Tensor | None = None, divided: bool = False
    ) -> Reduced:
        """The means over ranks of gradients that are given, and of values; several ranks only.

        Args:
            grads: one for each parameter, or None for 0.
            *values: as for :meth:`mean_`.
            weight: as there.
            divided: whether gradients and values were divided by the number of ranks already, so that their sums are
                the means; without a weight.
        """
        self._make_buffer(values)
        if self.ranks.own is not None and values:
            self.ranks.own.append(values[0])
        lacking = tuple([number for number, grad in enumerate(grads) if grad is None])
        if self._exchange is not None and weight is None:
            flat, norms = self._fused([*grads, *values], self._flags(lacking), divided)
        else:
            flat, norms = self._packed([*grads, *values], self._flags(lacking), weight, divided), None
        number = len(self.params)
        views = [*self._views] if flat is self._flat else self._views_of(flat)
        if flat is self._flat and values:
            # kept by those who ask, until all updates are made
            views[number:] = self._views_of(flat, kept=flat[self._starts[number] : self._starts[-1]].clone())
        wanted = [*self.params, *values]
        told = [
            view if view.dtype == like.dtype else view.to(like.dtype) for view, like in zip(views, wanted, strict=True)
        ]
        absent = self._absent_of(flat, lacking) if lacking else frozenset()
        return Reduced(flat[: self._starts[number]], told[:number], told[number:], absent, norms)

    def _fused(self, given: Sequence[Tensor | None], flags: Tensor, divided: bool) -> tuple[Tensor, Tensor]:
        """Sums or means of all in one launch, and the norms of gradients."""
        # which way is taken must not depend on what this rank alone has
        lists = [self._zeros[: shape.numel()] if one is None else one.to(torch.float32).contiguous()
                 for one, shape in zip(given, self._shapes, strict=True)]  # fmt: skip
        flat, norms = self.ranks.summed_parts([*lists, flags], self._exchange, len(self.params))
        if not divided:
            torch._foreach_mul_([flat, norms], 1.0 / self.ranks.size)
        return flat, norms

    def _packed(self, given: Sequence[Tensor | None], flags: Tensor, weight: Tensor | None, divided: bool) -> Tensor:
        """The same by a buffer that is filled first."""
        if missing := [view for view, one in zip(self._views, given, strict=True) if one is None]:
            torch._foreach_zero_(missing)
        pairs = [(view, one) for view, one in zip(self._views, given, strict=True) if one is not None]
        pairs.append((self._flags_of(self._flat), flags))
        torch._foreach_copy_([view for view, _ in pairs], [one for _, one in pairs])
        return self._mean_of_ranks(weight, divided)

    def _flags(self, lacking: tuple[int, ...]) -> Tensor:
        """``[P]``, 1 for each parameter that has a gradient on this rank."""
        if lacking not in self._known:
            _refuse_in_a_capture(lacking)
            flags = [float(number not in lacking) for number in range(len(self.params))]
            with may_wait(self.params[0].device):
                self._known[lacking] = torch.tensor(flags, dtype=self._dtype, device=self.params[0].device)
        return self._known[lacking]

    def _flags_of(self, flat: Tensor) -> Tensor:
        """The place of :meth:`_flags` in a buffer: behind all values."""
        return flat[self._starts[-1] : self._starts[-1] + len(self.params)]

    def _absent_of(self, flat: Tensor, lacking: tuple[int, ...]) -> frozenset[int]:
        """Which of the parameters without a gradient on this rank have none on any.

        One that is frozen gets none in any case. Only for the others is the device read.
        """
        asked = tuple([number for number in lacking if self.params[number].requires_grad])
        frozen = frozenset(lacking).difference(asked)
        if not asked:
            return frozen
        if not _is_recording():
            with may_wait(flat.device):
                flags = self._flags_of(flat).tolist()
            self._absent[asked] = frozenset([number for number in asked if flags[number] == 0.0])
        elif asked not in self._absent:
            _refuse_in_a_capture(asked)
        return frozen | self._absent[asked]

    def _mean_of_ranks(self, weight: Tensor | None, divided: bool) -> Tensor:
        """The buffer's mean over ranks, in place or as a new tensor; its last number is the sum of the weights."""
        if weight is None:
            found = self.ranks.summed(self._flat)
            return found if divided else found.mul_(1.0 / self.ranks.size)
        self._weigh(self._flat, weight, len(self.params))
        found = self.ranks.summed(self._flat)
        return found.div_(found[-1].clamp_min(torch.finfo(found.dtype).tiny))

    def _make_buffer(self, values: Sequence[Tensor]) -> None:
        """The flat buffer, at the first call: all ranks make it together."""
        parts = [*self.params, *values]
        shapes = [part.shape for part in parts]
        if others := sorted({str(value.dtype) for value in values if not value.is_floating_point()}):
            raise ValueError(
                f"values: expected floating-point numbers to average, received {', '.join(others)}. Remedy: .float()."
            )
        if shapes == self._shapes:
            return
        self._shapes, self._starts = shapes, self._places(parts)
        self._flat = self.ranks.buffer(self._starts[-1] + len(self.params) + 1, self._dtype)
        self._views = self._views_of(self._flat)
        if self._dtype == torch.float32:
            like = [torch.empty(shape.numel(), device=self.params[0].device) for shape in (*shapes, self.ends.shape)]
            self._exchange = self.ranks.exchange(like)
            if self._exchange is not None:
                self._zeros = torch.zeros(max(one.numel() for one in like), device=self.params[0].device)

    def _places(self, parts: Sequence[Tensor]) -> list[int]:
        """Where each part begins in the buffer, and where the last one ends."""
        step = ALIGNED_BYTES // self._dtype.itemsize
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + -(-part.numel() // step) * step)
        return starts

    def _views_of(self, flat: Tensor, kept: Tensor | None = None) -> list[Tensor]:
        """The parts of a buffer; of its values alone, where ``kept`` is that part of it."""
        first = 0 if kept is None else len(self.params)
        source, before = (flat, 0) if kept is None else (kept, self._starts[first])
        places = zip(self._starts[first:], self._shapes[first:], strict=False)
        return [source[start - before : start - before + shape.numel()].view(shape) for start, shape in places]


def _is_recording() -> bool:
    """Whether a CUDA graph is recorded, in which nothing can be read; the calls before it are not."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _refuse_in_a_capture(lacking: tuple[int, ...]) -> None:
    """What was not seen before cannot be read while a graph is recorded."""
    if _is_recording():
        raise RuntimeError(
            f"mean_: expected a call before the capture in which as many parameters lack a gradient, numbers "
            f"{list(lacking)}, received none. Remedy: an iteration or two before it is recorded."
        )


def _weigh(flat: Tensor, weight: Tensor, flags: int) -> None:
    """Multiplies a buffer but for its flags by a weight, 0-d, which becomes its last number; all in place."""
    rows = flat[: -1 - flags]
    # a rank without a row may have a mean of 0 / 0, which must not reach the others
    rows.copy_(torch.where(weight > 0, rows * weight, 0.0))
    flat[-1].copy_(weight)
