"""One trained policy that acts on more or less risk: what it costs in time, and what it saves in collisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrl_perf.functional.losses.risk import Risk
from torchrl_perf.modules.values.risk import make_risk
from torchrl_perf.systems.marine.evaluation import NavigationFigures, Scenarios, evaluate

if TYPE_CHECKING:
    from torchrl_perf.envs.agent_streams import AgentStreams

__all__ = ["LEVELS", "WORDS", "risk_curve"]

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
