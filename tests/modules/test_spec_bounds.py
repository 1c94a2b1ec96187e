"""Bounds of specs: of all rows, of unbounded actions, and those that no policy can serve."""

import math

import pytest
import torch
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_perf.modules import DeterministicActor, GaussianNoise
from torchrl_perf.modules.bounds import action_bounds

LOW, HIGH = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])
UNEVEN = Bounded(torch.stack([LOW, LOW - 1]), HIGH.expand(2, 2))


@pytest.mark.parametrize("batch", [(), (3,), (2, 5)])
def test_of_any_batch(batch):
    low, high = action_bounds(Bounded(LOW.expand(*batch, 2), HIGH.expand(*batch, 2)))
    assert torch.equal(low, LOW) and torch.equal(high, HIGH)


def test_copies():
    spec = Bounded(LOW.clone(), HIGH.clone())
    action_bounds(spec)[0].zero_()
    assert torch.equal(spec.space.low, LOW)


def test_unbounded_actions():
    low, high = action_bounds(Unbounded((3, 2)), finite=False)
    assert low.tolist() == [-math.inf, -math.inf] and high.tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("spec", "finite", "message"),
    [
        (Categorical(3), True, r"expected continuous actions .*received Categorical \[\] of torch.int64. Remedy"),
        (Categorical(3), False, "expected continuous actions"),
        (Unbounded((2,)), True, "received Unbounded"),
        (Bounded(0, 5, (2,), dtype=torch.int64), True, "of torch.int64"),
        (Bounded(0.0, 1.0, ()), True, r"received Bounded\w* \[\] of torch.float32"),
        (Bounded(-math.inf, 1.0, (2,)), True, "expected finite bounds with low < high, the same for all rows"),
        (UNEVEN, True, "(?s)the same for all rows, received low .*Remedy"),
        (UNEVEN, False, "spec: expected bounds with low < high"),
    ],
)
def test_what_no_policy_can_serve(spec, finite, message):
    with pytest.raises(ValueError, match=message):
        action_bounds(spec, finite=finite)


def test_rows_with_bounds_of_their_own_are_refused_by_policies():
    with pytest.raises(ValueError, match="the same for all rows"):
        DeterministicActor(torch.nn.Identity(), spec=UNEVEN)
    policy = DeterministicActor(torch.nn.Identity(), spec=Bounded(LOW, HIGH))
    with pytest.raises(ValueError, match="the same for all rows"):
        GaussianNoise(policy, spec=UNEVEN)
