"""Two small perceptrons in one launch, against the reference: values and the gradients of both."""

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional.mlp import mlp
from torchrl_perf.kernels import processors


def network(inputs, hidden, outputs, generator):
    shapes = ((hidden, inputs), (hidden,), (hidden, hidden), (hidden,), (outputs, hidden), (outputs,))
    return [0.3 * torch.randn(shape, generator=generator) for shape in shapes]


@tries_kernels
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    ("rows", "inputs", "hidden", "outputs"), [(37, 4, 32, (2, 1)), (70, 17, 32, (1, 20)), (16, 5, 64, (6, 6))]
)
def test_values_and_gradients(rows, inputs, hidden, outputs, activation):
    from torchrl_perf.kernels import mlp as kernels

    generator, device = torch.Generator().manual_seed(rows), torch.device(kernel_device())
    pair = [network(inputs, hidden, each, generator) for each in outputs]
    x = torch.randn(inputs, rows, generator=generator).t()  # columns lie side by side
    grads = [torch.randn(rows, each, generator=generator) for each in outputs]
    given = tuple([p.to(device) for p in params] for params in pair)
    y = kernels.forward_of(given, x.to(device), activation, "ieee", processors(device))
    of_outputs = tuple(grad.to(device) for grad in grads)
    flat = kernels.backward_of(of_outputs, given, x.to(device), activation, "ieee", processors(device))
    expected = []
    for params, grad, found in zip(pair, grads, y, strict=True):
        wide = [p.double().requires_grad_() for p in params]
        out = mlp(x.double(), wide, activation)
        torch.testing.assert_close(found.cpu().double(), out.detach(), rtol=1e-4, atol=1e-5)
        expected += torch.autograd.grad(out, wide, grad.double())
    parts = flat.cpu().double().split([each.numel() for each in expected])
    for found, want in zip(parts, expected, strict=True):
        torch.testing.assert_close(found.view_as(want), want, rtol=1e-4, atol=1e-4)


@tries_kernels
@pytest.mark.parametrize("outputs", [(2, 1), (3, 20)])  # of 20, another kernel would be compiled: apart
def test_compiled_functions_join_two_networks(monkeypatch, outputs):
    from torchrl_perf.functional.mlp import fused_mlp
    from torchrl_perf.kernels import mlp as kernels
    from torchrl_perf.runtime.upstream import inductor

    generator, device = torch.Generator().manual_seed(0), kernel_device()
    pair = [network(4, 32, each, generator) for each in outputs]
    pair = [[p.to(device).requires_grad_() for p in params] for params in pair]
    x = torch.randn(40, 4, generator=generator).to(device)
    calls = []
    for name in ("forward_of", "backward_of"):
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, f=function: calls.append(len(args[0])) or f(*args))

    def loss(x, function):
        logits, value = (function(x, params) for params in pair)
        return logits.log_softmax(-1)[:, 0].exp().mean() + (value - 1.0).square().mean()

    def fused(x):
        return loss(x, lambda x, params: fused_mlp(x, params, "tanh", "ieee"))

    parameters = [p for params in pair for p in params]
    compiled = torch.compile(fused, options={"post_grad_custom_pre_pass": inductor.graph_pass()}, fullgraph=True)
    found = torch.autograd.grad(compiled(x), parameters)
    expected = torch.autograd.grad(loss(x, mlp), parameters)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert sum(calls) == 4 and len(calls) == (2 if max(outputs) <= 16 else 4)
