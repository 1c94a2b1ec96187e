"""The mean over quantile levels: the fused kernel against the float64 reference, and the module that calls it."""

import pytest
import torch

from torchrl_perf.functional.implicit import fusable, fused_implicit_mean, implicit_mean
from torchrl_perf.modules import ImplicitQuantileMLP
from torchrl_perf.runtime import capture

SHAPES = [(1, 1, 64, 2), (17, 32, 64, 25), (1000, 8, 32, 3), (4097, 32, 64, 64), (300, 5, 128, 1), (10_000, 32, 128, 6)]
TOLERANCE = {"ieee": 1e-5, "tf32": 4e-3, "bf16": 1.5e-2, "fp16": 4e-3}


def make(rows, levels, hidden, outputs, device):
    generator = torch.Generator().manual_seed(rows + levels)
    shapes = [(hidden, hidden), (hidden,), (outputs, hidden), (outputs,)]
    params = [torch.randn(shape, generator=generator).to(device) / hidden**0.5 for shape in shapes]
    psi, phi = (torch.rand(n, hidden, generator=generator).to(device) for n in (rows, levels))
    return psi, phi, params


def assert_near(got, expected, tolerance):
    """The norm of the error is within ``tolerance`` of the norm."""
    error = (got.double() - expected).norm() / expected.norm()
    assert error <= tolerance, float(error)


def test_the_reference_is_the_mean_of_the_levels():
    psi, phi, params = make(5, 3, 8, 2, "cpu")
    w1, b1, w2, b2 = params
    for activation in ("relu", "tanh"):
        act = getattr(torch, activation)
        levels = [act((psi * phi[k]) @ w1.T + b1) @ w2.T + b2 for k in range(3)]
        got = implicit_mean(psi, phi, params, activation)
        torch.testing.assert_close(got, torch.stack(levels).mean(0), rtol=1e-5, atol=1e-6)


def test_nothing_is_fused_on_a_cpu():
    psi, _, params = make(5, 3, 64, 2, "cpu")
    assert not fusable(psi, params)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_reference(shape, activation, precision):
    psi, phi, params = make(*shape, "cuda")
    assert fusable(psi, params)
    got = fused_implicit_mean(psi, phi, params, activation, precision)
    expected = implicit_mean(psi.double(), phi.double(), [p.double() for p in params], activation)
    assert got.dtype == torch.float32 and got.shape == expected.shape
    assert_near(got, expected, TOLERANCE[precision])


@pytest.mark.gpu
def test_strides_and_no_rows():
    psi, phi, params = make(64, 4, 64, 3, "cuda")
    strided = psi.T.contiguous().T
    assert torch.equal(fused_implicit_mean(strided, phi, params), fused_implicit_mean(psi, phi, params))
    assert fused_implicit_mean(psi[:0], phi, params).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dueling", [False, True])
def test_the_module_acts_by_the_kernel(dueling):
    network = ImplicitQuantileMLP(4, 3, dueling=dueling, precision="ieee", device="cuda")
    x, taus = torch.randn(2, 50, 4, device="cuda"), torch.rand(32, device="cuda")
    expected = network.quantiles(x, taus=taus).mean(-1)
    with torch.no_grad():
        eager = network.means(x, taus=taus)
        graph = capture(lambda: network.means(x, taus=taus))().clone()
    torch.testing.assert_close(eager, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(graph, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_gradient_is_never_lost():
    network = ImplicitQuantileMLP(4, 3, device="cuda")
    network.means(torch.randn(8, 4, device="cuda")).sum().backward()
    assert all(param.grad is not None for param in network.parameters())
