"""Closed-form schedules: hand-computed values, ends, cost, tensors as parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.schedules import adaptive, elapsed, exponential, linear

SCHEDULES = [linear, exponential]


def at(step):
    return torch.tensor(step)


def test_linear_epsilon_of_ten_frames():
    assert float(linear(at(7), 1.0, 0.1, 10)) == pytest.approx(0.37)
    assert float(linear(at(100), 1.0, 0.1, 10)) == pytest.approx(0.1, rel=1e-7)


def test_exponential_by_hand():
    assert float(exponential(at(5), 1.0, 0.01, 10)) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("start", "end"), [(1.0, 0.1), (0.1, 0.3), (0.7, 0.7)])
def test_exact_at_both_ends(schedule, start, end, device):
    steps = torch.tensor([0, 10, 11, 2**40], device=device)
    values = schedule(steps, start, end, 10)
    expected = torch.tensor([start, end, end, end], device=device)
    assert torch.equal(values, expected)
    assert values.dtype == torch.float32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_length_is_the_end_at_once(schedule):
    assert float(schedule(at(0), 1.0, 0.25, 0)) == 0.25
    assert float(schedule(at(0), 1.0, 0.25, torch.tensor(0))) == 0.25


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(steps=st.integers(1, 10**9), data=st.data())
@settings(max_examples=25, deadline=None)
def test_against_the_formula_in_double_precision(schedule, steps, data):
    step = data.draw(st.integers(0, 2 * steps))
    start, end = data.draw(st.floats(0.01, 1)), data.draw(st.floats(0.01, 1))
    share = min(step / steps, 1.0)
    expected = {
        "linear": start + (end - start) * share,
        "exponential": start * (end / start) ** share,
    }[schedule.__name__]
    assert float(schedule(at(step), start, end, steps)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_changed_tensors_are_honoured(schedule, variant):
    step, steps = torch.tensor(0, device=variant.device), torch.tensor(8, device=variant.device)
    start, end = torch.tensor(1.0, device=variant.device), torch.tensor(0.5, device=variant.device)

    def advance():
        step.add_(1)
        return schedule(step, start, end, steps)

    run = variant(advance)
    for count in range(1, 6):
        if count == 3:
            end.fill_(0.25)
            steps.fill_(4)
        expected = schedule(torch.tensor(count), float(start), float(end), int(steps))
        assert float(run()) == pytest.approx(float(expected), rel=1e-6)


def test_elapsed_keeps_the_shape():
    share = elapsed(torch.tensor([[0, 1], [2, 9]]), 4)
    assert share.tolist() == [[0.0, 0.25], [0.5, 1.0]]


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (0.021, 1e-3 / 1.5),
        (0.02, 1e-3),  # at twice and at half nothing changes
        (0.01, 1e-3),
        (0.005, 1e-3),
        (0.004, 1.5e-3),
        (0.0, 1e-3),
        (-1.0, 1e-3),
        (float("nan"), 1e-3),
        (float("inf"), 1e-3 / 1.5),
    ],
)
def test_the_rate_follows_the_divergence(divergence, expected):
    rate = adaptive(torch.tensor(1e-3), torch.tensor(divergence), 0.01, 1e-5, 1e-2)
    torch.testing.assert_close(rate, torch.tensor(expected))


def test_the_rate_stays_within_its_bounds():
    far, near = torch.tensor(1.0), torch.tensor(1e-6)
    low, high = torch.tensor(1.2e-5), torch.tensor(9e-3)
    assert adaptive(low, far, 0.01, 1e-5, 1e-2) == torch.tensor(1e-5)
    assert adaptive(high, near, 0.01, 1e-5, 1e-2) == torch.tensor(1e-2)
