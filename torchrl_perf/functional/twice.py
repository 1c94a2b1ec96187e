"""Gradients of operators that are differentiated once more, as penalties on gradients are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["graphed_gradients"]


def graphed_gradients(
    reference: Callable[..., Tensor], inputs: Sequence[Tensor], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of an operator as functions of its inputs and ``grad``, by the operations of its reference.

    A kernel of a backward pass cannot be differentiated. Backward functions ask for this where a graph is made of the
    gradients: while gradients are enabled.

    Args:
        reference: what the operator computes, of PyTorch's operations.
        inputs: of it.
        needs: which of them a gradient is asked for of.
        grad: of its output.

    Returns:
        One for each input, None where none is asked for.
    """
    # others of the same values: hooks of a parameter are called with its gradient, not with this part of it
    given = [value.view_as(value) for value in inputs]
    wanted = [value for value, need in zip(given, needs, strict=True) if need]
    found = iter(torch.autograd.grad(reference(*given), wanted, grad, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needs]
