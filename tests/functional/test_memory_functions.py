"""Cells and scans: hand-computed values, torch's modules on each episode alone, gradients, and what a compiler sees."""

import math

import pytest
import torch
from torch import nn

from torchrl_perf.functional.memory.gru import gru_cell, gru_sequence, gru_step
from torchrl_perf.functional.memory.linear import (
    lru_sequence,
    lru_step,
    min_gru_candidate,
    min_gru_sequence,
    min_gru_step,
    rotations,
    scan,
)
from torchrl_perf.functional.memory.lstm import lstm_cell, lstm_sequence, lstm_step

N, T, H = 3, 7, 4
FLOAT64 = torch.float64


def numbers(*shape, seed=0, dtype=FLOAT64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def flags(share=0.3, shape=(N, T), seed=5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def stepped(step, inputs, states, begins):
    """The sequence as a loop over steps, each after a reset of the rows that begin."""
    found = []
    for t in range(inputs.shape[1]):
        states = tuple(torch.where(begins[:, t, None], 0.0, state) for state in states)
        states = step(inputs[:, t], *states)
        found.append(states)
    return tuple(torch.stack(parts, 1) for parts in zip(*found, strict=True))


def cells():
    """Name, a step and a sequence that take inputs and states (and flags), inputs and states."""
    gru = numbers(3 * H, H, seed=1), numbers(3 * H, seed=2)
    yield (
        "gru",
        lambda x, h: (gru_step(x, h, *gru),),
        lambda x, b, h: (gru_sequence(x, h, b, *gru),),
        3 * H,
        (H,),
        gru,
    )
    lstm = numbers(4 * H, H, seed=3), numbers(4 * H, seed=4)
    yield (
        "lstm",
        lambda x, h, c: lstm_step(x, h, c, *lstm),
        lambda x, b, h, c: lstm_sequence(x, h, c, b, *lstm),
        4 * H,
        (H, H),
        lstm,
    )
    bare = (numbers(4 * H, H, seed=3),)
    yield (
        "lstm without biases",
        lambda x, h, c: lstm_step(x, h, c, *bare),
        lambda x, b, h, c: lstm_sequence(x, h, c, b, *bare),
        4 * H,
        (H, H),
        bare,
    )
    yield "minGRU", lambda x, h: (min_gru_step(x, h),), lambda x, b, h: (min_gru_sequence(x, h, b),), 2 * H, (H,), ()
    ring = (torch.rand(H, dtype=FLOAT64) * 0.5 + 0.4).requires_grad_(), numbers(H, seed=6)
    yield (
        "LRU",
        lambda x, s: (lru_step(*x.chunk(2, -1), s, *ring),),
        lambda x, b, s: (lru_sequence(*x.chunk(2, -1), s, b, *ring),),
        2 * H,
        (2 * H,),
        ring,
    )


CELLS = list(cells())
NAMES = [cell[0] for cell in CELLS]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("cell", CELLS, ids=NAMES)
def test_a_sequence_is_its_steps_with_equal_gradients(cell, share):
    _, step, sequence, width, sizes, parameters = cell
    x, states, begins = numbers(N, T, width), [numbers(N, size, seed=7) for size in sizes], flags(share)
    found, expected = sequence(x, begins, *states), stepped(step, x, states, begins)
    leaves = [x, *states, *parameters]
    weights = [torch.randn_like(part) for part in expected]
    sums = [sum((w * part).sum() for w, part in zip(weights, parts, strict=True)) for parts in (found, expected)]
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(total, leaves) for total in sums]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("cell", CELLS, ids=NAMES)
def test_gradients_are_the_slopes(cell):
    _, _, sequence, width, sizes, parameters = cell
    x, begins = numbers(2, 4, width), flags(0.3, (2, 4))
    states = [numbers(2, size, seed=7) for size in sizes]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert torch.autograd.gradcheck(lambda x, *s: sequence(x, begins, *s), (x, *states))
    del parameters


def penalty_of(outputs, leaves):
    """Squares of first gradients, which a second pass goes through."""
    first = torch.autograd.grad(sum(part.square().sum() for part in outputs), leaves, create_graph=True)
    return sum(gradient.square().sum() for gradient in first)


@pytest.mark.parametrize("cell", CELLS[3:], ids=NAMES[3:])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_second_gradients_of_linear_cells_are_those_of_the_steps(cell, share):
    _, step, sequence, width, sizes, parameters = cell
    x, states, begins = numbers(N, T, width), [numbers(N, size, seed=7) for size in sizes], flags(share)
    leaves = [x, *states, *parameters]
    penalties = penalty_of(sequence(x, begins, *states), leaves), penalty_of(stepped(step, x, states, begins), leaves)
    torch.testing.assert_close(*(torch.autograd.grad(penalty, leaves) for penalty in penalties))


@pytest.mark.parametrize("cell", CELLS[:3], ids=NAMES[:3])
def test_second_gradients_of_gates_are_refused(cell):
    _, _, sequence, width, sizes, parameters = cell
    x, states = numbers(N, T, width), [numbers(N, size, seed=7) for size in sizes]
    penalty = penalty_of(sequence(x, flags(), *states), [x, *states, *parameters])
    with pytest.raises(RuntimeError, match=r"sequence: expected .*received a second derivative.*Remedy: torch.func"):
        penalty.backward()


def test_the_remedy_of_a_refused_second_gradient():
    """The first one by torch.func, within a graph."""
    weight, x, begins, first = numbers(3 * H, H, seed=1), numbers(N, T, 3 * H), flags(), numbers(N, H, seed=7).detach()

    def penalty(of):
        return torch.func.grad(lambda x: of(x).square().sum())(x).square().sum()

    def by_steps(x):
        return stepped(lambda x, h: (gru_step(x, h, weight),), x, (first,), begins)[0]

    sequence = penalty(lambda x: gru_sequence(x, first, begins, weight))
    torch.testing.assert_close(torch.autograd.grad(sequence, weight), torch.autograd.grad(penalty(by_steps), weight))


@pytest.mark.parametrize("cell", CELLS, ids=NAMES)
def test_nothing_of_an_episode_reaches_the_next(cell):
    _, _, sequence, width, sizes, _ = cell
    begins = torch.zeros(N, T, dtype=torch.bool)
    begins[:, 4] = True
    x, states = numbers(N, T, width), [numbers(N, size, seed=7) for size in sizes]
    changed = x.detach().clone()
    changed[:, :4] += 3.0
    before, after = sequence(x, begins, *states), sequence(changed, begins, *[s.detach() + 1.0 for s in states])
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:, 4:], other[:, 4:])
        assert not torch.isclose(one[:, 3], other[:, 3]).all()
    gradients = torch.autograd.grad(sum(part[:, 4:].sum() for part in before), [x, *states])
    assert (gradients[0][:, :4] == 0).all()
    assert all((gradient == 0).all() for gradient in gradients[1:])


