"""A layer of minGRU in one launch a direction, and a step of it in one, against its definition in float64."""

import copy

import pytest
import torch
from interpreted import kernel_device, tries_kernels
from torch import nn
from torch.nn.functional import linear

from torchrl_perf.functional.memory.linear import min_gru_step
from torchrl_perf.functional.memory.min_gru_layer import min_gru_layer
from torchrl_perf.modules.memory.core import MemoryCore
from torchrl_perf.modules.memory.gates import GRUCore, LSTMCore
from torchrl_perf.modules.memory.linear import MinGRUCore
from torchrl_perf.runtime.precision import float32_products

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # Triton's interpreter, of NumPy
CASES = [
    ((5, 7, 3, 20), True, 0.2),
    ((3, 40, 6, 9), False, 0.0),
    ((7, 19, 64, 64), True, 0.2),
    ((1, 1, 2, 16), True, 1.0),
    ((2, 16, 17, 33), False, 1.0),
]
"""Envs, steps, inputs and units, whether there is a bias, and the share of steps that begin an episode.

Tiles that are not full, one step, several envs a program and several programs.
"""
CLOSE = {"cpu": {"rtol": 1e-5, "atol": 2e-5}, "cuda": {"rtol": 1e-4, "atol": 1e-4}}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def case(shape: tuple[int, int, int, int], bias: bool, share: float = 0.2):
    """Inputs, first state, flags, weight and bias or None, and what they give by definition."""
    num_envs, steps, size, hidden = shape
    x, initial = drawn(num_envs, steps, size, seed=0), drawn(num_envs, hidden, seed=1)
    weight = (drawn(2 * hidden, size, seed=2).detach() / size**0.5).requires_grad_()
    bias_row = drawn(2 * hidden, seed=3) if bias else None
    begins = torch.rand(num_envs, steps, generator=torch.Generator().manual_seed(4)) < share
    state, states = initial, []
    for k in range(steps):
        of_x = linear(x[:, k], weight, bias_row)
        state = min_gru_step(of_x, state.masked_fill(begins[:, k : k + 1], 0))
        states.append(state)
    return (x, initial, begins, weight, bias_row), torch.stack(states, 1)


def moved(args: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """Copies where kernels run, numbers in float32."""
    found = [each if each is None or each.dtype == torch.bool else each.detach().float() for each in args]
    return [None if each is None else each.to(kernel_device()) for each in found]


@tries_kernels
@pytest.mark.parametrize(("shape", "bias", "share"), CASES)
def test_kernels_of_a_layer_are_its_steps(shape: tuple[int, int, int, int], bias: bool, share: float):
    from torchrl_perf.kernels import min_gru_layer as kernels

    args, expected = case(shape, bias, share)
    grad = drawn(*expected.shape, seed=5).detach()
    leaves = [each for each in args if each is not None and each.requires_grad]
    right = torch.autograd.grad(expected, leaves, grad)
    known = moved(args)
    found = kernels.forward(*known, "ieee")
    torch.testing.assert_close(found.cpu().double(), expected.detach(), **CLOSE[kernel_device()])
    (of_grad,) = moved((grad,))
    gradients = kernels.backward(of_grad, found, *known, "ieee")
    for mine, other in zip(gradients, right, strict=False):  # without a bias its gradient is left over
        torch.testing.assert_close(mine.cpu().double(), other, **CLOSE[kernel_device()])


@tries_kernels
def test_a_gradient_that_is_expanded_and_inputs_within_a_wider_row():
    from torchrl_perf.kernels import min_gru_layer as kernels

    args, expected = case((3, 5, 4, 16), True)
    right = torch.autograd.grad(expected.sum(), [args[0], args[3]])
    x, *others = moved(args)
    wide = torch.cat((x, x), -1)[..., :4]
    ones = torch.ones((), device=x.device).expand_as(kernels.forward(x, *others, "ieee"))
    of_x, _, of_weight, _ = kernels.backward(ones, kernels.forward(wide, *others, "ieee"), wide, *others, "ieee")
    torch.testing.assert_close(of_x.cpu().double(), right[0], **CLOSE[kernel_device()])
    torch.testing.assert_close(of_weight.cpu().double(), right[1], **CLOSE[kernel_device()])


@tries_kernels
@pytest.mark.parametrize(("shape", "bias"), [((40, 20, 32), True), ((3, 6, 9), False), ((1, 70, 64), True)])
def test_a_step_in_one_launch_is_a_step(shape: tuple[int, int, int], bias: bool):
    from torchrl_perf.kernels import cell_steps

    num_envs, size, hidden = shape
    (x, initial, _, weight, bias_row), _ = case((num_envs, 1, size, hidden), bias)
    expected = min_gru_step(linear(x[:, 0], weight, bias_row), initial)
    x, initial, weight, bias_row = moved((x[:, 0], initial, weight, bias_row))
    for half, close in ((False, 1e-5), (True, 1e-5 if kernel_device() == "cpu" else 1e-2)):
        found = cell_steps.min_gru(x, initial, weight, bias_row, half=half)
        torch.testing.assert_close(found.cpu().double(), expected.detach(), rtol=0, atol=close)


@tries_kernels
def test_a_gate_that_is_all_but_shut_keeps_the_state():
    """A closed gate of 1e-4 lets the state pass: the hardware's tanh would be wrong by as much as the gate is open."""
    from torchrl_perf.kernels import cell_steps

    x, state = torch.ones(4, 16, device=kernel_device()), torch.ones(4, 16, device=kernel_device())
    weight = torch.zeros(32, 16, device=kernel_device())
    bias = torch.cat((torch.full((16,), -9.2), torch.full((16,), 3.5))).to(kernel_device())
    found = cell_steps.min_gru(x, state, weight, bias) - 1
    torch.testing.assert_close(
        found, torch.full_like(found, 3 * torch.sigmoid(torch.tensor(-9.2)).item()), rtol=2e-3, atol=0
    )


@pytest.mark.parametrize("bias", [True, False])
def test_the_operator_has_the_gradients_of_its_parts(bias: bool):
    """On a CPU the operator is the map and the sequence: with all its own registrations it equals the steps."""
    args, expected = case((3, 6, 5, 4), bias)
    found = torch.ops.torchrl_perf.min_gru_layer(*args)
    torch.testing.assert_close(found, expected)
    grad, leaves = drawn(*expected.shape, seed=5), [each for each in args if each is not None and each.requires_grad]
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad))
    torch.library.opcheck(torch.ops.torchrl_perf.min_gru_layer, args)
    torch.testing.assert_close(min_gru_layer(*args), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_second_gradients_of_the_operator(bias: bool):
    args, expected = case((2, 5, 3, 4), bias)
    leaves = [each for each in args if each is not None and each.requires_grad]
    found = []
    for out in (torch.ops.torchrl_perf.min_gru_layer(*args), expected):
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves))
    torch.testing.assert_close(*found)


