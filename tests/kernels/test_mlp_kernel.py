"""The fused perceptron against the float64 reference: values and all gradients."""

import random

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional.mlp import WIDTHS, fused_mlp, mlp

SHAPES = [
    (1, 4, 64, 2),
    (17, 3, 64, 1),
    (64, 4, 32, 2),
    (1000, 17, 128, 6),
    (4097, 8, 64, 64),
    (300, 128, 64, 3),
    (50_000, 4, 64, 2),
    (5000, 1, 128, 1),
    (900, 64, 128, 32),
]
TOLERANCE = {"ieee": 1e-5, "tf32": 4e-3, "bf16": 1.5e-2, "fp16": 4e-3}
RELU_GRADIENT = 0.1  # relu's slope jumps: a rounded pre-activation near 0 may fall on its other side


def make(batch, inputs, hidden, outputs, device, scale=1.0):
    generator = torch.Generator().manual_seed(batch + inputs)
    shapes = [(hidden, inputs), (hidden,), (hidden, hidden), (hidden,), (outputs, hidden), (outputs,)]
    fans = [inputs, inputs, hidden, hidden, hidden, hidden]
    params = [torch.randn(s, generator=generator) / f**0.5 for s, f in zip(shapes, fans, strict=True)]
    x, grad = torch.randn(batch, inputs, generator=generator), torch.randn(batch, outputs, generator=generator)
    return x.to(device) * scale, [p.to(device) for p in params], grad.to(device)


def gradients(function, x, params, grad):
    params = [p.clone().requires_grad_() for p in params]
    y = function(x, params)
    y.backward(grad.to(y.dtype))
    return y.detach(), [p.grad for p in params]


def assert_near(got, expected, tolerance):
    """Finite, and the norm of the error within ``tolerance`` of the norm."""
    error = (got.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= tolerance, float(error)


def compare(x, params, grad, activation, precision):
    y, grads = gradients(lambda x, p: fused_mlp(x, p, activation, precision), x, params, grad)
    expected, wanted = gradients(
        lambda x, p: mlp(x, p, activation), x.double(), [p.double() for p in params], grad.double()
    )
    assert y.dtype == torch.float32
    assert_near(y, expected, TOLERANCE[precision])
    for name, got, want in zip(("w1", "b1", "w2", "b2", "w3", "b3"), grads, wanted, strict=True):
        jumps = activation == "relu" and precision != "ieee"
        assert got.shape == want.shape, name
        assert_near(got, want, RELU_GRADIENT if jumps else 2 * TOLERANCE[precision])


@tries_kernels
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_gradients_are_differentiated_once_more(activation):
    def penalised(function, x, params):
        params = [p.clone().requires_grad_() for p in params]
        first = torch.autograd.grad(function(x, params).square().sum(), params, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), params)

    x, params, _ = make(17, 3, 32, 2, kernel_device())
    found = penalised(lambda x, p: fused_mlp(x, p, activation, "ieee"), x, params)
    expected = penalised(lambda x, p: mlp(x, p, activation), x.double(), [p.double() for p in params])
    for got, want in zip(found, expected, strict=True):
        assert_near(got, want, 1e-4)


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("activation", ["tanh", "relu"])
    @pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16", "fp16"])
    def test_values_and_gradients(self, shape, activation, precision):
        compare(*make(*shape, "cuda"), activation, precision)

    @pytest.mark.parametrize("precision", ["ieee", "tf32"])
    def test_strided_inputs_and_gradients(self, precision):
        x, params, grad = make(500, 6, 64, 4, "cuda")
        strided_x = x.t().contiguous().t()
        strided_grad = torch.stack([grad, grad], -1)[..., 0]
        assert not strided_x.is_contiguous()
        compare(strided_x, params, strided_grad, "tanh", precision)
        compare(x, params, grad[:, :1].expand(500, 4), "tanh", precision)

    @pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16", "fp16"])
    def test_results_repeat_bit_for_bit(self, precision):
        x, params, grad = make(20_000, 4, 64, 2, "cuda")
        runs = [gradients(lambda x, p: fused_mlp(x, p, "tanh", precision), x, params, grad) for _ in range(3)]
        for y, grads in runs[1:]:
            assert torch.equal(y, runs[0][0])
            assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1], strict=True))

    @pytest.mark.parametrize("precision", ["ieee", "tf32"])
    def test_saturated_units_stay_finite(self, precision):
        x, params, grad = make(100, 4, 64, 2, "cuda", scale=1e6)
        y, grads = gradients(lambda x, p: fused_mlp(x, p, "tanh", precision), x, params, grad)
        assert y.isfinite().all()
        assert all(g.isfinite().all() for g in grads)

    def test_a_row_does_not_depend_on_its_neighbours(self):
        x, params, _ = make(1000, 4, 64, 2, "cuda")
        together = fused_mlp(x, params, "tanh", "ieee")
        alone = fused_mlp(x[123:124], params, "tanh", "ieee")
        torch.testing.assert_close(together[123:124], alone, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("activation", ["tanh", "relu"])
    def test_a_bad_row_stays_in_its_row(self, activation):
        x, params, _ = make(100, 4, 64, 2, "cuda")
        x[3] = torch.nan
        y = fused_mlp(x, params, activation, "tf32")
        assert y[3].isnan().all()
        assert y.isfinite().sum() == 99 * 2

    def test_operator_passes_opcheck(self):
        x, params, _ = make(40, 4, 32, 2, "cuda")
        params = [p.requires_grad_() for p in params]
        torch.library.opcheck(torch.ops.torchrl_perf.mlp_forward, (x, params, "tanh", "ieee"))


def test_kernels_in_the_interpreter(monkeypatch):
    """The same kernels on CPU tensors, where Triton is installed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves run on this machine")
    from torchrl_perf.kernels import mlp as kernel

    for batch, inputs, hidden, outputs in [(37, 3, 32, 2), (1, 4, 32, 1)]:
        x, params, grad = make(batch, inputs, hidden, outputs, "cpu")
        expected, wanted = gradients(mlp, x.double(), [p.double() for p in params], grad.double())
        assert_near(kernel.forward(x, params, "tanh", "ieee", 2), expected, 1e-5)
        flat = kernel.backward(grad, x, params, "tanh", "ieee", 2)
        assert_near(flat, torch.cat([g.flatten() for g in wanted]), 1e-5)


@tries_kernels
@pytest.mark.parametrize("seed", range(8))
def test_random_shapes(seed):
    """Any rows, inputs and outputs, of any strides, for both kernels; interpreted where there is no GPU."""
    from torchrl_perf.kernels import mlp as kernels

    draw, device = random.Random(seed), torch.device(kernel_device())
    hidden = draw.choice(WIDTHS[:2] if device.type == "cpu" else WIDTHS)
    rows, inputs, outputs = draw.randint(1, 150), draw.randint(1, 40), draw.randint(1, 20)
    activation, programs = draw.choice(["tanh", "relu"]), draw.randint(1, 3)
    x, params, grad = make(rows, inputs, hidden, outputs, device)
    if draw.random() < 0.5:
        x, grad = x.t().contiguous().t(), torch.stack([grad, grad], -1)[..., 0]
    y = kernels.forward(x, params, activation, "ieee", programs)
    flat = kernels.backward(grad, x, params, activation, "ieee", programs)
    expected, wanted = gradients(
        lambda x, p: mlp(x, p, activation), x.double(), [p.double() for p in params], grad.double()
    )
    assert_near(y, expected, 1e-5)
    for got, want in zip(flat.split([p.numel() for p in params]), wanted, strict=True):
        assert_near(got.view_as(want), want, 2e-5)
