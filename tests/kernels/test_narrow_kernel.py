"""A linear layer of few inputs with its activation: kernels, operator and encoder against the layers."""

import pytest
import torch
from interpreted import kernel_device, tries_kernels
from torch import nn

from torchrl_perf.functional.narrow import FROM_VALUE, narrow_layer, runs_as_narrow
from torchrl_perf.modules.memory.encoder import NarrowEncoder
from torchrl_perf.runtime.precision import float32_products

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # Triton's interpreter, of NumPy
LAYERS = {"tanh": nn.Tanh(), "relu": nn.ReLU(), "elu": nn.ELU(), "leaky_relu": nn.LeakyReLU()}
SHAPES = [(70, 2, 64), (1, 16, 9), (33, 5, 128)]
"""Rows, inputs and units: tiles that are not full, one row, and sizes that are no powers of two."""


def case(rows: int, size: int, hidden: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    drawn = [
        torch.randn(shape, dtype=dtype, generator=generator) for shape in ((rows, size), (hidden, size), (hidden,))
    ]
    return [drawn[0], *(each.requires_grad_() for each in drawn[1:])]


def layers(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    return LAYERS[activation](nn.functional.linear(x, weight, bias))


@tries_kernels
@pytest.mark.parametrize("activation", FROM_VALUE)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_the_layers(shape: tuple[int, int, int], activation: str):
    from torchrl_perf.kernels import narrow as kernels

    args = case(*shape)
    expected = layers(*args, activation)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    right = torch.autograd.grad(expected, args[1:], grad)
    x, weight, bias, of = (each.detach().float().to(kernel_device()) for each in (*args, grad))
    close = {"rtol": 1e-5, "atol": 2e-5}
    wide = torch.stack((x, x + 1), -1)[..., 0]  # columns that do not lie side by side
    found = kernels.forward(wide, weight, bias, activation)
    torch.testing.assert_close(found.cpu().double(), expected.detach(), **close)
    for rows in (of, torch.cat((of, of), -1)[:, : of.shape[1]]):
        gradients = kernels.backward(rows, found, wide, activation, "ieee")
        torch.testing.assert_close([each.cpu().double() for each in gradients], list(right), **close)


@pytest.mark.parametrize("activation", FROM_VALUE)
def test_the_operator_has_the_gradients_of_the_layers(activation: str):
    args = case(6, 3, 5)
    found, expected = narrow_layer(*args, activation), layers(*args, activation)
    torch.testing.assert_close(found, expected)
    both = []
    for out in (found, expected):
        plain = torch.autograd.grad(out.square().sum(), args[1:], retain_graph=True)
        first = torch.autograd.grad(out.square().sum(), args[1:], create_graph=True)
        both.append([*plain, *first, *torch.autograd.grad(sum(each.square().sum() for each in first), args[1:])])
    torch.testing.assert_close(*both)
    torch.library.opcheck(torch.ops.torchrl_perf.narrow_layer, (*args, activation))


def test_what_the_kernels_do_not_take():
    x, weight, bias = case(6, 3, 5, torch.float32)
    assert not runs_as_narrow(x, weight, bias, "tanh")  # on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [*LAYERS.values(), nn.SiLU()])
@pytest.mark.parametrize("shape", [(3, 4, 2), (5, 16), (0, 2), (4, 40)])
def test_an_encoder_is_its_layers(shape: tuple[int, ...], activation: nn.Module):
    torch.manual_seed(0)
    encoder = NarrowEncoder(nn.Linear(shape[-1], 48), activation).to("cuda")
    x, found = torch.randn(shape, device="cuda"), []
    with float32_products(False):
        for fuses in (True, False):
            encoder.fuses = fuses
            out = encoder(x)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(encoder.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
def test_hooks_frozen_parameters_and_gradients_of_inputs():
    torch.manual_seed(0)
    encoder, x = NarrowEncoder(nn.Linear(2, 8), nn.Tanh()).to("cuda"), torch.randn(6, 2, device="cuda")
    calls = []
    handle = encoder[0].register_forward_hook(lambda *_: calls.append(1))
    encoder(x)
    assert calls
    handle.remove()
    encoder[0].weight.requires_grad_(False)
    (of_bias,) = torch.autograd.grad(encoder(x).sum(), [encoder[0].bias])
    torch.testing.assert_close(of_bias, (1 - encoder(x).square()).sum(0))
    assert torch.autograd.grad(encoder(x.requires_grad_()).sum(), [x])[0].abs().sum() > 0
    encoder[0] = nn.Linear(2, 8, bias=False, device="cuda")
    torch.testing.assert_close(encoder(x), torch.tanh(x @ encoder[0].weight.t()), rtol=1e-3, atol=1e-3)
