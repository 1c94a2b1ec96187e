"""Gradients that are means over ranks: one flat buffer, one all-reduce a step, loss and statistics in it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torchrl_perf.functional.adam import widest_dtype
from torchrl_perf.parallel.join import joined
from torchrl_perf.parallel.ranks import Ranks, numbers_of

__all__ = ["SharedGradients"]


class SharedGradients:
    """The gradients of parameters that several processes learn together; for a loop of your own, captured or not.

    Each rank computes gradients of its own rows; :meth:`mean_` makes them those of all rows. Parameters begin as those
    of the first rank, and stay equal on all ranks to the last bit with any optimiser whose step depends on gradients
    alone::

        ranks = join()                                      # under torchrun; alone otherwise
        shared = SharedGradients(loss_module.parameters())
        optimizer = GuardedAdam(loss_module.parameters(), lr=3e-4, max_grad_norm=0.5)
        for batch in collector:                             # envs with a seed of this rank
            loss = loss_module(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            (loss,) = shared.mean_(loss.detach())           # the loss of all ranks as well
            optimizer.step()

    Flags need no collective of their own: a loss or gradient that is NaN on one rank is NaN in the mean, so that all
    ranks skip the step. A parameter without a gradient on a rank has one of 0 there.

    Args:
        params: in the same order on all ranks, on one device.
        ranks: the processes; by default those that :func:`join` has found.
        broadcast: whether parameters become those of the first rank, at once.

    Raises:
        ValueError: for no parameter, or parameters on several devices.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, ranks: Ranks | None = None, broadcast: bool = True) -> None:
        self.params = list(params)
        devices = {param.device for param in self.params}
        if len(devices) != 1:
            raise ValueError(
                f"params: expected parameters on one device, received {len(self.params)} on {sorted(map(str, devices))}"
                ". Remedy: a module that was moved as a whole."
            )
        self.ranks = joined(devices.pop()) if ranks is None else ranks
        wide = max((widest_dtype(param.dtype) for param in self.params), key=lambda dtype: dtype.itemsize)
        self._dtype, self._flat = wide, torch.empty(0)
        self._views: list[Tensor] = []
        if broadcast:
            self.ranks.broadcast_(self.params)

    @torch.no_grad()
    def mean_(self, *values: Tensor, weight: Tensor | None = None) -> list[Tensor]:
        """Makes the gradients at the parameters means over ranks.

        Args:
            *values: what else is to be averaged, such as loss and statistics; the same shapes at each call.
            weight: 0-d, how much this rank's mean counts, such as its number of rows; all count the same by default.

        Returns:
            The means of the values, new tensors; the values themselves of a process alone.
        """
        if not self.ranks.several:
            return list(values)
        grads, means = self.mean_of([param.grad for param in self.params], *values, weight=weight)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        return means

    @torch.no_grad()
    def mean_of(
        self, grads: Sequence[Tensor | None], *values: Tensor, weight: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same for gradients that are given.

        Args:
            grads: one for each parameter, or None.
            *values: as for :meth:`mean_`.
            weight: as there.

        Returns:
            The gradients, which the next call overwrites, and the values.
        """
        if not self.ranks.several:
            return [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, grads, strict=True)], [*values]
        self._make_buffer(values)
        numbers = [*grads, *values]
        missing = [view for view, one in zip(self._views, numbers, strict=True) if one is None]
        given = [(view, one) for view, one in zip(self._views, numbers, strict=True) if one is not None]
        if missing:
            torch._foreach_zero_(missing)
        torch._foreach_copy_([view for view, _ in given], [one for _, one in given])
        self._reduce(weight)
        views = self._views[: len(grads)]
        means = [
            view if view.dtype == param.dtype else view.to(param.dtype)
            for view, param in zip(views, self.params, strict=True)
        ]
        return means, [
            view.to(value.dtype, copy=True) for view, value in zip(self._views[len(grads) :], values, strict=True)
        ]

    def _reduce(self, weight: Tensor | None) -> None:
        """The mean over ranks, in the buffer; its last number is the sum of the weights."""
        flat = self._flat
        if weight is None:
            self.ranks.sum_(flat)
            flat.mul_(1.0 / self.ranks.size)
            return
        # a rank without a row may have a mean of 0 / 0, which must not reach the others
        flat.copy_(torch.where(weight > 0, flat * weight, 0.0))
        flat[-1].copy_(weight)
        self.ranks.sum_(flat)
        flat.div_(flat[-1].clamp_min(torch.finfo(flat.dtype).tiny))

    def _make_buffer(self, values: Sequence[Tensor]) -> None:
        """The flat buffer, at the first call: all ranks make it together."""
        parts = [*self.params, *values]
        size = numbers_of(parts) + 1
        if self._flat.numel() == size:
            return
        self._flat = self.ranks.buffer(size, self._dtype)
        pieces = self._flat[:-1].split([part.numel() for part in parts])
        self._views = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
