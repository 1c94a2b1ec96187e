"""Ensembles of perceptrons on few rows as kernels, against the float64 reference: values and all gradients."""

import itertools
import random

import pytest
import torch

from tests.kernels.interpreted import kernel_device, tries_kernels
from torchrl_perf.functional.chain import ACTIVATIONS
from torchrl_perf.functional.members import Members, members

EPS = 1e-5
TOLERANCE = {"ieee": 1e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 6e-3}
# a rounded number near 0 may fall on the other side of the slope's jump: oftener with fewer bits
JUMPS = {"ieee": 1e-5, "tf32": 0.1, "fp16": 0.1, "bf16": 0.2}
SHAPES = [
    (37, (5, 20, 33, 1), 0.0, 2),
    (1, (4, 33, 48, 1), EPS, 3),
    (50, (23, 70, 2), 0.0, 1),
    (16, (2, 16, 17, 9, 5), EPS, 2),
]
LARGE = [
    ((256, (23, 256, 256, 1), 0.0, 2), "relu", "tf32"),
    ((300, (17, 256, 256, 12), EPS, 1), "tanh", "tf32"),
    ((512, (393, 1024, 1024, 1), EPS, 5), "silu", "bf16"),
    ((9000, (60, 512, 256, 128, 1), 0.0, 2), "relu", "bf16"),
    ((20_000, (23, 256, 130, 1), EPS, 2), "elu", "fp16"),
    ((8192, (17, 512, 256, 128, 12), 0.0, 1), "mish", "bf16"),
    ((32_768, (23, 512, 256, 128, 1), 0.0, 2), "relu", "bf16"),  # layer by layer, and so are the next two
    ((20_001, (17, 530, 130, 12), 0.0, 1), "mish", "bf16"),
    ((16_384, (60, 512, 1), 0.0, 3), "tanh", "fp16"),
]


def make(size, sizes, eps, generator):
    def normal(*shape):
        return torch.randn(shape, generator=generator)

    groups = [[], [], [], []]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        groups[0].append(normal(size, inputs, outputs) / inputs**0.5)
        groups[1].append(0.1 * normal(size, 1, outputs))
        if eps and number < len(sizes) - 2:
            groups[2].append(1 + 0.1 * normal(size, 1, outputs))
            groups[3].append(0.1 * normal(size, 1, outputs))
    return groups if eps else groups[:2]


def as_kernels(groups, inner, device, **options):
    weights, *vectors = [[tensor.to(device) for tensor in group] for group in groups]
    if inner:
        weights = [weight.mT.contiguous() for weight in weights]
    return Members(weights, *vectors, inner=inner, **options)