@pytest.mark.parametrize("cell", CELLS, ids=NAMES)
def test_a_broken_episode_breaks_no_other(cell):
    _, _, sequence, width, sizes, _ = cell
    begins = torch.zeros(N, T, dtype=torch.bool)
    begins[:, 4] = True
    x = numbers(N, T, width).detach()
    x[0, 1] = math.nan
    found = sequence(x, begins, *[numbers(N, size).detach() for size in sizes])
    assert all(part[0, 1:4].isnan().any() for part in found)
    assert all(part[0, 4:].isfinite().all() and part[1:].isfinite().all() for part in found)


@pytest.mark.parametrize("bias", [True, False])
def test_cells_are_torchs(bias):
    x, h, c = (numbers(N, size, seed=size) for size in (3, H, H + 1))
    torch.manual_seed(0)
    for kind, cell, states in ((nn.GRUCell, gru_cell, [h]), (nn.LSTMCell, lstm_cell, [h, c[:, :H]])):
        own = kind(3, H, bias=bias, dtype=FLOAT64)
        right = own(x, tuple(states) if len(states) == 2 else h)
        found = cell(x, *states, own.weight_ih, own.weight_hh, own.bias_ih, own.bias_hh)
        torch.testing.assert_close(found, right)


def test_gru_by_hand():
    zero = torch.zeros(1, 1, dtype=FLOAT64)
    # r = z = 1/2, n = tanh(1 + 1/2 * 2) with W_hn h = 2 * 1
    weight = torch.tensor([[0.0], [0.0], [2.0]], dtype=FLOAT64)
    inputs = torch.tensor([[0.0, 0.0, 1.0]], dtype=FLOAT64)
    expected = 0.5 * math.tanh(2.0) + 0.5
    assert gru_step(inputs, zero + 1, weight).item() == pytest.approx(expected, abs=1e-15)
    begun = gru_sequence(inputs[:, None], zero + 1, torch.tensor([[True]]), weight)
    assert begun.item() == pytest.approx(0.5 * math.tanh(1.0), abs=1e-15)


