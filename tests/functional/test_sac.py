"""The SAC losses by hand, and Polyak averaging."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional.losses.sac import critic_rows, soft_target, weighted_mean
from torchrl_perf.functional.polyak import polyak_update_

ALPHA = torch.tensor(0.5)


class TestTarget:
    def test_by_hand(self):
        """min(3, 5) - .5 * 2 = 2; min(4, 1) - .5 * -4 = 3."""
        value, log_prob = torch.tensor([[3.0, 5.0], [4.0, 1.0]]), torch.tensor([2.0, -4.0])
        reward, terminated = torch.tensor([1.0, 10.0]), torch.tensor([False, True])
        got = soft_target(reward, terminated, value, log_prob, ALPHA, 0.9)
        torch.testing.assert_close(got, torch.tensor([1 + 0.9 * 2, 10.0]))
        got = soft_target(reward, ~terminated, value, log_prob, ALPHA, torch.tensor([0.9, 0.81]))
        torch.testing.assert_close(got, torch.tensor([1.0, 10 + 0.81 * 3]))

    def test_nothing_of_a_terminal_state_is_used(self):
        """The networks' values of a terminal observation, even NaN, do not reach the target."""
        nan = torch.full((1, 2), torch.nan)
        got = soft_target(torch.tensor([3.0]), torch.tensor([True]), nan, nan[:, 0], ALPHA, 0.9)
        assert got.item() == 3.0

    def test_no_gradient(self):
        value = torch.ones(2, 2, requires_grad=True)
        target = soft_target(torch.ones(2), torch.zeros(2).bool(), value, torch.ones(2), ALPHA, 0.9)
        assert not target.requires_grad


class TestCriticRows:
    def test_by_hand(self):
        """Errors (1, -2), (0, 3): squares 5 and 9."""
        value, target = torch.tensor([[2.0, -1.0], [4.0, 7.0]]), torch.tensor([1.0, 4.0])
        loss, priority = critic_rows(value, target)
        assert loss.tolist() == [5.0, 9.0]
        assert priority.tolist() == [2.0, 3.0]
        loss, _ = critic_rows(value, target, loss_function="smooth_l1")
        assert loss.tolist() == [0.5 + 1.5, 0 + 2.5]

    def test_one_row_one_critic(self):
        loss, priority = critic_rows(torch.tensor([[2.0]]), torch.tensor([5.0]))
        assert (loss.tolist(), priority.tolist()) == ([9.0], [3.0])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0.01, 1)), min_size=1, max_size=8))
def test_weighted_mean_is_a_loop(rows):
    values, weights = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    expected = sum(v * w for v, w in rows) / sum(w for _, w in rows)
    assert weighted_mean(values, weights).item() == pytest.approx(expected, abs=1e-9)
    assert weighted_mean(values, None).item() == pytest.approx(sum(v for v, _ in rows) / len(rows), abs=1e-9)


class TestPolyak:
    @pytest.mark.parametrize("tau", [0.25, torch.tensor(0.25)])
    def test_by_hand(self, device, tau):
        tau = tau.to(device) if isinstance(tau, torch.Tensor) else tau
        targets = [torch.zeros(2, device=device), torch.full((1, 2), 4.0, device=device)]
        sources = [torch.full((2,), 4.0, device=device, requires_grad=True), torch.zeros(1, 2, device=device)]
        polyak_update_(targets, sources, tau)
        assert [t.flatten().tolist() for t in targets] == [[1.0, 1.0], [3.0, 3.0]]
        assert not targets[0].requires_grad

    def test_one_copies_and_zero_keeps(self):
        target, source = [torch.randn(3)], [torch.randn(3)]
        before = target[0].clone()
        polyak_update_(target, source, 0.0)
        assert torch.equal(target[0], before)
        polyak_update_(target, source, 1.0)
        assert torch.equal(target[0], source[0])

    def test_lists_of_one_length(self):
        with pytest.raises(ValueError, match="expected 1 tensors, one for each target, received 2"):
            polyak_update_([torch.zeros(1)], [torch.zeros(1)] * 2, 0.5)
