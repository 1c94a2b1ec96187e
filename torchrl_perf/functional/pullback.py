"""Gradients of a function of a module's parameters that also work inside a compiled function."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

Pull = Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]


class Differentiable(nn.Module):
    """A function that uses a module's parameters, with its vector-Jacobian product in them and in its inputs.

    In eager mode the gradients are autograd's. A compiler cannot trace that call, so there ``torch.func.vjp`` computes
    them: losses, gradients and optimiser steps become one graph, without a boundary at which intermediate results are
    written out.

    Args:
        module: whose parameters the function uses.
        fn: ``fn(context, *inputs) -> (outputs, extras)``, two tuples of tensors; only the first is differentiated.
        params: those parameters of the module that are differentiated; the others are constants.

    Attributes:
        depended_on: parameters that the outputs of a call in eager mode depended on.

    Raises:
        ValueError: for a parameter that is not the module's.
    """

    def __init__(
        self, module: nn.Module, fn: Callable[..., tuple[tuple[Tensor, ...], Any]], params: Sequence[nn.Parameter]
    ) -> None:
        super().__init__()
        self.module, self.fn = module, fn
        names = {id(param): name for name, param in self.named_parameters()}
        missing = sum(id(param) not in names for param in params)
        if missing:
            raise ValueError(
                f"params: expected parameters of the module, received {missing} others. Remedy: params from "
                "module.parameters()."
            )
        self.names = [names[id(param)] for param in params]
        self.depended_on: set[Tensor] = set()

    def compile_alone(self, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Has the function compiled by itself, with autograd around it, instead of within what calls :meth:`pullback`.

        For functions with operators that ``torch.func`` cannot differentiate: those of sequences with a memory.

        Args:
            compile: makes a compiled function.
        """
        self.fn = compile(self.fn)

    def forward(self, context: Any, *inputs: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """The function itself."""
        return self.fn(context, *inputs)

    def pullback(self, context: Any, *inputs: Tensor) -> tuple[tuple[Tensor, ...], Any, Pull]:
        """Values, and the function that gives the gradients.

        Args:
            context: passed on unchanged, such as a TensorDict.
            *inputs: tensors that are differentiated, without a history.

        Returns:
            Outputs and extras, both without a gradient, and ``pull(cotangents) -> (of the params, of the inputs)``,
            with one cotangent for each output, to be called once. Zeros where there is no dependence.

        Raises:
            ValueError: for a parameter that is frozen.
        """
        params = {name: self.get_parameter(name) for name in self.names}
        # torch.func would differentiate a frozen one too, which the optimiser would then move
        if frozen := [name for name, param in params.items() if not param.requires_grad]:
            raise ValueError(
                f"params: expected parameters with requires_grad, received {', '.join(frozen)} frozen. Remedy: "
                "requires_grad_(True), or detach what the frozen part computes."
            )
        if torch.compiler.is_compiling():
            return self._traced(context, params, inputs)
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in inputs]
            outputs, extras = self.fn(context, *leaves)
        both = [*params.values(), *leaves]

        def pull(cotangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            found = torch.autograd.grad(outputs, both, list(cotangents), allow_unused=True)
            self.depended_on.update(one for one, grad in zip(params.values(), found, strict=False) if grad is not None)
            grads = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(both, found, strict=True)]
            return grads[: len(params)], grads[len(params) :]

        return tuple(value.detach() for value in outputs), extras, pull

    def _traced(
        self, context: Any, params: dict[str, nn.Parameter], inputs: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Any, Pull]:
        def call(params: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
            return torch.func.functional_call(self, params, (context, *inputs))

        constants = {name: param.detach() for name, param in params.items()}
        outputs, back, extras = cast("Any", torch.func.vjp(call, constants, inputs, has_aux=True))

        def pull(cotangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            of_params, of_inputs = back(tuple(cotangents))
            return [of_params[name] for name in self.names], list(of_inputs)

        return outputs, extras, pull
