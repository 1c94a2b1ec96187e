"""Sequences of GRU and LSTM in one launch, against torch's modules on each episode alone."""

import importlib
from collections.abc import Iterable
from types import ModuleType

import pytest
import torch
from interpreted import gluon_kernels, kernel_device, tries_kernels
from torch import nn

from torchrl_perf.functional.memory.gru import gru_cell, gru_sequence
from torchrl_perf.functional.memory.linear import min_gru_step
from torchrl_perf.functional.memory.lstm import lstm_cell, lstm_sequence
from torchrl_perf.kernels import cell_kernels
from torchrl_perf.runtime import capture
from torchrl_perf.runtime.precision import float32_products

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array")  # Triton's interpreter, of NumPy
SHAPES = [(5, 7, 16), (37, 3, 20), (3, 1, 32), (20, 4, 9)]
"""Envs, steps and hidden units: blocks that are not full, one step, widths that are no power of two."""
CLOSE = {"cpu": {"rtol": 0, "atol": 1e-5}, "cuda": {"rtol": 0, "atol": 5e-3}}
"""The interpreter computes in float32; products on CUDA have ten bits."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def case(kind: type[nn.RNNBase], shape: tuple[int, int, int], bias: bool = True, share: float = 0.3):
    """A layer in float64, its inputs, first states and flags; episodes begin anywhere."""
    num_envs, steps, hidden = shape
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = kind(6, hidden, bias=bias, batch_first=True, dtype=torch.float64)
    x = torch.randn(num_envs, steps, 6, dtype=torch.float64, generator=seeded()).requires_grad_()
    states = [
        torch.randn(num_envs, hidden, dtype=torch.float64, generator=seeded(i + 1)).requires_grad_()
        for i in range(2 if kind is nn.LSTM else 1)
    ]
    begins = torch.rand(num_envs, steps, generator=seeded(9)) < share
    return layer, x, states, begins


def split(layer: nn.RNNBase, x: torch.Tensor, states: list[torch.Tensor], begins: torch.Tensor) -> torch.Tensor:
    """torch's module on each episode of each env, ``[N, T, H]``."""
    found = []
    for row in range(len(x)):
        starts = [0, *(t for t in range(1, x.shape[1]) if begins[row, t])]
        parts = []
        for start, end in zip(starts, [*starts[1:], x.shape[1]], strict=True):
            fresh = start > 0 or bool(begins[row, 0])
            first = [state[row : row + 1, None] * (0.0 if fresh else 1.0) for state in states]
            parts.append(layer(x[row : row + 1, start:end], tuple(first) if len(first) == 2 else first[0])[0])
        found.append(torch.cat(parts, 1))
    return torch.cat(found)


def expected_of(kind: type[nn.RNNBase], shape: tuple[int, int, int], bias: bool = True):
    """Outputs, and gradients of inputs, states, recurrent weights and biases, and weights of the sum they are of."""
    layer, x, states, begins = case(kind, shape, bias)
    out = split(layer, x, states, begins)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=seeded(4))
    leaves = [x, *states, layer.weight_hh_l0, *([layer.bias_hh_l0, layer.bias_ih_l0] if bias else [])]
    return (layer, x, states, begins), out, weights, torch.autograd.grad((out * weights).sum(), leaves)


def inputs_of(layer: nn.RNNBase, x: torch.Tensor, device: str):
    """``W_i x + b_i`` and the recurrent parameters, float32."""
    inputs = nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0 if layer.bias else None)
    parameters = [layer.weight_hh_l0, layer.bias_hh_l0 if layer.bias else None]
    return [None if part is None else part.detach().float().to(device) for part in (inputs, *parameters)]


def kernels_of(name: str) -> ModuleType:
    """A module of kernels: those with a launch a step are plain Triton."""
    return importlib.import_module(f"torchrl_perf.kernels.{name}") if "steps" in name else gluon_kernels(name)


