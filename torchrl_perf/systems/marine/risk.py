"""One trained policy that acts on more or less risk: what it costs in time, and what it saves in collisions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrl_perf.functional.losses.risk import Risk
from torchrl_perf.metrics.figure import new_figure, save_figure
from torchrl_perf.modules.values.risk import make_risk
from torchrl_perf.systems.marine.evaluation import NavigationFigures, Scenarios, evaluate

if TYPE_CHECKING:
    from torchrl_perf.envs.agent_streams import AgentStreams

__all__ = ["LEVELS", "WORDS", "draw_risk_curve", "risk_curve"]

LEVELS = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Shares of the worst returns whose mean is acted on; with 1 it is the mean of all."""
WORDS = {"collision": "share that collided", "success": "share that arrived", "mean_time": "seconds to the goal"}
"""What is drawn over the levels."""


def risk_curve(
    policy: nn.Module, scenarios: Scenarios, env: AgentStreams, *, levels: Sequence[float] = LEVELS
) -> dict[float, NavigationFigures]:
    """Outcomes of a policy that chooses by the conditional value at risk of its returns, for several levels.

    What the policy has learnt is the same; only the levels of the quantiles differ that an action is chosen by (Dabney
    et al., arXiv:1806.06923). The policy is left as it was.

    Args:
        policy: of implicit quantiles, such as that of ``MarineIQNTrainer``.
        scenarios: where the vessels start.
        env: of :meth:`Scenarios.env` with ``"discrete"``.
        levels: in (0, 1].

    Returns:
        Figures by level.

    Raises:
        ValueError: for a policy without a network that acts on a risk, and a level out of range.
    """
    networks: list[Any] = [module for module in policy.modules() if hasattr(module, "risk")]
    if not networks:
        raise ValueError(
            f"policy: expected one whose network acts on a risk, received {type(policy).__name__} without. Remedy: the "
            "policy of MarineIQNTrainer."
        )
    before = [network.risk for network in networks]
    found = {}
    try:
        for level in levels:
            for network in networks:
                network.risk = make_risk(Risk("cvar", level), env.device)
            found[level] = evaluate(policy, scenarios, env)
    finally:
        for network, risk in zip(networks, before, strict=True):
            network.risk = risk
    return found


def draw_risk_curve(
    curves: Mapping[str, Mapping[float, NavigationFigures]], path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Draw collisions, arrivals and time over the level of risk, a line for each policy, and save the picture.

    Args:
        curves: of :func:`risk_curve`, by name.
        path: picture to write; the suffix gives the format, for example ``.png``.
        title: heading.

    Returns:
        The path that was written.

    Raises:
        ValueError: for no curve.
    """
    if not curves:
        raise ValueError("curves: expected at least one, received none. Remedy: a mapping of names to risk_curve().")
    figure = new_figure(11.0, 3.6)
    panels = figure.subplots(1, 3)
    for axes, (field, label) in zip(panels, WORDS.items(), strict=True):
        for name, curve in curves.items():
            levels = sorted(curve)
            axes.plot(levels, [getattr(curve[level], field) for level in levels], "o-", label=name, markersize=4)
        axes.set_xlabel("level: share of the worst returns")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    if title is not None:
        figure.suptitle(title)
    return save_figure(figure, path)
