"""Distortions of the quantile levels: closed forms, inverses, the tails they weigh."""

import pytest
import torch

from torchrl_perf.functional import Risk, distort
from torchrl_perf.functional.losses.distributional import midpoints
from torchrl_perf.functional.losses.risk import check_risk, distorted_mass

KINDS = [("cvar", 0.25), ("cvar", 1.0), ("wang", -0.75), ("wang", 0.5), ("power", -2.0), ("power", 1.5), ("power", 0.0)]


def test_hand_values():
    taus = torch.tensor([0.0, 0.5, 1.0])
    assert distort(taus, 0.5).tolist() == [0.0, 0.25, 0.5]
    torch.testing.assert_close(distort(taus, 1.0, "wang"), torch.tensor([0.0, 0.841345, 1.0]))
    torch.testing.assert_close(distort(taus, 1.0, "power"), torch.tensor([0.0, 0.5**0.5, 1.0]))
    torch.testing.assert_close(distort(taus, -1.0, "power"), torch.tensor([0.0, 1 - 0.5**0.5, 1.0]))


@pytest.mark.parametrize(("kind", "eta"), [("cvar", 1.0), ("wang", 0.0), ("power", 0.0)])
def test_neutral(kind, eta):
    taus = torch.rand(50)
    torch.testing.assert_close(distort(taus, eta, kind), taus)


@pytest.mark.parametrize(("kind", "eta"), KINDS)
def test_levels_stay_levels_and_rise(kind, eta):
    levels = distort(torch.linspace(0, 1, 101), eta, kind)
    assert levels[0] == 0 and levels.min() >= 0 and levels.max() <= 1
    assert (levels.diff() >= 0).all()


@pytest.mark.parametrize(("kind", "eta"), KINDS)
def test_a_tensor_eta_is_the_number(kind, eta):
    taus = torch.rand(3, 5)
    got = distort(taus, torch.tensor([[eta], [eta], [eta]]), kind)
    torch.testing.assert_close(got, distort(taus, eta, kind))
    edges = midpoints(5).cumsum(0) / midpoints(5).sum()
    torch.testing.assert_close(distorted_mass(edges, torch.tensor(eta), kind), distorted_mass(edges, eta, kind))


def test_cvar_of_a_normal_distribution():
    # E[X | X below its eta-quantile] = -phi(Phi^-1(eta)) / eta
    levels = distort(midpoints(20_000).double(), 0.25)
    assert torch.special.ndtri(levels).mean().item() == pytest.approx(-1.27111, abs=1e-3)


def test_wang_shifts_a_normal_distribution():
    levels = distort(midpoints(20_000).double(), -0.75, "wang")
    assert torch.special.ndtri(levels).mean().item() == pytest.approx(-0.75, abs=1e-3)


@pytest.mark.parametrize(("kind", "eta"), KINDS)
def test_masses_are_the_distorted_mean_of_a_histogram(kind, eta):
    values = torch.tensor([-3.0, 0.5, 1.0, 7.0]).double()
    probs = torch.tensor([0.1, 0.4, 0.3, 0.2]).double()
    mass = distorted_mass(probs.cumsum(0), eta, kind)
    torch.testing.assert_close(mass.sum(), torch.tensor(1.0).double())
    levels = distort(midpoints(200_000).double(), eta, kind)
    sampled = values[torch.searchsorted(probs.cumsum(0)[:-1].contiguous(), levels)]
    assert (mass * values).sum().item() == pytest.approx(sampled.mean().item(), abs=2e-3)


def test_faults():
    for eta in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match=r"eta: expected the share of outcomes in \(0, 1\] for cvar, received"):
            check_risk(Risk("cvar", eta))
    with pytest.raises(ValueError, match="kind: expected one of"):
        distort(torch.rand(3), 0.5, "sharpe")
    with pytest.raises(ValueError, match="eta: expected a finite number"):
        check_risk(Risk("wang", float("nan")))
    assert check_risk(None) is None