@tries_kernels
@pytest.mark.parametrize("kernels", ["gru", "gru_steps"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gru_kernels_are_torchs_module(shape: tuple[int, int, int], bias: bool, kernels: str):
    gru = kernels_of(kernels)
    (layer, x, states, begins), out, weights, (of_x, *right) = expected_of(nn.GRU, shape, bias)
    device = kernel_device()
    inputs, weight, bias_hh = inputs_of(layer, x, device)
    initial, begins = states[0].detach().float().to(device), begins.to(device)
    found, kept = gru.forward(inputs, initial, begins, weight, bias_hh, True)
    torch.testing.assert_close(found.cpu().double(), out, **CLOSE[device])
    bare, none = gru.forward(inputs, initial, begins, weight, bias_hh, False)
    assert torch.equal(bare, found)
    assert none.numel() == 0
    of_inputs, *own = gru.backward(weights.float().to(device), found, kept, initial, begins, weight)
    own = [of_inputs.double() @ layer.weight_ih_l0.to(device), *own]
    assert_gradients(own, [of_x, *right], device)


@tries_kernels
@pytest.mark.parametrize("kernels", ["lstm", "lstm_steps"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_lstm_kernels_are_torchs_module(shape: tuple[int, int, int], bias: bool, kernels: str):
    lstm = kernels_of(kernels)
    (layer, x, states, begins), out, weights, (of_x, *right) = expected_of(nn.LSTM, shape, bias)
    device = kernel_device()
    inputs, weight, bias_hh = inputs_of(layer, x, device)
    initial, begins = [state.detach().float().to(device) for state in states], begins.to(device)
    found, cells, kept = lstm.forward(inputs, *initial, begins, weight, bias_hh, True)
    torch.testing.assert_close(found.cpu().double(), out, **CLOSE[device])
    grad, args = weights.float().to(device), (found, cells, kept, *initial, begins, weight)
    of_inputs, *own = lstm.backward(grad, None, args)
    zeros = lstm.backward(grad, torch.zeros_like(grad), args)
    assert all(map(torch.equal, (of_inputs, *own), zeros))
    own = [of_inputs.double() @ layer.weight_ih_l0.to(device), *own]
    assert_gradients(own, [of_x, *right], device)


@tries_kernels
@pytest.mark.parametrize("kernels", ["lstm", "lstm_steps"])
def test_gradients_of_cells_are_those_of_the_loop(kernels: str):
    lstm, device, (num_envs, steps, hidden) = kernels_of(kernels), kernel_device(), (5, 6, 16)
    inputs = torch.randn(num_envs, steps, 4 * hidden, generator=seeded())
    weight = torch.eye(hidden).repeat(4, 1)
    state, cell = torch.randn(2, num_envs, hidden, generator=seeded(1))
    begins = torch.rand(num_envs, steps, generator=seeded(2)) < 0.3
    grads = torch.randn(2, num_envs, steps, hidden, generator=seeded(3))
    args = [inputs, state, cell, begins, weight]
    leaves = [inputs.requires_grad_(), state.requires_grad_(), cell.requires_grad_()]
    right = torch.autograd.grad(lstm_sequence(*args), leaves, tuple(grads))
    with torch.no_grad():
        inputs, *args = [part.detach().to(device) for part in args]
        out = lstm.forward(inputs, *args, None, True)
        assert_gradients(lstm.backward(*grads.to(device), (*out, *args))[:3], right, device)


def assert_gradients(found: Iterable[torch.Tensor], right: Iterable[torch.Tensor], device: str):
    """Equal in their norm; a cell without biases has two gradients too many."""
    for gradient, other in zip(found, right, strict=False):
        difference = (gradient.cpu().double() - other).norm() / other.norm()
        assert difference < (1e-5 if device == "cpu" else 5e-3)


STEP_SHAPES = [(5, 7, 20), (40, 70, 33), (1, 16, 16)]
"""Rows, inputs and hidden units."""


def step_case(kind: type[nn.RNNCellBase], shape: tuple[int, int, int], bias: bool, device: str):
    """A cell, its input, states (of which h is a column of a wider row) and parameters."""
    rows, size, hidden = shape
    with torch.random.fork_rng():
        torch.manual_seed(2)
        cell = kind(size, hidden, bias=bias, device=device)
    x, states = torch.randn(rows, size, generator=seeded()), torch.randn(rows, 2, hidden, generator=seeded(1))
    parameters = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    return cell, x.to(device), states.to(device).unbind(1), parameters


@tries_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", STEP_SHAPES)
@torch.no_grad()
def test_step_kernels_are_torchs_cells(shape: tuple[int, int, int], bias: bool):
    from torchrl_perf.kernels import cell_steps

    cell, x, (h, c), parameters = step_case(nn.GRUCell, shape, bias, kernel_device())
    with float32_products(False):
        found, right = cell_steps.gru(x, h, *parameters, half=False), cell(x, h)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
    cell, x, (h, c), parameters = step_case(nn.LSTMCell, shape, bias, kernel_device())
    with float32_products(False):
        found, right = cell_steps.lstm(x, h, c, *parameters, half=False), cell(x, (h, c))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-7, 1e6])
@torch.no_grad()
def test_steps_take_inputs_that_float16_does_not_hold(scale: float):
    with float32_products(True):
        for kind, step in ((nn.GRUCell, gru_cell), (nn.LSTMCell, lstm_cell)):
            cell, x, states, parameters = step_case(kind, (40, 20, 32), False, "cuda")
            states = [state * 0.0 for state in states][: 1 if kind is nn.GRUCell else 2]
            found, wide = step(x * scale, *states, *parameters), cell.double()
            of_wide = [state.double() for state in states]
            right = wide(x.double() * scale, of_wide[0] if kind is nn.GRUCell else tuple(of_wide))
            pairs = [(found, right)] if kind is nn.GRUCell else zip(found, right, strict=True)
            for mine, theirs in pairs:
                torch.testing.assert_close(mine / min(scale, 1.0), theirs.float() / min(scale, 1.0), rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 128, 128), (3, 500, 300)])
