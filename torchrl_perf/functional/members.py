"""Several perceptrons of one shape on few rows: all members and all layers in one kernel on CUDA."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_perf.functional.chain import ACTIVATIONS

__all__ = ["Gradients", "Members", "members"]

Group = tuple[Tensor, ...]
_CONVERTED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def members(x: Tensor, params: Sequence[Sequence[Tensor]], activation: str = "relu", eps: float = 0.0) -> Tensor:
    """E perceptrons, each with an activation between its linear maps: the reference that the kernels follow.

    Args:
        x: ``[E, B, IN]``, any float dtype.
        params: weights ``[E, IN, OUT]`` and biases ``[E, 1, OUT]`` of the layers; with layer norm gains and shifts
            ``[E, 1, OUT]`` of all layers but the last.
        activation: one of :data:`~torchrl_perf.functional.chain.ACTIVATIONS`.
        eps: of layer norm before each activation (arXiv:1607.06450); 0 for none.

    Returns:
        ``[E, B, OUT]``.
    """
    weights, biases, *norms = params
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.baddbmm(bias, x, weight)
        if number == len(weights) - 1:
            break
        if eps:
            x = F.layer_norm(x, x.shape[-1:], eps=eps) * norms[0][number] + norms[1][number]
        x = ACTIVATIONS[activation](x)
    return x


class Gradients(NamedTuple):
    """Of all parameters of :class:`Members`."""

    values: list[Tensor]
    """In the order of :attr:`Members.params`, with their shapes."""
    squares: Tensor
    """Sums of squares of parts of them, ``[S]``: the norm of all gradients is the root of its sum."""
    places: tuple[int, ...]
    """The first of the squares of each parameter, and S behind them."""


class Members:
    """E perceptrons of one shape as kernels take them, with passes forward and backward that autograd is not asked for.

    Forward is one launch, of a second set of networks beside the first too; the gradient down the layers is one, and
    that of all parameters one, or two from many rows.

    Args:
        weights: of the layers, ``[E, IN, OUT]``, or ``[E, OUT, IN]`` or ``[OUT, IN]`` where ``inner``; float32 and
            contiguous like all that follow.
        biases: of the layers, ``[E, 1, OUT]`` or ``[OUT]``.
        gains: of layer norm, of all layers but the last; empty without it.
        shifts: likewise.
        activation: one of :data:`~torchrl_perf.functional.chain.ACTIVATIONS`.
        eps: of layer norm; 0 for none.
        precision: ``"tf32"``, ``"bf16"``, ``"fp16"`` or ``"ieee"``, of the hidden layers; the last is at least TF32.
        inner: whether the inputs of a unit lie side by side in the weights.

    Attributes:
        params: all of them, layer after layer: weight, bias, gain, shift.
        size: E.
        precision: as given.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        gains: Sequence[Tensor] = (),
        shifts: Sequence[Tensor] = (),
        *,
        activation: str,
        eps: float = 0.0,
        precision: str = "tf32",
        inner: bool = False,
    ) -> None:
        self._groups: tuple[Group, ...] = tuple(map(tuple, (weights, biases, gains, shifts)))
        self.precision, self._eps, self._inner = precision, eps, inner
        of_layers = [list(group) for group in self._groups if group]
        self.params = [group[n] for n in range(len(weights)) for group in of_layers if n < len(group)]
        first = weights[0] if weights[0].ndim == 3 else weights[0].unsqueeze(0)
        self.size = first.shape[0]
        sizes = [first.shape[2 if inner else 1], *(bias.numel() // self.size for bias in biases)]
        self._net_args = tuple(sizes), activation, eps, precision

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the input, the hidden layers and the output."""
        return self._net_args[0]

    @property
    def made_of(self) -> tuple[Any, ...]:
        """Widths, activation, eps, precision, E, and how weights lie."""
        return *self._net_args, self.size, self._inner

    @property
    def groups(self) -> tuple[Group, ...]:
        """Weights, biases, gains and shifts."""
        return self._groups

    def is_like(self, other: "Members") -> bool:
        """Whether another is of the same shape in all respects, so that both can be one launch."""
        return self.made_of == other.made_of

    def tiles(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Tiles of the launches forward, backward and of all gradients, for B rows. It needs Triton.

        Each is rows of a program, units and depth of a product, warps, stages of loads ahead, and parts of the rows.
        Where a layer is a launch of its own, forward and backward have the same.
        """
        from torchrl_perf.kernels import layered_launch
        from torchrl_perf.kernels.members_launch import tiles_of

        found = [tiles_of(way, self._net, rows, self.size) for way in ("forward", "backward", "gradients")]
        if layered_launch.takes(self._net, rows):
            found[:2] = [layered_launch.TILES] * 2
        return tuple(map(tuple, found))

    @property
    def _net(self) -> Any:
        from torchrl_perf.kernels.chain_launch import Network  # Triton is loaded where it is used, not at import

        return Network(*self._net_args)

    def _for_kernels(self, rows: int, beside: "Members | None" = None) -> tuple[Group, ...]:
        from torchrl_perf.kernels.members_launch import MANY_ROWS

        sets = [self.groups] if beside is None else [self.groups, beside.groups]
        weights, biases, gains, shifts = (sum(columns, ()) for columns in zip(*sets, strict=True))
        dtype = _CONVERTED.get(self.precision)
        if dtype is not None and rows >= MANY_ROWS:  # fewer rows are done before the weights are converted
            layers = len(self.groups[0])
            hidden = [n for n in range(len(weights)) if n % layers < layers - 1]
            narrow = [torch.empty_like(weights[n], dtype=dtype) for n in hidden]
            torch._foreach_copy_(narrow, [weights[n] for n in hidden])
            given = dict(zip(hidden, narrow, strict=True))
            weights = tuple(given.get(n, weight) for n, weight in enumerate(weights))
        # without layer norm any tensors stand in their place
        return weights, biases, gains or biases, shifts or biases

    def forward(self, x: Tensor, *, beside: "Members | None" = None, save: bool = True) -> tuple[Tensor, Any]:
        """Outputs ``[E, B, OUT]`` float32, or with others beside them ``[2 E, B, OUT]``, and what backward needs.

        Args:
            x: ``[G, B, IN]`` float32 with dense rows; each G-th part of the members reads one of the inputs.
            beside: :class:`Members` of the same shape, whose outputs come second.
            save: whether there will be a backward pass of the first E.
        """
        from torchrl_perf.kernels import layered_launch, members_launch

        net, rows = self._net, x.shape[1]
        params = self._for_kernels(rows, beside)
        given = x, net, params, self.size, 1 if beside is None else 2, self._inner, save
        if layered_launch.takes(net, rows):
            y, kept = layered_launch.forward(*given)
        else:
            y, kept = members_launch.forward(*given, members_launch.tiles_of("forward", net, rows))
        count = len(self.groups[0])
        first = (params[0][:count], params[1][:count], *(group[: count - 1] for group in params[2:]))
        return y, (kept, first if self._eps else (*first[:2], first[1], first[1]))

    def backward(
        self, g: Tensor, kept: Any, x: Tensor | None = None, *, needs_x: bool = False
    ) -> tuple[Gradients | None, Tensor]:
        """Gradients of all parameters, and of each member's input ``[E, B, IN]``.

        Args:
            g: gradient of the first E outputs and first B rows, ``[E, B, OUT]`` float32 with dense rows.
            kept: what :meth:`forward` gave.
            x: what it was given, for the gradients of the parameters; None for that of the input alone.
            needs_x: whether that is asked for; else it is empty.
        """
        from torchrl_perf.kernels import layered_launch
        from torchrl_perf.kernels import members_launch as kernel

        net, (kept, params), (size, rows) = self._net, kept, g.shape[:2]
        given = g, net, params, kept, self._inner, needs_x
        if layered_launch.takes(net, rows):
            d, e, dx = layered_launch.backward(*given)
        else:
            d, e, dx = kernel.backward(*given, kernel.tiles_of("backward", net, rows))
        if x is None:
            return None, dx
        tiles = kernel.tiles_of("gradients", net, rows, size)
        shapes = (self.groups[0], *params[1:])  # of weights in their own dtype
        found, squares, places = kernel.gradients(x, g, d, e, net, shapes, kept, self._inner, tiles)
        values = [group[n] for n in range(len(found[0])) for group in found if n < len(group)]
        return Gradients(values, squares, places), dx
