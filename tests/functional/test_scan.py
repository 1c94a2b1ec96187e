"""Linear recurrences: hand-computed values, a float64 loop, cuts, layouts, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional import linear_recurrence, reverse_linear_recurrence
from torchrl_perf.functional.scan import log_scan, scan_in_place


def oracle(decay, value, initial=None, *, reverse):
    """Serial float64 loop over time-first tensors."""
    decay, value = decay.double(), value.double()
    carry = torch.zeros_like(value[0]) if initial is None else initial.double()
    out = torch.empty_like(value)
    for t in reversed(range(len(value))) if reverse else range(len(value)):
        carry = torch.where(decay[t] == 0, value[t], value[t] + decay[t] * carry)
        out[t] = carry
    return out


def run(decay, value, initial=None, *, reverse):
    if reverse:
        return reverse_linear_recurrence(decay, value, time_dim=0)
    return linear_recurrence(decay, value, initial, time_dim=0)


def test_hand_computed(device):
    decay = torch.tensor([0.5, 0.0, 2.0, 0.5], device=device).view(1, 4, 1)
    value = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).view(1, 4, 1)
    assert reverse_linear_recurrence(decay, value).flatten().tolist() == [2.0, 2.0, 11.0, 4.0]
    assert linear_recurrence(decay, value).flatten().tolist() == [1.0, 2.0, 7.0, 7.5]
    initial = torch.tensor([[10.0]], device=device)
    assert linear_recurrence(decay, value, initial).flatten().tolist() == [6.0, 2.0, 7.0, 7.5]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["time-major", "env-major"])
@pytest.mark.parametrize(("n", "t"), [(1, 1), (1, 2), (1, 77), (3, 5), (7, 64), (300, 200), (2500, 3), (70, 1500)])
def test_equals_loop(n, t, layout, reverse, device):
    def signal():
        x = torch.randn(t, n, device=device)
        return x if layout == "time-major" else x.t().contiguous().t()

    decay, value = signal() * 0.7, signal()
    decay = torch.where(signal() < -1.0, 0.0, decay)
    before = value.clone()
    solved = run(decay, value, reverse=reverse)
    torch.testing.assert_close(solved.double(), oracle(decay, value, reverse=reverse), rtol=1e-4, atol=1e-4)
    assert torch.equal(value, before)
    if n > 1 and t > 1:
        assert solved.stride()[:2] == value.stride()[:2]


@pytest.mark.parametrize("reverse", [False, True])
def test_every_method_agrees(reverse):
    t, n = 37, 5
    decay, value = torch.rand(t, n, dtype=torch.float64), torch.randn(t, n, dtype=torch.float64)
    cut = torch.rand(t, n) < 0.1
    expected = oracle(torch.where(cut, 0.0, decay), value, reverse=reverse)
    torch.testing.assert_close(log_scan(decay, cut, value, 0, reverse=reverse), expected)
    torch.testing.assert_close(scan_in_place(decay, cut, value.clone(), 0, reverse=reverse), expected)
    as_env_major = value.t().clone().t()
    torch.testing.assert_close(scan_in_place(decay, cut, as_env_major, 0, reverse=reverse), expected)
    scalar = oracle(torch.where(cut, 0.0, torch.full_like(decay, 0.9)), value, reverse=reverse)
    for number in (0.9, torch.tensor(0.9, dtype=torch.float64)):
        torch.testing.assert_close(scan_in_place(number, cut, value.clone(), 0, reverse=reverse), scalar)
        wide = value.repeat(1, 1000)
        solved = scan_in_place(number, cut.repeat(1, 1000), wide, 0, reverse=reverse)
        torch.testing.assert_close(solved, scalar.repeat(1, 1000))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("t", [8, 300])
def test_nothing_crosses_a_zero_decay(t, bad, reverse, device):
    decay = torch.full((t, 2), 1e-8, device=device)  # its products underflow: the NaN still travels as in a loop
    value = torch.ones(t, 2, device=device)
    decay[t // 2] = 0.0
    value[t // 2 + 1 if reverse else t // 2 - 1, 0] = bad
    solved = run(decay, value, reverse=reverse)
    expected = oracle(decay, value, reverse=reverse).float()
    torch.testing.assert_close(solved, expected, equal_nan=True)
    assert solved[: t // 2 + 1].isfinite().all() if reverse else solved[t // 2 :].isfinite().all()
    value[-1 if reverse else 0, 1] = bad
    decay[t // 2, 1] = 1e-8
    solved = run(decay, value, reverse=reverse)[:, 1]
    assert not solved.isfinite().any() or bad == float("inf")


def test_gradients_match_a_loop():
    decay = (torch.rand(9, 3, dtype=torch.float64) + 0.1).requires_grad_()
    value = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    initial = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d, v: reverse_linear_recurrence(d, v, time_dim=0), (decay, value))
    assert torch.autograd.gradcheck(lambda *x: linear_recurrence(*x, time_dim=0), (decay, value, initial))


def test_gradient_stays_finite_beside_a_nan():
    decay = torch.tensor([[0.5], [0.0], [0.5]], requires_grad=True)
    value = torch.tensor([[1.0], [1.0], [float("nan")]], requires_grad=True)
    reverse_linear_recurrence(decay, value, time_dim=0)[:2].sum().backward()
    assert value.grad.isfinite().all()
    assert decay.grad.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    t=st.integers(1, 40), n=st.integers(1, 6), reverse=st.booleans(), has_initial=st.booleans(), seed=st.integers(0, 99)
)  # fmt: skip
def test_property_equals_loop(t, n, reverse, has_initial, seed):
    generator = torch.Generator().manual_seed(seed)
    decay = torch.randn(t, n, generator=generator, dtype=torch.float64).clamp(-1, 1)
    decay[decay.abs() < 0.2] = 0.0
    value = torch.randn(t, n, generator=generator, dtype=torch.float64)
    initial = torch.randn(n, generator=generator, dtype=torch.float64) if has_initial and not reverse else None
    expected = oracle(decay, value, initial, reverse=reverse)
    torch.testing.assert_close(run(decay, value, initial, reverse=reverse), expected)


def test_half_precision_is_computed_in_float32(device):
    value = torch.ones(1, 4096, 1, dtype=torch.bfloat16, device=device)
    solved = linear_recurrence(torch.ones_like(value), value)
    assert solved.dtype == torch.float32
    assert torch.equal(solved.flatten().cpu(), torch.arange(1.0, 4097.0))


def test_decay_broadcasts_and_time_is_anywhere(device):
    value = torch.randn(2, 3, 4, 5, device=device)
    for dim in range(4):
        first = value.movedim(dim, 0)
        expected = oracle(torch.full_like(first, 0.5), first, reverse=False).movedim(0, dim)
        solved = linear_recurrence(torch.tensor(0.5, device=device), value, time_dim=dim)
        torch.testing.assert_close(solved.double(), expected, rtol=1e-5, atol=1e-5)


def test_compiles_without_a_break(device):
    decay, value = torch.rand(4, 9, 1, device=device), torch.randn(4, 9, 1, device=device)
    for function in (reverse_linear_recurrence, linear_recurrence):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(decay, value), function(decay, value))


def test_errors_name_what_came():
    value = torch.zeros(2, 3, 1)
    with pytest.raises(TypeError, match=r"decay \[2, 3, 1\] int64 cpu"):
        linear_recurrence(torch.ones(2, 3, 1, dtype=torch.long), value)
    with pytest.raises(ValueError, match=r"decay \[5\] float32"):
        linear_recurrence(torch.ones(5), value)
    with pytest.raises(ValueError, match="time_dim"):
        linear_recurrence(value, value, time_dim=3)
    with pytest.raises(ValueError, match=r"initial \[2, 1\]"):
        linear_recurrence(value, value, torch.zeros(2))
    with pytest.raises(ValueError, match="at least one step"):
        linear_recurrence(value[:, :0], value[:, :0])
    with pytest.raises(ValueError, match="one device"):
        linear_recurrence(value.to("meta"), value)
