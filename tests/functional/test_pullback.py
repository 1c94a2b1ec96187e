"""Differentiable: gradients in parameters and inputs by hand, eagerly and inside of a compiled function."""

import pytest
import torch
from torch import nn

from torchrl_perf.functional.pullback import Differentiable
from torchrl_perf.runtime.compile import compiled


class Scale(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0, 3.0], device=device))
        self.unused = nn.Parameter(torch.ones(2, device=device))


def make(device="cpu"):
    module = Scale(device)

    def fn(shift, x):
        return (module.a * x + shift,), (module.a.detach().sum(),)

    return module, Differentiable(module, fn, [module.unused, module.a])


def test_by_hand(variant, fresh_dynamo):
    """y = a x + 1: dy/da = x, dy/dx = a; a parameter without influence has a gradient of zeros."""
    _, call = make(variant.device)
    x, cotangent = torch.tensor([[5.0, 7.0], [1.0, 10.0]], device=variant.device)

    def run(x, cotangent):
        outputs, extras, pull = call.pullback(torch.ones_like(x), x)
        of_params, of_inputs = pull([cotangent])
        return outputs, extras, of_params, of_inputs

    with torch.no_grad():
        (y,), (total,), (unused, a), (of_x,) = variant(run)(x, cotangent)
    assert y.tolist() == [11.0, 22.0] and not y.requires_grad
    assert total == 5.0
    assert unused.tolist() == [0.0, 0.0]
    assert a.tolist() == [5.0, 70.0]
    assert of_x.tolist() == [2.0, 30.0]


def test_gradients_are_those_of_the_values_before_an_update(fresh_dynamo):
    """A parameter that is overwritten between value and gradient, as optimisers do it."""
    results = []
    for wrap in (lambda fn: fn, lambda fn: compiled(fn, backend="aot_eager")):
        module, call = make()

        def run(x, module=module, call=call):
            _, _, pull = call.pullback(torch.zeros_like(x), x)
            grads, _ = pull([torch.ones_like(x)])
            module.a.sub_(grads[1])
            (y,), _, _ = call.pullback(torch.zeros_like(x), x)
            return y

        with torch.no_grad():
            results.append((wrap(run)(torch.tensor([5.0, 7.0])), module.a.detach()))
    for y, a in results:
        assert a.tolist() == [-3.0, -4.0]
        assert y.tolist() == [-15.0, -28.0]


def test_frozen_parameters_are_refused():
    net = torch.nn.Linear(2, 1)
    differentiable = Differentiable(net, lambda context: ((net(context).sum(),), ()), list(net.parameters()))
    net.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"params: expected parameters with requires_grad, .*weight frozen. Remedy"):
        differentiable.pullback(torch.ones(3, 2))


def test_parameters_of_another_module_are_refused():
    with pytest.raises(ValueError, match=r"params: expected parameters of the module, received 1 others"):
        Differentiable(Scale(), lambda x: ((x,), ()), [nn.Parameter(torch.ones(1))])


def test_compiled_alone(traced):
    """A function with an operator that ``torch.func`` cannot differentiate: gradients as eagerly."""
    module = nn.Linear(6, 6, bias=False)
    x, begins = torch.randn(3, 4, 6), torch.rand(3, 4) < 0.3

    def fn(shift, h):
        states, _ = torch.ops.torchrl_perf.gru_sequence(
            module(x) + shift, h, begins, torch.eye(6)[:, :2] + 1, None, None, True
        )
        return (states,), ()

    found = []
    for is_compiled in (False, True):
        call = Differentiable(module, fn, [module.weight])
        if is_compiled:
            call.compile_alone(compiled)
        (states,), _, pull = call.pullback(torch.ones(6), torch.ones(3, 2))
        of_params, of_inputs = pull([torch.ones_like(states)])
        found.append([states, *of_params, *of_inputs])
    torch.testing.assert_close(*found)
