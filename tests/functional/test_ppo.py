"""The clipped surrogate and the normalised advantage, against tables and TorchRL's formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.losses.ppo import clipped_surrogate, normalized_advantage

LOW, HIGH = math.log(0.8), math.log(1.2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "clipped"),
    [
        (1.0, 2.0, 2.0, False),
        (1.1, 2.0, 2.2, False),
        (1.5, 2.0, 2.4, True),  # no gain from going further
        (1.5, -2.0, -3.0, True),  # the loss from having gone too far counts in full
        (0.5, 2.0, 1.0, True),
        (0.5, -2.0, -1.6, True),
        (1.5, 0.0, 0.0, True),
    ],
)
def test_table(ratio, advantage, gain, clipped, device):
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, device=device)
    got, was_clipped = clipped_surrogate(log_ratio, torch.tensor([advantage], device=device).double(), LOW, HIGH)
    assert got.item() == pytest.approx(gain, abs=1e-12)
    assert was_clipped.item() is clipped


def test_gradient_vanishes_only_where_the_clip_binds():
    log_ratio = torch.tensor([0.05, 0.5, 0.5, -0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    clipped_surrogate(log_ratio, advantage, LOW, HIGH)[0].sum().backward()
    expected = torch.where(torch.tensor([True, False, True, True, False]), log_ratio.detach().exp() * advantage, 0.0)
    torch.testing.assert_close(log_ratio.grad, expected)


def test_bounds_may_be_tensors():
    gain, _ = clipped_surrogate(torch.ones(3), torch.ones(3), torch.tensor(LOW), torch.tensor(HIGH))
    torch.testing.assert_close(gain, torch.full((3,), 1.2))


class TestNormalizedAdvantage:
    def test_hand_computed(self):
        # mean 3, unbiased std of 1, 2, 3, 4, 5 is sqrt(2.5)
        got = normalized_advantage(torch.arange(1.0, 6.0))
        torch.testing.assert_close(got, torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]) / math.sqrt(2.5))

    @pytest.mark.parametrize("value", [0.0, 3.0, -1e6])
    @pytest.mark.parametrize("shape", [(1,), (1, 1), (5,), (4, 1)])
    def test_constants_and_one_element_give_zero(self, value, shape, device):
        got = normalized_advantage(torch.full(shape, value, device=device))
        assert got.shape == shape
        assert (got == 0).all()

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=40))
    def test_shift_and_positive_scale_change_nothing(self, values):
        advantage = torch.tensor(values, dtype=torch.float64)
        if advantage.std() < 0.01:
            return
        got = normalized_advantage(advantage)
        assert abs(got.mean()) < 1e-9
        assert got.std().item() == pytest.approx(1.0)
        torch.testing.assert_close(normalized_advantage(3 * advantage + 7), got, rtol=1e-6, atol=1e-8)
