"""Vessels in fixed worlds of growing difficulty, and one trained policy on several levels of risk."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CURRICULUM", "RISK", "TARGETS", "WORLDS", "draw_risk", "navigated", "on_risks"]

WORLDS: dict[str, dict[str, Any]] = {
    "3 vessels": {"robots": 3, "distance": 30.0, "max_episode_steps": 400},
    "5 vessels, obstacles": {"robots": 5, "obstacles": 4, "max_episode_steps": 400},
    "6 vessels, obstacles, vortices": {"robots": 6, "obstacles": 4, "cores": 4, "max_episode_steps": 400},
}
"""What :class:`~torchrl_perf.systems.marine.Scenarios` have in each; the last is the end of the curriculum."""
SCENARIOS = 250
CURRICULUM: dict[str, Any] = {
    **{"max_robots": 6, "max_obstacles": 4, "max_cores": 4, "total_steps": 1_000_000},
    **{"stage_robots": "3, 4, 5, 5, 5, 6", "stage_obstacles": "0, 0, 0, 2, 3, 4", "stage_cores": "0, 0, 1, 2, 3, 4"},
    "stage_frames": "0, 1.5e5, 3e5, 4.5e5, 6e5, 8e5",
}
"""The stages of the original system in a sixth of its steps, with a vortex more in each from the third on and a sixth
vessel in the last."""

# three vessels without obstacles, on networks and batches of a CPU's size
RISK: dict[str, Any] = {
    **{"max_robots": 3, "stage_robots": "3", "stage_distance": "30", "max_episode_steps": 400, "num_envs": 64},
    **{"total_steps": 150_000, "eps_frames": 60_000, "capacity": 300_000, "minibatch_size": 256, "object_size": 40},
    **{"gamma": 0.99},
}
TARGETS: dict[str, dict[str, Any]] = {
    name: {
        **{"max_robots": 3, "stage_robots": "3", "stage_distance": "30", "max_episode_steps": 1_000, "num_envs": 64},
        **{"total_steps": 48_000, "capacity": 200_000, "learning_starts": 4_000, "gamma": 0.99, "max_grad_norm": 0.5},
        **{"actor_learning_rate": 3e-4, "noise_start": 0.3, "noise_end": 0.05, "noise_frames": 14_400},
        **{"object_size": 40, "num_cosines": 64, "log_interval": 10, **targets},
    }
    for name, targets in {"slow": {"n_step": 1, "tau": 0.01}, "fast": {"n_step": 5, "tau": 0.02}}.items()
}
"""AC-IQN on three vessels with targets in which an overestimate lasts for 10,000 updates, and for 1,000."""
AT_RISK: dict[str, Any] = {"robots": 3, "distance": 30.0, "max_episode_steps": 400}
"""The worlds in which they are judged."""


def navigated(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Outcomes without exploration in each of :data:`WORLDS`, of the policy and of the scripted controller.

    ``trained`` and ``scripted`` have the figures of the last world, success, collisions, time and energy among them,
    and the shares that arrived and collided in the others by their names.
    """
    from torchrl_perf.systems.marine.evaluation import Scenarios, evaluate, scripted
    from torchrl_perf.systems.marine.trainer import DISCRETE

    kind, device = "discrete" if name in DISCRETE else "continuous", trainer.device
    found: dict[str, dict[str, float]] = {"trained": {}, "scripted": {}}
    for world, contents in WORLDS.items():
        scenarios = Scenarios(count=SCENARIOS, **contents)
        by_script = scenarios.env("continuous", device)
        figures = {
            "trained": evaluate(trainer.policy, scenarios, scenarios.env(kind, device)),
            "scripted": evaluate(scripted(by_script), scenarios, by_script),
        }
        for who, one in figures.items():
            if world == list(WORLDS)[-1]:
                found[who] = {**dataclasses.asdict(one), **found[who]}
            else:
                found[who] |= {f"{world}: success": one.success, f"{world}: collision": one.collision}
    return found


def on_risks(trainer: Any, name: str) -> dict[str, dict[str, float]]:
    """Outcomes of three vessels whose policy acts on the mean of its returns, and on that of the worst shares of them.

    ``trained`` acts on the mean of all, ``worst 0.25`` on the mean of the worst quarter of the returns, and so on;
    ``scripted`` is the controller that heads for the goal.
    """
    from torchrl_perf.systems.marine.evaluation import Scenarios, evaluate, scripted
    from torchrl_perf.systems.marine.risk import risk_curve

    scenarios, device = Scenarios(count=SCENARIOS, **AT_RISK), trainer.device
    curve = risk_curve(trainer.policy, scenarios, scenarios.env("discrete", device))
    found = {"trained" if level == 1 else _level(level): figures for level, figures in curve.items()}
    by_script = scenarios.env("continuous", device)
    found["scripted"] = evaluate(scripted(by_script), scenarios, by_script)
    return {who: dataclasses.asdict(figures) for who, figures in found.items()}


def _level(level: float) -> str:
    return f"worst {level:g}"


def draw_risk(title: str, rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Collisions, arrivals and time over the level of risk: each seed, their mean, and the scripted controller.

    Args:
        title: heading.
        rows: of the study's runs.
        path: of the picture.
    """
    import numpy as np

    from torchrl_perf.metrics.figure import new_figure, save_figure
    from torchrl_perf.systems.marine.risk import LEVELS, WORDS

    figure = new_figure(12.0, 3.8)
    panels = figure.subplots(1, len(WORDS))
    names = ["trained" if level == 1 else _level(level) for level in LEVELS]
    for axes, (field, words) in zip(panels, WORDS.items(), strict=True):
        # a time to the goal is missing where no vessel has come to it
        curves = np.array([[row["evaluation"][name][field] for name in names] for row in rows], dtype=float)
        for row, curve in zip(rows, curves, strict=True):
            axes.plot(LEVELS, curve, "o-", markersize=3, linewidth=0.8, alpha=0.6, label=f"{row['run']}, {row['seed']}")
        axes.plot(LEVELS, curves.mean(0), "o-", color="black", linewidth=1.8, label="mean")
        axes.axhline(rows[0]["evaluation"]["scripted"][field], color="0.4", linestyle="--", label="scripted")
        axes.set(xlabel="acts on this share of the worst returns", ylabel=words)
        axes.invert_xaxis()  # neutral on the left, and more averse to the right
        axes.grid(alpha=0.3)
    panels[-1].legend(fontsize=8)
    figure.suptitle(title)
    return save_figure(figure, path, dpi=110)