def test_lstm_by_hand():
    state = cell = torch.ones(1, 1, dtype=FLOAT64)
    weight = torch.tensor([[0.0], [0.0], [1.0], [0.0]], dtype=FLOAT64)
    inputs = torch.zeros(1, 4, dtype=FLOAT64)
    c = 0.5 + 0.5 * math.tanh(1.0)
    found = lstm_step(inputs, state, cell, weight)
    assert [part.item() for part in found] == pytest.approx([0.5 * math.tanh(c), c], abs=1e-15)


def test_min_gru_by_hand():
    assert min_gru_candidate(torch.tensor([2.0, 0.0, -1.0])).tolist() == pytest.approx([2.5, 0.5, 1 / (1 + math.e)])
    inputs = torch.tensor([[0.0, 1.0]])  # z = 1/2, g(1) = 1.5
    assert min_gru_step(inputs, torch.tensor([[4.0]])).item() == pytest.approx(0.5 * 4 + 0.5 * 1.5)


def test_a_linear_unit_turns_and_decays():
    angle, decay = torch.tensor([math.pi / 2], dtype=FLOAT64), torch.tensor([0.5], dtype=FLOAT64)
    zero = torch.zeros(1, 3, 1, dtype=FLOAT64)
    begun = torch.zeros(1, 3, dtype=torch.bool)
    found = lru_sequence(zero, zero, torch.tensor([[1.0, 0.0]], dtype=FLOAT64), begun, decay, angle)
    expected = torch.tensor([[[0.0, 0.5], [-0.25, 0.0], [0.0, -0.125]]], dtype=FLOAT64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_float32_angles_stay_exact_over_thousands_of_steps():
    angle = torch.tensor([3.1, 0.7, 1e-3])
    found = rotations(angle, 5000)
    exact = torch.arange(1, 5001, dtype=FLOAT64)[:, None] * angle.double()
    torch.testing.assert_close(found.double().cos(), exact.cos(), rtol=0, atol=1e-6)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_scan_equals_its_definition(steps):
    decay, value = torch.rand(N, steps, H, dtype=FLOAT64), numbers(N, steps, H).detach()
    initial, expected = numbers(N, H, seed=3).detach(), []
    carry = initial
    for t in range(steps):
        carry = value[:, t] + decay[:, t] * carry
        expected.append(carry)
    torch.testing.assert_close(scan(decay, value, initial), torch.stack(expected, 1))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_as_close_as_torchs(kind, dtype):
    torch.manual_seed(0)
    exact = kind(2, H, batch_first=True, dtype=FLOAT64)
    rounded = kind(2, H, batch_first=True, dtype=dtype)
    rounded.load_state_dict(exact.state_dict())
    x, begins = numbers(N, T, 2).detach(), torch.zeros(N, T, dtype=torch.bool)
    zero = torch.zeros(N, H, dtype=dtype)
    inputs = nn.functional.linear(x.to(dtype), rounded.weight_ih_l0, rounded.bias_ih_l0)
    recurrence = rounded.weight_hh_l0, rounded.bias_hh_l0
    if kind is nn.GRU:
        found = gru_sequence(inputs, zero, begins, *recurrence)
    else:
        found, _ = lstm_sequence(inputs, zero, zero, begins, *recurrence)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), exact(x)[0], rtol=0, atol=tolerance)


