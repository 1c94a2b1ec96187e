"""The one list of what ``torchrl-perf train`` knows; it imports nothing, so that a usage text costs no second.

A new algorithm or system is one line here. The command line, the usage texts, the tables of the documentation and the
tests read this list and no other.
"""

import importlib
from typing import Any, NamedTuple

__all__ = ["ALGORITHMS", "MARINE_AGENTS", "SYSTEMS", "Entry", "entry_of"]


class Entry(NamedTuple):
    """Where the parts of an algorithm are, each as ``module:name`` below ``torchrl_perf``."""

    config: str
    """Dataclass of settings, which knows its presets by task."""
    trainer: str
    """Made of a config; what :func:`~torchrl_perf.trainers.run.run.train` runs."""

    def load(self, part: str) -> Any:
        """The object behind ``"config"`` or ``"trainer"``, or ``"presets"``: settings for each task, by env name."""
        if part == "presets":
            return self.load("config").presets()
        module, _, name = getattr(self, part).partition(":")
        return getattr(importlib.import_module(f"torchrl_perf.{module}"), name)


ALGORITHMS = {
    "ppo": Entry("trainers.config:PPOConfig", "trainers.ppo:PPOTrainer"),
    "dqn": Entry("trainers.dqn:DQNConfig", "trainers.dqn:DQNTrainer"),
    "sac": Entry("trainers.sac:SACConfig", "trainers.sac:SACTrainer"),
    "qr-dqn": Entry("trainers.iqn:QRDQNConfig", "trainers.iqn:IQNTrainer"),
    "iqn": Entry("trainers.iqn:IQNConfig", "trainers.iqn:IQNTrainer"),
    "rainbow": Entry("trainers.rainbow:RainbowConfig", "trainers.rainbow:RainbowTrainer"),
    "ddpg": Entry("trainers.ddpg:DDPGConfig", "trainers.ddpg:DDPGTrainer"),
    "td3": Entry("trainers.ddpg:TD3Config", "trainers.ddpg:DDPGTrainer"),
    "ac-iqn": Entry("trainers.ac_iqn:ACIQNConfig", "trainers.ac_iqn:ACIQNTrainer"),
    "sac-options": Entry("trainers.sac_options:SACOptionsConfig", "trainers.sac_options:SACOptionsTrainer"),
    "hybrid-ppo": Entry("trainers.hybrid_ppo_config:HybridPPOConfig", "trainers.hybrid_ppo:HybridPPOTrainer"),
}
"""Algorithms for any env whose actions fit."""

MARINE_AGENTS = {"iqn": "IQN", "ac-iqn": "ACIQN", "dqn": "DQN", "rainbow": "Rainbow", "ddpg": "DDPG", "sac": "SAC"}
"""Agents of ``train marine``, and what the names of their parts begin with."""

SYSTEMS = {
    "active-dynamics": Entry(
        "systems.active_dynamics.config:ActiveDynamicsConfig", "systems.active_dynamics.trainer:ActiveDynamicsTrainer"
    ),
    "durotaxis": Entry("systems.durotaxis.config:DurotaxisConfig", "systems.durotaxis.trainer:DurotaxisTrainer"),
    "fuel-breaks": Entry(
        "systems.fuel_breaks.config:FuelBreaksConfig", "systems.fuel_breaks.trainer:FuelBreaksTrainer"
    ),
    "options-market": Entry(
        "systems.options_market.config:OptionsMarketConfig", "systems.options_market.trainer:OptionsMarketTrainer"
    ),
    **{
        f"marine-{agent}": Entry(
            f"systems.marine.config:Marine{name}Config", f"systems.marine.trainer:Marine{name}Trainer"
        )
        for agent, name in MARINE_AGENTS.items()
    },
}
"""Whole systems with a task of their own; ``train marine --agent iqn`` is ``marine-iqn``."""


def entry_of(name: str) -> Entry:
    """The parts of an algorithm or system.

    Raises:
        KeyError: for a name that is not registered; its text says where to register it.
    """
    known = {**ALGORITHMS, **SYSTEMS}
    if name not in known:
        raise KeyError(
            f"algorithm: expected one of {', '.join(known)}, received {name!r}. Remedy: one of these, or a "
            "line for it in torchrl_perf/registry.py."
        )
    return known[name]
