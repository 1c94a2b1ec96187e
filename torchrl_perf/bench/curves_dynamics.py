"""How many samples a field takes until it is known to a stated error, by what its inputs are chosen for."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrl_perf.metrics.comparison import Curve, band_of
from torchrl_perf.metrics.figure import new_figure, save_figure

__all__ = ["RULES", "STATED", "changes_of", "draw_fields", "explored", "samples_to"]

STATED = {
    "duffing": 0.1,
    "snowman": 0.1,
    "van_der_pol": 0.05,
    "multi_attractor": 0.3,
    "double_limit_cycle": 0.02,
    "limit_cycle": 0.03,
}
"""The error that a field is to be known to: the share of the movement from points all over the region that predictions
miss."""
RULES: dict[str, dict[str, Any]] = {
    "random": {"inputs": "random", "total_steps": 2_880},
    "held": {"inputs": "random", "random_hold": 10, "total_steps": 2_880},
    "fisher_d": {"inputs": "fisher_d"},
    "fisher_a": {"inputs": "fisher_a"},
    "embedding": {"inputs": "embedding"},
    "disagreement": {"inputs": "disagreement", "dynamics": "rbf_ensemble"},
    "rnd": {"inputs": "rnd"},
    "strong": {"inputs": "random", "total_steps": 2_880},
    "strong_held": {"inputs": "random", "random_hold": 10, "total_steps": 2_880},
    "embedding_weak": {"inputs": "embedding"},
}
"""What each rule changes in the preset. Random inputs, fresh in each step or held for ten, have twice the samples, so
that half of theirs is a number."""
BOUNDS = {"strong": 1.5, "strong_held": 1.5, "embedding_weak": 0.68}
"""Of rules at equal effort, what the bound of their inputs is multiplied by. Planned inputs are close to the bound:
their mean square is .61 to .78 of its square, and that of uniform ones a third. With 1.5 that of random inputs is .75
of it, and with .68 that of planned ones .28 to .36."""
PROBES, PROBE_STEPS, PROBE_SEED = 256, 4, 20_000
"""Points all over the region to which the learnt coordinates are mapped, and the steps that each is seen for."""


def changes_of(field: str, rule: str) -> dict[str, Any]:
    """What a rule changes in the preset of a field: :data:`RULES`, and the bound of its inputs."""
    changes = RULES[rule]
    return {**changes, "action_max": BOUNDS[rule] * _preset(field).action_max} if rule in BOUNDS else dict(changes)


def _preset(field: str) -> Any:
    from torchrl_perf.systems.active_dynamics.config import ACTIVE_DYNAMICS_PRESETS, FROM_ONE_PLACE

    return ACTIVE_DYNAMICS_PRESETS[f"{field}{FROM_ONE_PLACE}"]


def samples_to(error: float, steps: Sequence[float], errors: Sequence[float]) -> float | None:
    """Samples after which an error is reached for the first time; None where it is not.

    Args:
        error: that is asked for.
        steps: samples at each evaluation.
        errors: found there.
    """
    return next((step for step, found in zip(steps, errors, strict=True) if found <= error), None)


def explored(config: Any) -> dict[str, Any]:
    """One run, with the error over the region after each iteration.

    Returns:
        ``steps``, ``curves`` of the "error", and the ``evaluation`` of what was "trained": ``samples`` to the stated
        error, all of the run's where it is not ``reached`` (1 or 0), the last ``error``, and ``effort``, the mean
        square of the inputs.
    """
    from torchrl_perf.systems.active_dynamics import ActiveDynamicsTrainer
    from torchrl_perf.systems.active_dynamics.evaluation import fit_alignment, record
    from torchrl_perf.systems.active_dynamics.networks import make_field_env
    from torchrl_perf.systems.active_dynamics.region import region_error, region_points

    trainer = ActiveDynamicsTrainer(config)
    # what the learnt coordinates are fitted on is the same for all rules
    usual = dataclasses.replace(config, action_max=_preset(config.field).action_max)
    probe = make_field_env(usual, trainer.device, PROBES, 0, region=True)
    points = region_points(config.region, device=trainer.device)
    errors, effort = [], []
    for _ in range(config.iterations):
        trainer.step()
        trainer.iterations_done += 1
        seen = record(trainer.model, probe, steps=PROBE_STEPS, seed=PROBE_SEED)
        alignment = fit_alignment(seen.get("belief"), seen.get("latent"))
        errors.append(region_error(trainer.model, probe, alignment, points, horizon=config.prediction_horizon))
        effort.append(trainer.metrics.flush(0)["input/mean_square"])
    found = torch.stack(errors).tolist()
    trainer.close()
    steps = [float(config.batch_size * (done + 1)) for done in range(config.iterations)]
    reached = samples_to(STATED[config.field], steps, found)
    figures = {"samples": reached or steps[-1], "reached": float(reached is not None), "error": found[-1]}
    figures["effort"] = sum(effort) / len(effort)
    curves = {"error": {"step": steps, "value": found}}
    return {"steps": int(steps[-1]), "curves": curves, "evaluation": {"trained": figures}}


_STYLES = {"random": ("0.2", "-"), "held": ("0.2", "--"), "strong": ("0.6", "-"), "strong_held": ("0.6", "--")}
"""Colour and line of the rules that plan nothing."""


def draw_fields(title: str, rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """A panel for each field: the stated error, and of each rule the interquartile mean and its 95% interval.

    Args:
        title: heading.
        rows: of runs named "field-rule".
        path: of the picture.
    """
    fields = list(dict.fromkeys(row["run"].partition("-")[0] for row in rows))
    across = min(3, len(fields))
    down = -(-len(fields) // across)
    figure = new_figure(4.4 * across, 3.2 * down + 0.5)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, field in zip(panels, fields, strict=False):
        for rule in RULES:
            own = [row["curves"]["error"] for row in rows if row["run"] == f"{field}-{rule}"]
            if not own:
                continue
            band = band_of([Curve(one["step"], one["value"]) for one in own], len(own[0]["step"]))
            style = dict(zip(("color", "ls"), _STYLES.get(rule, ()), strict=False))
            line = axes.plot(band.steps, band.middle, label=rule, linewidth=1.3, **style)[0]
            axes.fill_between(band.steps, band.low, band.high, alpha=0.13, color=line.get_color(), linewidth=0)
        axes.axhline(STATED[field], color="0.4", linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        axes.set_title(field.replace("_", " "), fontsize=10)
        axes.grid(alpha=0.3)
    for axes in panels[len(fields) :]:
        axes.remove()
    for index, axes in enumerate(panels[: len(fields)]):
        if index % across == 0:
            axes.set_ylabel("error over the region")
        if index + across >= len(fields):
            axes.set_xlabel("samples")
    panels[0].legend(fontsize=8)
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    figure.suptitle(f"{title}\ninterquartile mean and 95% interval, seeds {seeds}", fontsize=10)
    return save_figure(figure, path, dpi=110)
