"""Pictures of phase portraits and of prediction errors: what is drawn, where it goes, what is refused."""

import math

import pytest
import torch

from torchrl_perf.envs.latent_field import limit_cycle
from torchrl_perf.metrics.comparison import band_of
from torchrl_perf.systems.active_dynamics import picture
from torchrl_perf.systems.active_dynamics.picture import PhasePortrait, draw_phase_portrait, draw_prediction_curves


def portrait(visited=None):
    axis = torch.linspace(-2, 2, 9)
    field = limit_cycle(torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1))
    return PhasePortrait(axis, field, 0.9 * field, visited, "limit cycle")


@pytest.mark.parametrize("visited", [None, torch.randn(9_000, 2)])
def test_a_portrait_is_saved(tmp_path, visited):
    path = draw_phase_portrait(portrait(visited), tmp_path / "new" / "phase.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_curves_are_saved(tmp_path):
    curves = {"active": [(100, 0.2), (200, 0.9)], "random": [(100, math.nan), (200, 0.7)]}
    path = draw_prediction_curves(curves, tmp_path / "error.png", horizon=10, title="limit cycle")
    assert path.stat().st_size > 5_000


def test_several_seeds_are_drawn_as_a_band(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(picture, "band_of", lambda curves: seen.append(curves) or band_of(curves))
    seeds = [[(100, 0.2), (200, 0.9)], [(100, 0.4), (200, math.nan), (300, 0.8)], [(100, 0.3), (200, 0.6)]]
    path = draw_prediction_curves({"active": seeds, "random": [(100, 0.1), (200, 0.7)]}, tmp_path / "error.png")
    assert path.stat().st_size > 5_000
    ((first, second, third),) = seen
    assert [curve.steps for curve in (first, second, third)] == [(100, 200), (100, 300), (100, 200)]
    for curve, values in ((first, (0.8, 0.1)), (second, (0.6, 0.2)), (third, (0.7, 0.4))):
        assert curve.values == pytest.approx(values)
    with pytest.raises(ValueError, match="curves: expected a finite R"):
        draw_prediction_curves({"active": [seeds[0], [(100, math.nan)]]}, tmp_path / "a.png")


def test_refusals(tmp_path):
    whole = portrait()
    with pytest.raises(ValueError, match=r"\[9, 9, 2\]"):
        draw_phase_portrait(PhasePortrait(whole.axis, whole.true[:5], whole.learned), tmp_path / "a.png")
    with pytest.raises(ValueError, match="at least one point"):
        draw_prediction_curves({"active": []}, tmp_path / "a.png")
    with pytest.raises(ValueError, match="at least one point"):
        draw_prediction_curves({"active": [[]]}, tmp_path / "a.png")
