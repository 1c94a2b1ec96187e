"""The perceptron's reference and when the kernel takes over."""

import sys
import types

import pytest
import torch
from torch import nn

from torchrl_perf import kernels
from torchrl_perf.functional import mlp as module
from torchrl_perf.functional.mlp import fusable, fused_mlp, mlp


def make(inputs=4, hidden=32, outputs=2, **options):
    shapes = [(hidden, inputs), (hidden,), (hidden, hidden), (hidden,), (outputs, hidden), (outputs,)]
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * 0.3).to(**options) for shape in shapes]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 4), (7, 4), (2, 3, 4), (4,)])
def test_equals_layers_of_torch(activation, shape):
    params = make()
    act = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    net = nn.Sequential(nn.Linear(4, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, 2))
    for parameter, value in zip(net.parameters(), params, strict=True):
        parameter.data.copy_(value)
    x = torch.randn(shape)
    assert torch.equal(mlp(x, params, activation), net(x))


def test_hand_computed():
    one = torch.ones(1, 1, dtype=torch.float64)
    params = [2 * one, one[0], -3 * one, one[0], 5 * one, -one[0]]
    # relu: h1 = 2 * 1 + 1 = 3, h2 = max(0, -9 + 1) = 0, y = 0 - 1
    assert mlp(one, params, "relu").item() == -1.0
    h1 = torch.tanh(3 * one)
    assert mlp(one, params, "tanh").item() == (5 * torch.tanh(-3 * h1 + 1) - 1).item()


def test_nothing_is_fusable_on_a_cpu():
    assert not fusable(torch.ones(8, 4), make())


@pytest.fixture
def stand_in(monkeypatch):
    """A kernel module of plain torch, so that the operator around the kernels runs on a CPU."""

    def backward(grad, x, params, activation, precision, processors):
        w1, b1, w2, b2, w3, _ = params
        act, slope = {
            "tanh": (torch.tanh, lambda h: 1 - h * h),
            "relu": (torch.relu, lambda h: (h > 0).to(h.dtype)),
        }[activation]
        h1 = act(x @ w1.T + b1)
        h2 = act(h1 @ w2.T + b2)
        d2 = grad @ w3 * slope(h2)
        d1 = d2 @ w2 * slope(h1)
        grads = [d1.T @ x, d1.sum(0), d2.T @ h1, d2.sum(0), grad.T @ h2, grad.sum(0)]
        return torch.cat([g.flatten() for g in grads])

    fake = types.ModuleType("torchrl_perf.kernels.mlp")
    fake.forward = lambda x, params, activation, precision, processors: mlp(x, params, activation)
    fake.backward = backward
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(kernels, "mlp", fake, raising=False)
    monkeypatch.setattr(module, "processors", lambda device: 1)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_operator_is_differentiable_and_traceable(stand_in, is_compiled, fresh_dynamo):
    x, params = torch.randn(7, 4), [p.requires_grad_() for p in make()]
    run = torch.compile(fused_mlp, fullgraph=True, backend="aot_eager") if is_compiled else fused_mlp
    y, expected = run(x, params, "relu"), mlp(x, params, "relu")
    torch.testing.assert_close(y, expected)
    grads = torch.autograd.grad(y.square().sum(), params)
    for got, want in zip(grads, torch.autograd.grad(expected.square().sum(), params), strict=True):
        torch.testing.assert_close(got, want)


def test_operator_passes_opcheck(stand_in):
    params = [p.requires_grad_() for p in make()]
    torch.library.opcheck(torch.ops.torchrl_perf.mlp_forward, (torch.randn(7, 4), params, "tanh", "ieee"))


@pytest.mark.gpu
def test_strided_parameters_are_not_fusable():
    params = make(device="cuda")
    params[2] = params[2].t()
    assert not fusable(torch.ones(8, 4, device="cuda"), params)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("x", "params", "expected"),
    [
        ({}, {}, True),
        ({"dtype": torch.float64}, {"dtype": torch.float64}, False),
        ({}, {"hidden": 48}, False),
        ({"inputs": 129}, {"inputs": 129}, False),
        ({}, {"outputs": 65}, False),
        ({"requires_grad": True}, {}, False),
    ],
)
def test_what_is_fusable_on_cuda(x, params, expected):
    x = dict(x)
    inputs = x.pop("inputs", 4)
    assert fusable(torch.ones(8, inputs, device="cuda", **x), make(device="cuda", **params)) is expected