@torch.no_grad()
def test_steps_on_cuda_are_torchs_cells(shape: tuple[int, int, int]):
    with float32_products(True):
        cell, x, (h, c), parameters = step_case(nn.GRUCell, shape, True, "cuda")
        found = gru_cell(x, h, *parameters)
        torch.testing.assert_close(found, cell.double()(x.double(), h.double()).float(), **CLOSE["cuda"])
        cell, x, (h, c), parameters = step_case(nn.LSTMCell, shape, True, "cuda")
        found = lstm_cell(x, h, c, *parameters)
        right = cell.double()(x.double(), (h.double(), c.double()))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other.float(), **CLOSE["cuda"])


def sequence_on_cuda(kind: type[nn.RNNBase], shape: tuple[int, int, int]):
    """What the public function makes of a case: output, and gradients as :func:`expected_of` orders them."""
    (layer, x, states, begins), out, weights, gradients = expected_of(kind, shape)
    layer = layer.float().cuda()
    x, *states = [part.detach().float().cuda().requires_grad_() for part in (x, *states)]
    inputs = nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)
    recurrence = layer.weight_hh_l0, layer.bias_hh_l0
    if kind is nn.GRU:
        found = gru_sequence(inputs, *states, begins.cuda(), *recurrence)
    else:
        found, _ = lstm_sequence(inputs, *states, begins.cuda(), *recurrence)
    assert cell_kernels(kind.__name__.lower(), inputs, recurrence[0]) is not None
    own = torch.autograd.grad((found * weights.float().cuda()).sum(), [x, *states, *recurrence])
    return found, own, out, gradients


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("shape", [(33, 40, 128), (300, 9, 64), (2, 3, 100), (3000, 2, 32), (70, 20, 256), (9, 5, 300)])
def test_sequences_on_cuda_are_torchs_module(kind: type[nn.RNNBase], shape: tuple[int, int, int]):
    with float32_products(True):
        found, own, out, gradients = sequence_on_cuda(kind, shape)
    torch.testing.assert_close(found.cpu().double(), out, **CLOSE["cuda"])
    assert_gradients(own, gradients, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_gradients_of_any_size_are_as_exact(scale: float):
    """Float16 operands are scaled: gradients far below and above its range are those of 1, times as much."""
    with float32_products(True):
        weight = torch.randn(96, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) / 6
        inputs = torch.randn(50, 12, 96, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        args = inputs.requires_grad_(), inputs.new_zeros(50, 32), torch.zeros(50, 12, dtype=torch.bool, device="cuda")
        gradients = [torch.autograd.grad(gru_sequence(*args, weight).sum() * by, inputs)[0] / by for by in (1.0, scale)]
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [64, 160])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_results_repeat_and_are_those_of_a_graph(kind: type[nn.RNNBase], hidden: int):
    layer, x, states, begins = case(kind, (65, 20, hidden))
    inputs, weight, bias = inputs_of(layer, x, "cuda")
    states = [state.detach().float().cuda() for state in states]
    leaves = [part.requires_grad_() for part in (inputs, weight, bias)]
    sequence, begins = gru_sequence if kind is nn.GRU else lstm_sequence, begins.cuda()

    def gradients() -> list[torch.Tensor]:
        out = sequence(inputs, *states, begins, weight, bias)
        return list(torch.autograd.grad((out if kind is nn.GRU else out[0]).square().sum(), leaves))

    with float32_products(True):
        first, second = gradients(), gradients()
        assert all(map(torch.equal, first, second))
        graph = capture(gradients, compile=False, device="cuda", audit=False)
        assert all(map(torch.equal, first, graph()))


@pytest.mark.gpu
def test_what_serves_a_sequence():
    def kernels(hidden: int, dtype: torch.dtype = torch.float32):
        weight = torch.empty(3 * hidden, hidden, device="cuda", dtype=dtype)
        found = cell_kernels("gru", torch.empty(2, 3, 3 * hidden, device="cuda", dtype=dtype), weight)
        return found and found.__name__.rpartition(".")[2]

    with float32_products(True):
        assert kernels(128) == "gru"
        assert kernels(129) == "gru_steps"
        assert kernels(64, torch.float64) is None
        assert cell_kernels("gru", torch.empty(0, 3, 48, device="cuda"), torch.empty(48, 16, device="cuda")) is None
    with float32_products(False):
        assert kernels(64) == "gru_steps"


@tries_kernels
def test_what_runs_step_by_step_is_told_once(caplog: pytest.LogCaptureFixture):
    from torchrl_perf.kernels import gates, gru_steps

    gates.tell_once.cache_clear()
    inputs, weight = torch.zeros(2, 3, 60, device=kernel_device()), torch.zeros(60, 20, device=kernel_device())
    for _ in range(2):
        gru_steps.forward(inputs, inputs[:, 0, :20].contiguous(), inputs[..., 0] > 0, weight, None, False)
    assert [record.getMessage()[:22] for record in caplog.records] == ["GRU of 20 hidden units"]


@tries_kernels
@pytest.mark.parametrize("shape", [(5, 7, 20), (3, 40, 33), (2, 1, 64), (1, 16, 16), (4, 33, 70)])
def test_min_gru_kernels_are_its_steps(shape: tuple[int, int, int]):
    from torchrl_perf.kernels import min_gru

    (num_envs, steps, hidden), device = shape, kernel_device()
    inputs = torch.randn(num_envs, steps, 2 * hidden, dtype=torch.float64, generator=seeded()).requires_grad_()
    initial = torch.randn(num_envs, hidden, dtype=torch.float64, generator=seeded(1)).requires_grad_()
    begins = torch.rand(num_envs, steps, generator=seeded(2)) < 0.2
    grad = torch.randn(num_envs, steps, hidden, dtype=torch.float64, generator=seeded(3))
    state, states = initial, []
    for k in range(steps):
        state = min_gru_step(inputs[:, k], state.masked_fill(begins[:, k : k + 1], 0))
        states.append(state)
    out = torch.stack(states, 1)
    right = torch.autograd.grad(out, [inputs, initial], grad)
    args = [inputs.detach().float().to(device), initial.detach().float().to(device), begins.to(device)]
    found = min_gru.forward(*args)
    torch.testing.assert_close(found.cpu().double(), out.detach(), rtol=1e-5, atol=1e-5)
    of_both = min_gru.backward(grad.float().to(device), found, *args)
    for mine, other in zip(of_both, right, strict=True):
        torch.testing.assert_close(mine.cpu().double(), other, rtol=1e-4, atol=1e-5)
