"""The one list of what ``torchrl-perf train`` knows; it imports nothing, so that a usage text costs no second.

A new algorithm or system is one line here. The command line, the usage texts, the tables of the documentation and the
tests read this list and no other.
"""

import importlib
from typing import Any, NamedTuple

__all__ = ["ALGORITHMS", "MARINE", "MARINE_AGENTS", "ROBOTS", "SYSTEMS", "TASKS", "Entry", "entry_of"]


class Entry(NamedTuple):
    """Where the parts of an algorithm are, each as ``module:name`` below ``torchrl_perf``."""

    config: str
    """Dataclass of settings, which knows its presets by task."""
    trainer: str
    """Made of a config; what :func:`~torchrl_perf.trainers.run.run.train` runs."""

    def load(self, part: str) -> Any:
        """The object behind ``"config"`` or ``"trainer"``, or ``"presets"``: settings for each task, by env name."""
        if part == "presets":
            return self._presets()
        return self._named(getattr(self, part), "torchrl_perf/registry.py")

    def _presets(self) -> Any:
        kind = self.load("config")
        file = f"torchrl_perf/{self.config.partition(':')[0].replace('.', '/')}.py"
        found = self._named(kind.presets_in, file) if kind.presets_in else {}
        if not found:
            raise LookupError(
                f"{kind.__name__}: expected settings for one task at least, received presets_in={kind.presets_in!r}. "
                f"Remedy: in {file}, a dictionary of them by env name, and presets_in='module:NAME' that names it."
            )
        return found

    @staticmethod
    def _named(place: str, file: str) -> Any:
        """The object at ``module:name``, which ``file`` says."""
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(f"torchrl_perf.{module}"), name)
        except (AttributeError, ModuleNotFoundError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name != f"torchrl_perf.{module}":
                raise  # another package is absent, which its own message says
            raise LookupError(
                f"{file}: expected module:name of an object below torchrl_perf, received {place!r}. Remedy: correct it "
                "there."
            ) from error


ALGORITHMS = {
    "ppo": Entry("trainers.ppo:PPOConfig", "trainers.ppo:PPOTrainer"),
    "dqn": Entry("trainers.dqn:DQNConfig", "trainers.dqn:DQNTrainer"),
    "sac": Entry("trainers.sac:SACConfig", "trainers.sac:SACTrainer"),
    "qr-dqn": Entry("trainers.iqn:QRDQNConfig", "trainers.iqn:IQNTrainer"),
    "iqn": Entry("trainers.iqn:IQNConfig", "trainers.iqn:IQNTrainer"),
    "rainbow": Entry("trainers.rainbow:RainbowConfig", "trainers.rainbow:RainbowTrainer"),
    "ddpg": Entry("trainers.ddpg:DDPGConfig", "trainers.ddpg:DDPGTrainer"),
    "td3": Entry("trainers.ddpg:TD3Config", "trainers.ddpg:DDPGTrainer"),
    "ac-iqn": Entry("trainers.ac_iqn:ACIQNConfig", "trainers.ac_iqn:ACIQNTrainer"),
    "sac-options": Entry("trainers.sac_options:SACOptionsConfig", "trainers.sac_options:SACOptionsTrainer"),
    "hybrid-ppo": Entry("trainers.hybrid_ppo:HybridPPOConfig", "trainers.hybrid_ppo:HybridPPOTrainer"),
    "pqn": Entry("trainers.pqn:PQNConfig", "trainers.pqn:PQNTrainer"),
}
"""Algorithms for any env whose actions fit."""

TASKS = (
    "CartPole",
    "Pendulum",
    "Acrobot",
    "MountainCar",
    "MountainCarContinuous",
    "StatelessCartPole",
    "StatelessPendulum",
    "NoisyStatelessCartPole",
    "NoisyStatelessPendulum",
    "TMaze",
    "RepeatPrevious",
    "RepeatFirst",
    "Ferry",
    "HybridTarget",
)
"""Classes of ``torchrl_perf.envs`` that any algorithm may name as its task; systems have tasks of their own."""

ROBOTS = (
    "HalfCheetah",
    "Hopper",
    "Walker2d",
    "Ant",
    "Humanoid",
    "HumanoidStandup",
    "Swimmer",
    "Reacher",
    "Pusher",
    "InvertedPendulum",
    "InvertedDoublePendulum",
)
"""Classes of ``torchrl_perf.envs.mujoco``: Gymnasium's tasks of MuJoCo on the device, which need the extra
``mujoco-warp``. The name with ``-v5`` is Gymnasium's env on the CPU."""

MARINE = "marine"
"""``train marine --agent iqn`` is ``train marine-iqn``."""

MARINE_AGENTS = {"iqn": "IQN", "ac-iqn": "ACIQN", "dqn": "DQN", "rainbow": "Rainbow", "ddpg": "DDPG", "sac": "SAC"}
"""Agents of ``train marine``, and what the names of their parts begin with."""

SYSTEMS = {
    "active-dynamics": Entry(
        "systems.active_dynamics.config:ActiveDynamicsConfig", "systems.active_dynamics.trainer:ActiveDynamicsTrainer"
    ),
    **{
        f"{MARINE}-{agent}": Entry(
            f"systems.marine.config:Marine{name}Config", f"systems.marine.trainer:Marine{name}Trainer"
        )
        for agent, name in MARINE_AGENTS.items()
    },
    "durotaxis": Entry("systems.durotaxis.config:DurotaxisConfig", "systems.durotaxis.trainer:DurotaxisTrainer"),
    "fuel-breaks": Entry(
        "systems.fuel_breaks.config:FuelBreaksConfig", "systems.fuel_breaks.trainer:FuelBreaksTrainer"
    ),
    "fuel-breaks-one-shot": Entry(
        "systems.fuel_breaks.one_shot_config:FuelBreaksOneShotConfig",
        "systems.fuel_breaks.one_shot_trainer:FuelBreaksOneShotTrainer",
    ),
    "options-market": Entry(
        "systems.options_market.config:OptionsMarketConfig", "systems.options_market.trainer:OptionsMarketTrainer"
    ),
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
