"""Hazards and durations, segments against a loop, targets and masked means."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional import arrival_value, option_segments, smdp_target, time_hazard
from torchrl_perf.functional.losses.options import OpenOption, masked_mean, masked_standardize, no_option

# name: (least duration, hazard's end, steepness, cap, hard maximum)
OPTIONS = {
    "open": (5, 20, 0.4, 1.0, True),
    "trend": (10, 50, 0.3, 0.15, False),
    "scalp": (5, 15, 0.6, 1.0, True),
    "wait": (5, 30, 0.5, 0.5, True),
    "close": (3, 50, 0.0, 0.02, False),
}


def expected_duration(name, *, hazard_min, capped=True, horizon=2_000):
    """Mean number of executed steps, the question being asked after each step from the least duration on."""
    least, end, steepness, cap, hard = OPTIONS[name]
    steps = torch.arange(1, horizon + 1, dtype=torch.float64)
    rate = time_hazard(
        steps,
        hazard_min=hazard_min,
        hazard_max=end,
        steepness=steepness,
        cap=cap if capped else 1.0,
        hard_max=hard,
    )
    going_on = torch.where(steps < least, 1.0, 1.0 - rate).cumprod(0)
    return 1.0 + float(going_on.sum())


class TestHazard:
    @pytest.mark.parametrize(
        ("name", "mean"), [("open", 7.50), ("trend", 15.67), ("scalp", 7.07), ("wait", 9.06), ("close", 52.0)]
    )
    def test_durations_of_a_hazard_that_begins_at_zero(self, name, mean):
        assert expected_duration(name, hazard_min=0) == pytest.approx(mean, abs=0.005)

    @pytest.mark.parametrize(("name", "mean"), [("open", 9.16), ("trend", 14.43), ("scalp", 9.26), ("wait", 11.10)])
    def test_durations_of_a_hazard_that_begins_at_the_least_duration(self, name, mean):
        least = OPTIONS[name][0]
        assert expected_duration(name, hazard_min=least, capped=False) == pytest.approx(mean, abs=0.005)

    def test_values(self, device):
        steps = torch.tensor([0, 1, 2, 6, 9, 10, 30], device=device)
        rate = time_hazard(steps, hazard_min=2, hazard_max=10, steepness=0.5, cap=0.45)
        sigmoid = [0.8 / (1 + math.exp(-5 * (p - 0.5))) for p in (0.0, 0.5, 7 / 8)]
        assert rate.tolist() == pytest.approx([0, 0, sigmoid[0], sigmoid[1], min(sigmoid[2], 0.45), 1, 1], abs=1e-6)

    def test_a_cap_without_a_hard_maximum_holds_for_ever(self):
        rate = time_hazard(torch.tensor([10, 1000]), hazard_min=0, hazard_max=10, steepness=1, cap=0.15, hard_max=False)
        assert rate.tolist() == pytest.approx([0.15, 0.15])

    def test_parameters_for_each_option(self):
        columns = [torch.tensor(column) for column in zip(*OPTIONS.values(), strict=True)]
        steps = torch.arange(60).view(4, 15, 1)
        options = dict(zip(("hazard_max", "steepness", "cap", "hard_max"), columns[1:], strict=True))
        rate = time_hazard(steps, hazard_min=0.0, **options)
        assert rate.shape == (4, 15, 5)
        for column, (_, end, steepness, cap, hard) in enumerate(OPTIONS.values()):
            alone = time_hazard(
                steps[..., 0], hazard_min=0, hazard_max=end, steepness=steepness, cap=cap, hard_max=hard
            )
            torch.testing.assert_close(rate[..., column], alone)


def segments_by_loop(start, done, reward, gamma):
    """(row, boundary, steps, return, first step) of each option that ends, step by step."""
    found = []
    for row in range(start.shape[0]):
        running = None
        for t in range(start.shape[1]):
            if start[row, t]:
                if running is not None:
                    found.append((row, t, *running))
                running = (0, 0.0, t)
            if running is not None:
                steps, total, first = running
                running = (steps + 1, total + gamma**steps * float(reward[row, t]), first)
                if done[row, t]:
                    found.append((row, t + 1, *running))
                    running = None
    return sorted(found)


def segments_of(start, done, reward, gamma, cuts):
    """The same from the function, in batches that end at the cuts."""
    found, state, begin = [], no_option(reward[:, 0]), 0
    for end in cuts:
        part = slice(begin, end)
        segments, state = option_segments(start[:, part], done[:, part], reward[:, part], gamma, state)
        for row, j in segments.ended.nonzero().tolist():
            entries = (segments.steps, segments.returns, segments.first)
            steps, total, first = (entry[row, j].item() for entry in entries)
            found.append((row, begin + j, steps, total, begin + first))
        begin = end
    return sorted(found)


def assert_same_segments(found, expected, length):
    expected = [entry for entry in expected if entry[1] < length]  # what ends with the last step is told later
    assert [entry[:3] + entry[4:] for entry in found] == [entry[:3] + entry[4:] for entry in expected]
    assert [entry[3] for entry in found] == pytest.approx([entry[3] for entry in expected], abs=1e-9)


class TestSegments:
    def test_by_hand(self, device):
        start = torch.tensor([[1, 0, 0, 1, 1, 0]], device=device).bool()
        done = torch.tensor([[0, 0, 0, 0, 0, 1]], device=device).bool()
        reward = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]], device=device)
        segments, after = option_segments(start, done, reward, 0.5, no_option(reward[:, 0]))
        assert segments.ended.tolist() == [[False, False, False, True, True, False]]
        assert segments.steps[0, 3:5].tolist() == [3, 1]
        assert segments.returns[0, 3:5].tolist() == [1 + 2 / 2 + 4 / 4, 8]
        assert segments.first[0, 3:5].tolist() == [0, 3]
        assert [value.item() for value in after] == [True, 2, 32.0, True]
        # the last one ended with the episode: the next batch tells it, whether or not a new option begins there
        for follows in (True, False):
            begins = torch.tensor([[follows]], device=device)
            segments, following = option_segments(begins, torch.zeros_like(begins), reward[:, :1], 0.5, after)
            assert (segments.ended.item(), segments.steps.item(), segments.returns.item()) == (True, 2, 32.0)
            assert segments.first.item() == -2
            assert following.running.item() is follows

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 2**31 - 1),
        starts=st.sampled_from([0.0, 0.3, 1.0]),
        ends=st.sampled_from([0.0, 0.2, 1.0]),
        gamma=st.sampled_from([0.0, 0.9, 1.0]),
        cuts=st.sets(st.integers(1, 19)),
    )
    def test_any_cuts_against_the_loop(self, seed, starts, ends, gamma, cuts):
        generator = torch.Generator().manual_seed(seed)
        start = torch.rand(3, 20, generator=generator) < starts
        done = torch.rand(3, 20, generator=generator) < ends
        reward = torch.randn(3, 20, generator=generator, dtype=torch.float64)
        expected = segments_by_loop(start, done, reward, gamma)
        assert_same_segments(segments_of(start, done, reward, gamma, [*sorted(cuts), 20]), expected, 20)

    def test_steps_without_an_option_are_none_and_may_be_nan(self):
        start = torch.tensor([[0, 0, 1, 0, 0, 0, 1, 0, 1]]).bool()
        done = torch.tensor([[0, 1, 0, 1, 0, 0, 0, 0, 0]]).bool()
        reward = torch.tensor([[torch.nan, torch.nan, 1.0, 2.0, torch.nan, torch.nan, 3.0, 4.0, 5.0]])
        found = segments_of(start, done, reward, 1.0, [1, 5, 9])
        assert found == [(0, 4, 2, 3.0, 2), (0, 8, 2, 7.0, 6)]

    def test_variants_agree(self, variant):
        start = torch.rand(4, 12, device=variant.device) < 0.3
        done = torch.rand(4, 12, device=variant.device) < 0.2
        reward = torch.randn(4, 12, device=variant.device)
        state = no_option(reward[:, 0])
        expected, after = option_segments(start, done, reward, 0.9, state)
        gamma = 0.9  # a constant of the graph, which takes tensors alone
        run = variant(lambda *tensors: option_segments(*tensors[:3], gamma, OpenOption(*tensors[3:])))
        for _ in range(4):  # the last one is a replay
            got, following = run(start, done, reward, *state)
        for one, other in zip((*expected, *after), (*got, *following), strict=True):
            torch.testing.assert_close(one, other)


class TestTargets:
    def test_smdp_target_ignores_the_value_of_a_terminal_state(self):
        target = smdp_target(
            torch.tensor([1.0, 2.0]),
            torch.tensor([0.9**3, 0.9]),
            torch.tensor([False, True]),
            torch.tensor([10.0, torch.nan]),
        )
        assert target.tolist() == pytest.approx([1 + 7.29, 2.0])

    def test_arrival_value(self):
        values = torch.tensor([[1.0, 5.0, 2.0]])
        option, beta = torch.tensor([0]), torch.tensor([0.25])
        assert arrival_value(values, option, beta).item() == pytest.approx(0.75 * 1 + 0.25 * 5)
        available = torch.tensor([[True, False, True]])
        assert arrival_value(values, option, beta, available).item() == pytest.approx(0.75 * 1 + 0.25 * 2)

    def test_masked_mean_of_nothing_is_nothing(self):
        nan = torch.tensor([torch.nan, torch.inf])
        assert masked_mean(nan, torch.zeros(2, dtype=torch.bool)).item() == 0.0
        values, weights = torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([1.0, 0.0, 2.0])
        assert masked_mean(values, weights).item() == pytest.approx(3.0)

    def test_masked_standardize(self):
        values = torch.tensor([1.0, torch.nan, 2.0, 6.0])
        mask = torch.tensor([True, False, True, True])
        kept = torch.tensor([1.0, 2.0, 6.0])
        result = masked_standardize(values, mask)
        assert result[1].item() == 0.0
        torch.testing.assert_close(result[mask], (kept - kept.mean()) / kept.std())
        one = torch.tensor([True, False, False, False])
        assert masked_standardize(values, one).tolist() == [0.0] * 4
        assert masked_standardize(torch.ones(3), torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3
