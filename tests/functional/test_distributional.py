"""Projection of C51 and quantile Huber loss: hand cases, float64 loops, fixed points, invariances, faults."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_perf.functional import categorical_projection, quantile_huber_loss
from torchrl_perf.functional.losses import distributional
from torchrl_perf.functional.losses.distributional import check_support, midpoints, return_bounds
from torchrl_perf.runtime import no_host_sync

SUPPORT = torch.tensor([-1.0, 0.0, 1.0])


def projection_oracle(probs, reward, discount, support):
    """One atom at a time, by the neighbours of the shifted atom."""
    out = torch.zeros_like(probs)
    for row in range(len(probs)):
        for p, z in zip(probs[row].tolist(), support.tolist(), strict=True):
            x = min(max(reward[row].item() + discount[row].item() * z, support[0].item()), support[-1].item())
            right = next((i for i, atom in enumerate(support.tolist()) if atom >= x), len(support) - 1)
            left = max(right - 1, 0)
            gap = (support[right] - support[left]).item()
            share = 1.0 if gap == 0 else (x - support[left].item()) / gap
            out[row, right] += p * share
            out[row, left] += p * (1 - share)
    return out


@pytest.mark.parametrize(
    ("reward", "discount", "loss"),
    [(0.25, 0.99, 1.24591), (0.0, 0.99, 1.34591), (100.0, 0.0, 0.94591), (-0.5, 0.0, 1.19591)],
)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
def test_hand_cases(reward, discount, loss, shape, device):
    log_probs = torch.tensor([0.2, -0.1, 0.3], device=device).log_softmax(-1)
    following = torch.tensor([0.0, 1.0, 0.0], device=device).expand(*shape, 3)
    target = categorical_projection(
        following,
        torch.full(shape, reward, device=device),
        torch.full(shape, discount, device=device),
        SUPPORT.to(device),
    )
    assert target.shape == (*shape, 3)
    got = -(target * log_probs).sum(-1)
    torch.testing.assert_close(got.cpu(), torch.full(shape, loss), rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    atoms=st.integers(2, 12),
    low=st.floats(-20, 20),
    width=st.floats(0.1, 50),
    even=st.booleans(),
    seed=st.integers(0, 999),
)
def test_projection_is_the_loop(atoms, low, width, even, seed):
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.ones(atoms - 1) if even else torch.rand(atoms - 1, generator=generator) + 0.1
    support = low + width * torch.cat([torch.zeros(1), gaps.cumsum(0) / gaps.sum()]).double()
    probs = torch.rand(4, atoms, generator=generator, dtype=torch.float64).softmax(-1)
    reward = (torch.rand(4, generator=generator, dtype=torch.float64) - 0.5) * 3 * width
    discount = torch.tensor([0.99, 0.5, 0.0, 1.0], dtype=torch.float64)
    got = categorical_projection(probs, reward, discount, support)
    torch.testing.assert_close(got, projection_oracle(probs, reward, discount, support), rtol=0, atol=1e-12)
    torch.testing.assert_close(got.sum(-1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (got >= 0).all()
    shifted = (reward.unsqueeze(-1) + discount.unsqueeze(-1) * support).clamp(support[0], support[-1])
    dense = distributional._shared_densely(probs, shifted, support)
    torch.testing.assert_close(dense, got, rtol=0, atol=1e-12)
    single = categorical_projection(probs.float(), reward.float(), discount.float(), support.float())
    torch.testing.assert_close(single.double(), got, rtol=0, atol=1e-4)


def test_the_mean_is_kept_inside_the_support():
    support = torch.linspace(-10, 10, 51, dtype=torch.float64)
    probs = torch.rand(7, 51, dtype=torch.float64).softmax(-1)
    reward, discount = torch.rand(7, dtype=torch.float64), torch.full((7,), 0.9, dtype=torch.float64)
    got = categorical_projection(probs, reward, discount, support)
    torch.testing.assert_close((got * support).sum(-1), reward + discount * (probs * support).sum(-1))


def test_identity_and_extremes():
    probs = torch.rand(3, 51).softmax(-1)
    support = torch.linspace(-1, 1, 51)
    zero, one = torch.zeros(3), torch.ones(3)
    torch.testing.assert_close(categorical_projection(probs, zero, one, support), probs, rtol=0, atol=1e-5)
    for reward, atom in ((math.inf, -1), (-math.inf, 0), (1e30, -1)):
        got = categorical_projection(probs, torch.full((3,), reward), one, support)
        torch.testing.assert_close(got[:, atom], one, rtol=0, atol=1e-6)


def test_one_atom_keeps_all_mass():
    got = categorical_projection(torch.ones(2, 1), torch.tensor([5.0, -5.0]), torch.ones(2), torch.zeros(1))
    assert got.tolist() == [[1.0], [1.0]]


def test_projection_compiled_and_without_waits(variant, device):
    probs = torch.rand(6, 51, device=device).softmax(-1)
    reward, discount = torch.randn(6, device=device), torch.full((6,), 0.9, device=device)
    support = torch.linspace(-2, 2, 51, device=device)
    with no_host_sync():
        expected = categorical_projection(probs, reward, discount, support)
    got = variant(categorical_projection)(probs, reward, discount, support)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_projection_faults():
    good = torch.ones(2, 3) / 3
    with pytest.raises(ValueError, match=r"support: expected \[\*, M\] and \[M\], received \[2, 3\] and \[4\]"):
        categorical_projection(good, torch.zeros(2), torch.zeros(2), torch.zeros(4))
    with pytest.raises(ValueError, match=r"reward: expected .*\[2\], received \[2, 1\].*squeeze"):
        categorical_projection(good, torch.zeros(2, 1), torch.zeros(2), SUPPORT)
    with pytest.raises(ValueError, match="discount: expected"):
        categorical_projection(good, torch.zeros(2), torch.tensor(0.9), SUPPORT)


# -- quantile Huber loss ----------------------------------------------------------------------------------------------


def huber_oracle(quantiles, targets, taus, kappa):
    """Equation by equation, one pair at a time."""
    out = []
    for b in range(len(quantiles)):
        levels = taus[b] if taus.ndim == 2 else taus
        total = 0.0
        for q, tau in zip(quantiles[b].tolist(), levels.tolist(), strict=True):
            for t in targets[b].tolist():
                d = t - q
                if kappa == 0:
                    huber = abs(d)
                else:
                    huber = (d * d / 2 if abs(d) <= kappa else kappa * (abs(d) - kappa / 2)) / kappa
                total += abs(tau - (d < 0)) * huber / len(targets[b])
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)


def test_hand_computed_pairs():
    # d = 1 - 0 and 3 - 0 at tau .25 (weights .25), 1 - 2 and 3 - 2 at tau .75 (weights .25 and .75), kappa 1
    got = quantile_huber_loss(torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(got, torch.tensor([(0.25 * 0.5 + 0.25 * 2.5 + 0.25 * 0.5 + 0.75 * 0.5) / 2]))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 3),
    count=st.integers(1, 5),
    targets=st.integers(1, 6),
    kappa=st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0]),
    per_row=st.booleans(),
    seed=st.integers(0, 999),
)
def test_quantile_huber_is_the_loop(rows, count, targets, kappa, per_row, seed):
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    quantiles = torch.randn(rows, count, **options)
    samples = torch.randn(rows, targets, **options) * 2
    taus = torch.rand(*([rows, count] if per_row else [count]), **options)
    got = quantile_huber_loss(quantiles, samples, taus, kappa)
    torch.testing.assert_close(got, huber_oracle(quantiles, samples, taus, kappa), rtol=1e-9, atol=1e-12)


def fixed_points(taus, samples, kappa):
    """Where the gradient in each quantile is 0, by bisection."""
    low, high = torch.full((1, len(taus)), -5.0).double(), torch.full((1, len(taus)), 5.0).double()
    for _ in range(40):
        middle = ((low + high) / 2).requires_grad_()
        (grad,) = torch.autograd.grad(quantile_huber_loss(middle, samples, taus, kappa).sum(), middle)
        low, high = (
            torch.where(grad < 0, middle.detach(), low),
            torch.where(grad < 0, high, middle.detach()),
        )
    return low[0]


@pytest.mark.parametrize(
    ("kappa", "expected"),
    [
        (0.0, [-1.645, -0.675, 0.0, 0.675, 1.645]),
        (1e-4, [-1.645, -0.675, 0.0, 0.675, 1.645]),
        (1.0, [-1.31, -0.506, 0.0, 0.506, 1.31]),
    ],
)
def test_fixed_points_of_a_normal_target(kappa, expected):
    samples = torch.special.ndtri(midpoints(4000).double()).unsqueeze(0)
    got = fixed_points(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).double(), samples, kappa)
    torch.testing.assert_close(got, torch.tensor(expected).double(), rtol=0, atol=4e-3)


def test_fixed_points_shrink_with_kappa_towards_the_mean():
    samples = torch.special.ndtri(midpoints(1000).double()).unsqueeze(0)
    taus = torch.tensor([0.95]).double()
    points = [fixed_points(taus, samples, kappa).item() for kappa in (0.0, 0.1, 1.0, 10.0)]
    assert points == sorted(points, reverse=True)
    # 10 is beyond all differences: an expectile, .95 E(X - e)+ = .05 E(e - X)+
    above, below = (samples - points[-1]).clamp_min(0).mean(), (points[-1] - samples).clamp_min(0).mean()
    assert 0.95 * above.item() == pytest.approx(0.05 * below.item(), rel=1e-6)


def test_small_kappa_is_the_pinball_loss():
    quantiles, targets, taus = torch.randn(3, 4).double(), torch.randn(3, 5).double(), torch.rand(4).double()
    limit = quantile_huber_loss(quantiles, targets, taus, 0.0)
    torch.testing.assert_close(quantile_huber_loss(quantiles, targets, taus, 1e-9), limit, rtol=1e-7, atol=1e-7)


def test_every_pair_counts():
    quantiles, targets, taus = torch.randn(2, 3), torch.randn(2, 3), midpoints(3)
    base = quantile_huber_loss(quantiles, targets, taus)
    torch.testing.assert_close(quantile_huber_loss(quantiles, targets.flip(-1), taus), base)
    torch.testing.assert_close(quantile_huber_loss(quantiles, targets.repeat(1, 4), taus), base)
    assert not torch.allclose(quantile_huber_loss(quantiles.flip(-1), targets, taus), base)


@pytest.mark.parametrize("kappa", [0.3, 1.0])
def test_gradient_is_the_finite_difference(kappa):
    quantiles = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    targets, taus = torch.randn(2, 4, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q: quantile_huber_loss(q, targets, taus, kappa), quantiles)


def test_equal_values_have_no_gradient_and_no_nan():
    quantiles = torch.zeros(1, 2, requires_grad=True)
    for kappa in (0.0, 1.0):
        (grad,) = torch.autograd.grad(quantile_huber_loss(quantiles, torch.zeros(1, 2), midpoints(2), kappa), quantiles)
        assert grad.tolist() == [[0.0, 0.0]]


def test_quantile_huber_compiled_and_batched(variant, device):
    quantiles, targets = torch.randn(2, 3, 4, device=device), torch.randn(2, 3, 5, device=device)
    taus = torch.rand(2, 3, 4, device=device)
    expected = torch.stack([quantile_huber_loss(q, t, u) for q, t, u in zip(quantiles, targets, taus, strict=True)])
    torch.testing.assert_close(variant(quantile_huber_loss)(quantiles, targets, taus), expected)


def test_quantile_huber_faults():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    for kappa in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="kappa: expected a finite number of at least 0, received"):
            quantile_huber_loss(two, three, midpoints(2), kappa)
    with pytest.raises(
        ValueError, match=r"taus: expected \[K\] or \[B, K\], that is \[2\] or \[1, 2\], received \[3\]"
    ):
        quantile_huber_loss(two, three, midpoints(3))
    with pytest.raises(ValueError, match="quantiles, targets: expected"):
        quantile_huber_loss(two, torch.zeros(2, 3), midpoints(2))


# -- supports ---------------------------------------------------------------------------------------------------------


def test_midpoints():
    assert midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]
    with pytest.raises(ValueError, match="count: expected at least one quantile, received 0"):
        midpoints(0)


@pytest.mark.parametrize(
    ("bounds", "gamma", "horizon", "expected"),
    [
        ((1.0, 1.0), 0.99, None, (1.0, 100.0)),
        ((-2.0, 3.0), 0.5, None, (-4.0, 6.0)),
        ((-2.0, 3.0), 0.5, 2, (-3.0, 4.5)),
        ((-1.0, 0.0), 1.0, 200, (-200.0, 0.0)),
        ((0.0, 1.0), 1.0, None, (0.0, math.inf)),
        ((-1.0, 1.0), 0.0, None, (-1.0, 1.0)),
    ],
)
def test_return_bounds(bounds, gamma, horizon, expected):
    assert return_bounds(bounds, gamma, horizon) == pytest.approx(expected)


def test_a_narrow_support_is_refused():
    check_support(0.0, 100.0, (1.0, 1.0), 0.99)
    check_support(-20.0, 60.0, (-5.0, 10.0), 0.0)
    message = r"expected atoms from at most 1 to at least 100, .*received \[-10, 10\]. Remedy"
    with pytest.raises(ValueError, match=message):
        check_support(-10.0, 10.0, (1.0, 1.0), 0.99)
    for wrong in ({"reward_bounds": (1.0, 0.0)}, {"gamma": 1.5}, {"horizon": 0}):
        options = {"reward_bounds": (0.0, 1.0), "gamma": 0.9, **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            return_bounds(**options)
