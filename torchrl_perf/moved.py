"""Where names have gone that were in another package up to 0.1; to be deleted with 0.3."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "trainers": {
        "systems.active_dynamics": (
            "ACTIVE_DYNAMICS_PRESETS",
            "ActiveDynamicsConfig",
            "ActiveDynamicsTrainer",
            "PredictionFigures",
        ),
        "systems.durotaxis": (
            "DUROTAXIS_PRESETS",
            "DurotaxisConfig",
            "DurotaxisTrainer",
            "make_colony_actor",
            "make_colony_critic",
        ),
        "systems.fuel_breaks": (
            "BreakPolicy",
            "FUEL_BREAKS_PRESETS",
            "FuelBreaksConfig",
            "FuelBreaksTrainer",
            "PlacementFigures",
            "make_break_policy",
            "make_fuel_breaks_env",
        ),
        "systems.marine": (
            "MARINE_ACIQN_PRESETS",
            "MARINE_DDPG_PRESETS",
            "MARINE_DQN_PRESETS",
            "MARINE_IQN_PRESETS",
            "MARINE_RAINBOW_PRESETS",
            "MARINE_SAC_PRESETS",
            "MarineACIQNConfig",
            "MarineACIQNTrainer",
            "MarineDDPGConfig",
            "MarineDDPGTrainer",
            "MarineDQNConfig",
            "MarineDQNTrainer",
            "MarineIQNConfig",
            "MarineIQNTrainer",
            "MarineRainbowConfig",
            "MarineRainbowTrainer",
            "MarineSACConfig",
            "MarineSACTrainer",
            "NavigationFigures",
            "Scenarios",
            "make_marine_env",
        ),
        "systems.options_market": (
            "OPTIONS_MARKET_PRESETS",
            "OptionsMarketConfig",
            "OptionsMarketTrainer",
            "make_options_market_env",
        ),
    },
    "metrics": {
        "systems.durotaxis": ("ColonyRecording", "draw_colony", "record_colony", "recorded_colony"),
        "systems.options_market": ("EquityRecording", "draw_equity", "record_equity", "recorded_equity"),
        "systems.fuel_breaks": ("FireMap", "draw_fire_maps", "fire_maps", "record_breaks"),
        "systems.marine": ("animate", "draw_trajectories"),
        "systems.active_dynamics": ("PhasePortrait", "draw_phase_portrait", "draw_prediction_curves"),
    },
    "modules": {
        "systems.active_dynamics": (
            "BeliefFilter",
            "FilteredPolicy",
            "InformationReward",
            "LatentDecoder",
            "LatentDynamics",
            "ObservationEncoder",
            "SeqVAE",
            "UniformInputs",
        ),
    },
    "objectives": {
        "systems.active_dynamics": ("MultiStepELBOLoss", "PredictiveELBOLoss"),
    },
    "trainers.config": {"trainers.ppo": ("PPOConfig", "PRESETS")},
    "trainers.run": {"trainers.run.run": ("RunFolderError", "RunResult", "TrainingDivergedError", "train")},
}
"""Old package, then new one, then names."""

_RENAMED: dict[str, dict[str, tuple[str, str]]] = {
    "trainers": {"GroupAdam": ("trainers", "GuardedAdam")},
}
"""Old package, then old name, then new package and name."""

_MODULES: dict[str, dict[str, str]] = {
    "trainers": {
        "marine": "systems.marine.trainer",
        "marine_config": "systems.marine.config",
        "marine_presets": "systems.marine.presets",
        "marine_networks": "systems.marine.networks",
        "marine_evaluation": "systems.marine.evaluation",
        "durotaxis": "systems.durotaxis.trainer",
        "durotaxis_config": "systems.durotaxis.config",
        "durotaxis_networks": "systems.durotaxis.networks",
        "fuel_breaks": "systems.fuel_breaks.trainer",
        "fuel_breaks_config": "systems.fuel_breaks.config",
        "fuel_breaks_networks": "systems.fuel_breaks.networks",
        "fuel_breaks_evaluation": "systems.fuel_breaks.evaluation",
        "options_market": "systems.options_market.trainer",
        "options_market_config": "systems.options_market.config",
        "options_market_networks": "systems.options_market.networks",
        "options_market_evaluation": "systems.options_market.evaluation",
        "active_dynamics": "systems.active_dynamics.trainer",
        "active_dynamics_config": "systems.active_dynamics.config",
        "active_dynamics_evaluation": "systems.active_dynamics.evaluation",
        "durotaxis_episodes": "systems.durotaxis.evaluation",
        "active_dynamics_model": "systems.active_dynamics.networks",
        "hybrid_ppo_config": "trainers.hybrid_ppo",
        "loop": "trainers.run.loop",
        "run_files": "trainers.run.files",
        "checkpoint": "trainers.run.checkpoint",
        "train_state": "trainers.run.state",
        "numerics": "trainers.run.numerics",
        "memory_estimate": "trainers.run.memory_estimate",
        "memory_floor": "trainers.run.memory_floor",
        "made_of": "trainers.run.made_of",
        "schedules": "trainers.run.schedules",
        "metric_names": "trainers.run.metric_names",
        "fault": "trainers.run.fault",
        "torchrl_hooks": "trainers.torchrl.install",
        "hooks_log": "trainers.torchrl.log",
        "group_adam": "trainers.optimization",
        "dqn_config": "trainers.dqn",
        "iqn_config": "trainers.iqn",
        "rainbow_config": "trainers.rainbow",
        "ddpg_config": "trainers.ddpg",
        "sac_config": "trainers.sac",
        "ac_iqn_config": "trainers.ac_iqn",
        "sac_options_config": "trainers.sac_options",
        "value_config": "trainers.value_based",
        "actor_critic_config": "trainers.off_policy_actor_critic",
        "hooks_replay": "trainers.torchrl.replay",
        "hooks_stepper": "trainers.torchrl.stepper",
    },
    "metrics": {
        "marine_picture": "systems.marine.picture",
        "colony_picture": "systems.durotaxis.picture",
        "fire_picture": "systems.fuel_breaks.picture",
        "equity_picture": "systems.options_market.picture",
        "phase_picture": "systems.active_dynamics.picture",
    },
    "modules": {
        "seq_vae": "systems.active_dynamics.seq_vae",
        "latent_maps": "systems.active_dynamics.latent_maps",
        "latent_dynamics": "systems.active_dynamics.latent_dynamics",
        "information_reward": "systems.active_dynamics.information_reward",
    },
    "objectives": {
        "elbo": "systems.active_dynamics.elbo",
        "predictive_elbo": "systems.active_dynamics.predictive_elbo",
    },
}
"""Old package, then old module, then new one."""


def moved_from(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names have moved: gives them, with a warning that says the new place.

    Args:
        package: its ``__name__``.
    """
    below = package.removeprefix("torchrl_perf.")
    homes = {name: (home, name) for home, names in _NAMES[below].items() for name in names}
    homes |= _RENAMED.get(below, {})

    def moved(name: str) -> Any:
        if name in homes:
            home, now = homes[name]
            new = f"torchrl_perf.{home}"
            found = getattr(importlib.import_module(new), now)
            line = f"from {new} import {now}"
        elif module := _MODULES.get(below, {}).get(name):
            new = f"torchrl_perf.{module}"
            found, line = importlib.import_module(new), f"import {new}"
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} has moved. Remedy: {line}.", DeprecationWarning, stacklevel=2)
        return found

    return moved