class TestOperators:
    begins = flags()

    def test_gru(self):
        inputs = [numbers(N, T, 3 * H), numbers(N, H), self.begins, numbers(3 * H, H), numbers(3 * H)]
        for input_bias in (numbers(3 * H, seed=2), None):
            torch.library.opcheck(torch.ops.torchrl_perf.gru_sequence, [*inputs, input_bias, True])

    def test_lstm(self):
        states = [numbers(N, H), numbers(N, H, seed=1)]
        inputs = [numbers(N, T, 4 * H), *states, self.begins, numbers(4 * H, H), None]
        for input_bias in (numbers(4 * H, seed=2), None):
            torch.library.opcheck(torch.ops.torchrl_perf.lstm_sequence, [*inputs, input_bias, True])

    def test_cells(self):
        parameters = [numbers(3 * H, 2).detach(), numbers(3 * H, H).detach(), None, None]
        torch.library.opcheck(
            torch.ops.torchrl_perf.gru_cell, [numbers(N, 2).detach(), numbers(N, H).detach(), *parameters]
        )
        parameters = [numbers(4 * H, 2).detach(), numbers(4 * H, H).detach(), None, None]
        states = [numbers(N, H).detach(), numbers(N, H, seed=1).detach()]
        torch.library.opcheck(torch.ops.torchrl_perf.lstm_cell, [numbers(N, 2).detach(), *states, *parameters])

    def test_min_gru(self):
        inputs = [numbers(N, T, 2 * H), numbers(N, H), self.begins]
        torch.library.opcheck(torch.ops.torchrl_perf.min_gru_sequence, inputs)

    def test_scan(self):
        inputs = [torch.rand(N, T, H, dtype=FLOAT64).requires_grad_(), numbers(N, T, H), numbers(N, H)]
        torch.library.opcheck(torch.ops.torchrl_perf.linear_scan, inputs)

    def test_nothing_is_kept_without_a_gradient(self):
        args = [numbers(N, T, 3 * H), numbers(N, H), self.begins, numbers(3 * H, H), None, None]
        with torch.no_grad():
            assert torch.ops.torchrl_perf.gru_sequence(*args, False)[1].numel() == 0
            assert torch.ops.torchrl_perf.gru_sequence(*args, True)[1].shape == (T, N, 4 * H)

    @pytest.mark.parametrize("cell", CELLS[:2] + CELLS[3:], ids=NAMES[:2] + NAMES[3:])
    def test_a_compiler_sees_one_graph(self, cell, fresh_dynamo):
        _, _, sequence, width, sizes, _ = cell
        x, begins, states = numbers(N, T, width), flags(), [numbers(N, size, seed=7) for size in sizes]
        compiled = torch.compile(sequence, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, begins, *states), sequence(x, begins, *states))


WEIGHT, BIAS = numbers(16, 4, seed=3).detach(), numbers(12, seed=4).detach()


def of_gru(inputs, begins):
    return gru_sequence(inputs[..., :12], inputs[:, 0, :4], begins, WEIGHT[:12], BIAS)


def of_lstm(inputs, begins):
    first = inputs[:, 0, :4]
    return torch.cat(lstm_sequence(inputs, first, 2 * first, begins, WEIGHT), -1)


def of_min_gru(inputs, begins):
    return min_gru_sequence(inputs[..., :8], inputs[:, 0, :4], begins)


def of_lru(inputs, begins):
    decay, angle = torch.tensor([0.9, 0.5, 0.99, 0.1], dtype=FLOAT64), torch.arange(4, dtype=FLOAT64)
    return lru_sequence(inputs[..., :4], inputs[..., 4:8], inputs[:, 0, :8], begins, decay, angle)


SEQUENCES = {"gru": of_gru, "lstm": of_lstm, "min_gru": of_min_gru, "lru": of_lru}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of make_dual
@pytest.mark.parametrize("name", SEQUENCES)
def test_transforms_of_torch_differentiate_a_sequence(name):
    def of(inputs):
        return SEQUENCES[name](inputs, begins)

    inputs, begins, along = numbers(N, T, 16), flags(), numbers(N, T, 16, seed=9).detach()
    plain = inputs.detach()
    values = of(inputs)
    weights = numbers(*values.shape, seed=2).detach()
    (expected,) = torch.autograd.grad((values * weights).sum(), inputs)
    torch.testing.assert_close(torch.func.grad(lambda x: (of(x) * weights).sum())(plain), expected)
    torch.testing.assert_close(torch.func.vmap(of)(torch.stack([plain, 2 * plain]))[0], values.detach())
    _, tangent = torch.func.jvp(of, (plain,), (along,))
    torch.testing.assert_close((tangent * weights).sum(), (expected * along).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = of(torch.autograd.forward_ad.make_dual(plain, along))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)
    nothing = of(plain)
    assert torch.equal(nothing, values.detach()), "behind them the operator runs again"
