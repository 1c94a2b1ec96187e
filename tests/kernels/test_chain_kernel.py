"""Perceptrons of any depth and width as kernels, against the float64 reference: values and all gradients."""

import itertools
import random

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional import chain as functional
from torchrl_perf.functional.chain import ACTIVATIONS, chain, fused_chain

EPS = 1e-5
TOLERANCE = {"ieee": 1e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 6e-3}
# a rounded number near 0 may fall on the other side of the slope's jump: oftener with fewer bits
JUMPS = {"tf32": 0.1, "fp16": 0.1, "bf16": 0.2}
SHAPES = [
    (37, (3, 20, 2), 0.0),
    (1, (4, 33, 48, 1), EPS),
    (70, (40, 16, 65, 17, 5), 0.0),
    (65, (2, 130, 40), EPS),
    (20, (7, 5), 0.0),
]
LARGE = [
    (8192, (4, 64, 32, 2), 0.0),
    (65_536, (4, 256, 256, 2), 0.0),
    (20_000, (48, 512, 256, 128, 12), 0.0),
    (3000, (17, 300, 1024, 6), EPS),
    (1000, (300, 1000, 200), 0.0),
    (777, (8, 33, 65, 129, 77, 31, 70), EPS),
]


def make(rows, sizes, eps, device):
    generator = torch.Generator().manual_seed(rows + len(sizes))

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    params = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        params += [normal(outputs, inputs) / inputs**0.5, 0.1 * normal(outputs)]
        params += [1 + 0.1 * normal(outputs), 0.1 * normal(outputs)] if eps and number < len(sizes) - 2 else []
    return normal(rows, sizes[0]).to(device), [p.to(device) for p in params], normal(rows, sizes[-1]).to(device)


def gradients(function, x, params, grad):
    x, params = x.detach().requires_grad_(), [p.detach().requires_grad_() for p in params]
    y = function(x, params)
    return [y.detach(), *torch.autograd.grad(y, [x, *params], grad)]


def compare(rows, sizes, eps, activation, precision, device):
    x, params, grad = make(rows, sizes, eps, device)
    found = gradients(lambda x, p: fused_chain(x, p, activation, eps, precision), x, params, grad)
    wide = [x.double(), [p.double() for p in params], grad.double()]
    expected = gradients(lambda x, p: chain(x, p, activation, eps), *wide)
    limit = TOLERANCE[precision]
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.dtype == torch.float32 and got.shape == want.shape
        error = float((got - want).norm() / want.norm().clamp_min(1e-30))
        jumps = number > 0 and precision != "ieee" and activation in ("relu", "leaky_relu")
        assert error <= (JUMPS[precision] if jumps else limit), (number, error)
    with torch.no_grad():
        alone = fused_chain(x, params, activation, eps, precision)
    assert float((alone - expected[0]).norm() / expected[0].norm()) <= limit