def test_the_operator_of_a_step():
    (x, initial, _, weight, bias), _ = case((3, 1, 5, 4), True)
    args = [each.detach() for each in (x[:, 0], initial, weight, bias)]
    expected = min_gru_step(linear(args[0], args[2], args[3]), args[1])
    torch.testing.assert_close(torch.ops.torchrl_perf.min_gru_cell(*args), expected)
    torch.library.opcheck(torch.ops.torchrl_perf.min_gru_cell, args)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 100])
def test_the_core_on_cuda_is_that_of_a_cpu(hidden: int):
    """Sequences, steps and gradients; 100 units are too many for one launch."""
    torch.manual_seed(0)
    core = MinGRUCore(48, hidden, 1, True, 0.0)
    x, state = torch.randn(9, 21, 48), torch.randn(9, 1, hidden)
    begins, grad = torch.rand(9, 21) < 0.1, torch.randn(9, 21, hidden)
    found = {}
    for device in ("cpu", "cuda"):
        core.to(device)
        with float32_products(False):
            args = x.to(device), (state.to(device),), begins.to(device)
            out = core.sequence(*args)[0]
            of_all = torch.autograd.grad(out, list(core.parameters()), grad.to(device))
            with torch.no_grad():
                step = core.step(x[:, 0].to(device), (state.to(device),))[0]
        found[device] = [each.detach().cpu() for each in (out, *of_all, step)]
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [GRUCore, LSTMCore, MinGRUCore])
def test_parameters_that_are_parts_of_larger_tensors(kind: type[MemoryCore]):
    """Each other number of a bias, columns of a weight: steps, sequences and gradients are those of dense ones."""
    torch.manual_seed(0)
    core = kind(16, 32, 1, True, 0.0, device="cuda")
    parts = copy.deepcopy(core)
    for module in parts.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            larger = torch.stack((value.detach(), torch.full_like(value, 7.0)), -1)
            setattr(module, name, nn.Parameter(larger[..., 0]))
            assert not getattr(module, name).is_contiguous()
    x, begins = torch.randn(5, 9, 16, device="cuda"), torch.rand(5, 9, device="cuda") < 0.2
    states = tuple(torch.randn(5, 1, size, device="cuda") for size in core.state_sizes)
    found = []
    for each in (core, parts):
        out = each.sequence(x, states, begins)[0]
        gradients = torch.autograd.grad(out.square().sum(), list(each.parameters()))
        with torch.no_grad():
            found.append([out.detach(), *gradients, each.step(x[:, 0], states)[0]])
    torch.testing.assert_close(*found)