def compare(rows, sizes, eps, size, activation, precision, *, inner, two, inputs, fewer=0):
    """One set or two beside one another, which read ``inputs`` inputs; ``fewer`` rows get no gradient."""
    generator, device = torch.Generator().manual_seed(rows + len(sizes) + size), kernel_device()
    groups = make(size, sizes, eps, generator), make(size, sizes, eps, generator)
    options = {"activation": activation, "eps": eps, "precision": precision}
    first, second = (as_kernels(each, inner, device, **options) for each in groups)
    x = torch.randn(inputs, rows, sizes[0], generator=generator)
    every = 2 * size if two else size
    y, kept = first.forward(x.to(device), beside=second if two else None)
    g = torch.randn(size, rows - fewer, sizes[-1], generator=generator)
    of_first = inputs // 2 if two and inputs > 1 else inputs
    gradients, dx = first.backward(g.to(device), kept, x[:of_first].to(device), needs_x=True)

    wide = [[t.double().requires_grad_() for t in group] for group in groups[0]]
    joined = [
        [torch.cat([a, b.double()]) if two else a for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(wide, groups[1], strict=True)
    ]
    leaf = x.double().repeat_interleave(every // inputs, 0).requires_grad_()
    expected = members(leaf, joined, activation, eps)
    order = [group[n] for n in range(len(sizes) - 1) for group in wide if n < len(group)]
    of_x, *grads = torch.autograd.grad(expected[:size, : rows - fewer], [leaf, *order], g.double())
    limit = TOLERANCE[precision]
    jumps = JUMPS[precision] if activation in ("relu", "leaky_relu") else limit
    assert y.dtype == torch.float32 and error(y, expected.detach()) <= limit
    assert error(dx, of_x[:size, : rows - fewer]) <= jumps
    for found, param, want in zip(gradients.values, first.params, grads, strict=True):
        assert found.shape == param.shape
        assert error(found, want.mT if inner and want.shape[1] > 1 else want) <= jumps
    squares = sum(float(value.double().square().sum()) for value in gradients.values)
    assert float(gradients.squares.double().sum()) == pytest.approx(squares, rel=1e-4)
    places = gradients.places
    for number, value in enumerate(gradients.values):
        part = gradients.squares[places[number] : places[number + 1]].double().sum()
        assert float(part) == pytest.approx(float(value.double().square().sum()), rel=1e-4, abs=1e-12)


def error(found, expected):
    found = found.cpu().double()
    return float((found.view_as(expected) - expected).norm() / expected.norm().clamp_min(1e-30))


@tries_kernels
class TestAnywhere:
    @pytest.mark.parametrize(("number", "activation"), list(enumerate(ACTIVATIONS)))
    def test_values_and_gradients(self, number, activation):
        compare(*SHAPES[number % len(SHAPES)], activation, "ieee", inner=False, two=True, inputs=2)

    @pytest.mark.parametrize("seed", range(10))
    def test_random_shapes(self, seed):
        draw = random.Random(seed)
        hidden = [draw.randint(8, 70) for _ in range(draw.randint(1, 4))]  # layer norm of one unit is constant
        sizes = (draw.randint(1, 70), *hidden, draw.randint(1, 20))
        size, two, rows = draw.randint(1, 5), draw.random() < 0.5, draw.randint(2, 70)
        inputs = draw.choice([1, size] if not two else [1, 2, 2 * size])
        compare(rows, sizes, draw.choice([0.0, EPS]), size, draw.choice(list(ACTIVATIONS)),
                draw.choice(["ieee", "fp16"]), inner=draw.random() < 0.5, two=two, inputs=inputs,
                fewer=draw.choice([0, rows // 2]))  # fmt: skip

    @pytest.mark.parametrize("tiles", [(16, 16, 16), (32, 64, 32, 4, 2, 3), (16, 128, 16, 8, 3, 2)])
    def test_tiles_change_nothing(self, monkeypatch, tiles):
        from torchrl_perf.kernels import members_launch

        monkeypatch.setattr(members_launch, "tiles_of", lambda *_: members_launch.Tiles(*tiles))
        compare(40, (5, 48, 33, 3), 0.0, 2, "elu", "ieee", inner=False, two=True, inputs=2)
        compare(40, (9, 20, 40, 16, 7), EPS, 1, "silu", "ieee", inner=True, two=False, inputs=1)

    @pytest.mark.parametrize("eps", [0.0, EPS])
    def test_weights_that_are_converted_beforehand(self, monkeypatch, eps):
        from torchrl_perf.kernels import members_launch

        monkeypatch.setattr(members_launch, "MANY_ROWS", 32)
        compare(40, (5, 48, 33, 3), eps, 2, "elu", "fp16", inner=False, two=True, inputs=2)
        compare(70, (9, 20, 16, 7), eps, 1, "silu", "fp16", inner=True, two=True, inputs=2, fewer=45)
        compare(40, (5, 128, 130, 1), eps, 2, "elu", "fp16", inner=False, two=False, inputs=1)
        compare(40, (5, 128, 130, 1), eps, 1, "elu", "fp16", inner=True, two=False, inputs=1)

    @pytest.mark.parametrize("activation", ["elu", "silu"])  # by value, and by what it was applied to
    def test_layer_by_layer(self, monkeypatch, activation):
        from torchrl_perf.kernels import layered_launch, members_launch

        taken = []
        forward = layered_launch.forward
        monkeypatch.setattr(members_launch, "MANY_ROWS", 32)
        monkeypatch.setattr(layered_launch, "ROWS", 32)
        monkeypatch.setattr(layered_launch, "WIDE", 32)
        monkeypatch.setattr(layered_launch, "TILES", members_launch.Tiles(16, 32, 16))
        monkeypatch.setattr(layered_launch, "forward", lambda *args: taken.append(1) or forward(*args))
        compare(40, (5, 48, 33, 3), 0.0, 2, activation, "fp16", inner=False, two=True, inputs=2)
        compare(70, (9, 33, 64, 40, 7), 0.0, 1, activation, "fp16", inner=True, two=False, inputs=1, fewer=38)
        compare(70, (9, 33, 64, 40, 7), 0.0, 2, activation, "fp16", inner=True, two=True, inputs=4, fewer=20)
        assert len(taken) == 3

    def test_parameters_that_lie_as_in_linear_layers(self):
        nn = torch.nn
        layers = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3)).to(kernel_device())
        x, g = torch.randn(30, 5), torch.randn(30, 3)
        linear = [layers[0], layers[2]]
        found = Members([each.weight for each in linear], [each.bias for each in linear], activation="tanh",
                        precision="ieee", inner=True)  # fmt: skip
        y, kept = found.forward(x[None].to(kernel_device()))
        gradients, _ = found.backward(g[None].to(kernel_device()), kept, x[None].to(kernel_device()))
        expected = layers(x.to(kernel_device()))
        torch.testing.assert_close(y[0], expected.detach(), atol=1e-5, rtol=1e-5)
        wanted = torch.autograd.grad(expected, list(layers.parameters()), g.to(kernel_device()))
        for got, want in zip(gradients.values, wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    def test_bad_numbers_stay_in_their_rows_and_members(self):
        generator = torch.Generator().manual_seed(0)
        net = as_kernels(make(2, (4, 20, 2), 0.0, generator), False, kernel_device(), activation="relu")
        x = torch.randn(2, 20, 4)
        x[1, 3] = torch.nan
        y, _ = net.forward(x.to(kernel_device()))
        assert y[1, 3].isnan().all()
        assert y[0].isfinite().all() and y[1, [row for row in range(20) if row != 3]].isfinite().all()

    def test_results_repeat(self):
        generator = torch.Generator().manual_seed(0)
        net = as_kernels(make(2, (17, 64, 64, 1), EPS, generator), False, kernel_device(), activation="gelu", eps=EPS)
        x, g = torch.randn(1, 200, 17).to(kernel_device()), torch.randn(2, 200, 1).to(kernel_device())

        def run():
            y, kept = net.forward(x)
            gradients, dx = net.backward(g, kept, x, needs_x=True)
            return [y, dx, gradients.squares, *gradients.values]

        assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.gpu
class TestOnCuda:
    @pytest.mark.parametrize(("shape", "activation", "precision"), LARGE, ids=str)
    def test_large(self, shape, activation, precision):
        compare(*shape, activation, precision, inner=False, two=True, inputs=2)
        compare(*shape, activation, precision, inner=True, two=False, inputs=1, fewer=100)