@tries_kernels
class TestAnywhere:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_values_and_gradients(self, shape, activation):
        compare(*shape, activation, "ieee", kernel_device())

    @pytest.mark.parametrize("seed", range(8))
    def test_random_shapes(self, seed):
        draw = random.Random(seed)
        hidden = [draw.randint(8, 70) for _ in range(draw.randint(0, 4))]  # layer norm of one unit is constant
        sizes = (draw.randint(1, 70), *hidden, draw.randint(1, 70))
        precision = draw.choice(["ieee", "fp16"])
        compare(draw.randint(1, 90), sizes, draw.choice([0.0, EPS]), draw.choice(list(ACTIVATIONS)), precision,
                kernel_device())  # fmt: skip

    @pytest.mark.parametrize("pair", [False, True])
    @pytest.mark.parametrize(("rows", "cols", "depth"), [(16, 16, 16), (32, 64, 32), (64, 128, 16)])
    def test_tiles_change_nothing(self, monkeypatch, rows, cols, depth, pair):
        from torchrl_perf.kernels import chain_blocks
        from torchrl_perf.kernels.chain_launch import Blocks

        blocks = Blocks(rows, cols, depth, 4, 2, pair=pair)
        monkeypatch.setattr(chain_blocks, "blocks_for", lambda *_: blocks)
        for sizes, activation in (((5, 48, 33, 3), "elu"), ((9, 20, 40, 16, 70), "silu"), ((3, 20, 2), "tanh")):
            compare(70, sizes, 0.0, activation, "ieee", kernel_device())

    def test_strided_inputs_and_gradients(self):
        x, params, grad = make(50, (6, 20, 4), 0.0, kernel_device())
        plain = gradients(lambda x, p: fused_chain(x, p, precision="ieee"), x, params, grad)
        strided = [x.t().contiguous().t(), params, torch.stack([grad, grad], -1)[..., 0]]
        assert not strided[0].is_contiguous() and not strided[2].is_contiguous()
        for got, want in zip(gradients(lambda x, p: fused_chain(x, p, precision="ieee"), *strided), plain, strict=True):
            torch.testing.assert_close(got, want)

    def test_no_rows(self):
        x, params, grad = make(0, (4, 20, 2), EPS, kernel_device())
        y, dx, *grads = gradients(lambda x, p: fused_chain(x, p, "elu", EPS), x, params, grad)
        assert y.shape == (0, 2) and dx.shape == (0, 4)
        assert all((each == 0).all() for each in grads)

    @pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, where the interpreter runs
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_large_and_bad_numbers_stay_in_their_rows(self, activation):
        x, params, grad = make(40, (4, 20, 2), 0.0, kernel_device())
        x[2] = 1e6
        x[3] = torch.nan
        y, dx, *_ = gradients(lambda x, p: fused_chain(x, p, activation, 0.0, "ieee"), x, params, grad)
        assert y[3].isnan().all()
        rest = [row for row in range(40) if row != 3]
        assert y[rest].isfinite().all() and dx[rest].isfinite().all()

    def test_only_the_gradient_of_the_input(self):
        x, params, grad = make(30, (4, 20, 2), 0.0, kernel_device())
        x.requires_grad_()
        (dx,) = torch.autograd.grad(fused_chain(x, params, "silu", 0.0, "ieee"), x, grad)
        (wanted,) = torch.autograd.grad(chain(x, params, "silu"), x, grad)
        torch.testing.assert_close(dx, wanted, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("eps", [0.0, EPS])
    @pytest.mark.parametrize("seed", range(4))
    def test_gradients_of_frozen_parameters_are_not_made(self, monkeypatch, seed, eps):
        x, params, grad = make(30, (40, 20, 18, 2), eps, kernel_device())
        draw = random.Random(seed)
        needs = [draw.random() < 0.5 for _ in params]
        needs[-1] = True
        wide = [p.double().requires_grad_(need) for p, need in zip(params, needs, strict=True)]
        params = [p.requires_grad_(need) for p, need in zip(params, needs, strict=True)]
        made, product = [], functional._weight_gradient
        monkeypatch.setattr(functional, "_weight_gradient", lambda *args: made.append(1) or product(*args))
        fused_chain(x, params, "silu", eps, "ieee").backward(grad)
        chain(x.double(), wide, "silu", eps).backward(grad.double())
        for got, want in zip(params, wide, strict=True):
            assert (got.grad is None) == (want.grad is None)
            if got.grad is not None:
                torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-4)
        weights = needs[:: 4 if eps else 2]
        # the last layer's are summed by the backward pass itself
        assert len(made) == sum(weights if eps else weights[:-1])

    @pytest.mark.parametrize("eps", [0.0, EPS])
    def test_operator_passes_opcheck(self, eps):
        x, params, _ = make(32, (4, 20, 2), eps, kernel_device())
        params = [p.requires_grad_() for p in params]
        torch.library.opcheck(torch.ops.torchrl_perf.chain_forward, (x, params, "gelu", eps, "ieee", True))

    def test_compiles_as_one_graph(self, fresh_dynamo):
        x, params, grad = make(32, (4, 20, 2), EPS, kernel_device())

        def run(x, params):
            return fused_chain(x, params, "silu", EPS, "ieee")

        compiled = gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), x, params, grad)
        for got, want in zip(compiled, gradients(run, x, params, grad), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
class TestCuda:
    @pytest.mark.parametrize("shape", LARGE, ids=str)
    @pytest.mark.parametrize("activation", ["tanh", "elu", "silu", "relu"])
    @pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
    def test_values_and_gradients(self, shape, activation, precision):
        compare(*shape, activation, precision, "cuda")

    @pytest.mark.parametrize("shape", LARGE, ids=str)
    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    def test_results_repeat_bit_for_bit_and_in_a_graph(self, shape, precision):
        x, params, grad = make(*shape, "cuda")

        def run():
            return gradients(lambda x, p: fused_chain(x, p, "elu", shape[2], precision), x, params, grad)

        first = run()
        for _ in range(3):
            assert all(map(torch.equal, run(), first))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, first))


@tries_kernels
@pytest.mark.parametrize(("sizes", "eps"), [((3, 20, 2), 0.0), ((4, 33, 48, 1), EPS)])
def test_gradients_are_differentiated_once_more(sizes, eps):
    """A penalty on the gradient of the input, and on those of the parameters."""

    def penalised(function, x, params):
        x, params = x.detach().requires_grad_(), [p.detach().requires_grad_() for p in params]
        first = torch.autograd.grad(function(x, params).square().sum(), [x, *params], create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), [x, *params])

    x, params, _ = make(9, sizes, eps, kernel_device())
    found = penalised(lambda x, p: fused_chain(x, p, "tanh", eps, "ieee"), x, params)
    expected = penalised(lambda x, p: chain(x, p, "tanh", eps), x.double(), [p.double() for p in params])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@tries_kernels
def test_hooks_of_parameters_are_called_once_where_gradients_have_a_graph():
    x, params, _ = make(9, (3, 20, 2), 0.0, kernel_device())
    params, seen = [p.requires_grad_() for p in params], []
    params[0].register_hook(lambda grad: seen.append(grad) or torch.zeros_like(grad))
    first, *_ = torch.autograd.grad(fused_chain(x, params, "tanh", 0.0, "ieee").sum(), params, create_graph=True)
    assert len(seen) == 1 and not first.any() and seen[0].any()
