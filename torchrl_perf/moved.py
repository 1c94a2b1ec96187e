"""Where names have gone that were in another package up to 0.1; to be deleted with 0.3."""

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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
    "trainers.off_policy": {"trainers.off_policy.trainer": ("OffPolicyTrainer",)},
    "trainers.on_policy": {"trainers.on_policy.trainer": ("OnPolicyTrainer",)},
    "trainers.run": {"trainers.run.run": ("RunFolderError", "RunResult", "TrainingDivergedError", "train")},
}
"""Old package, then new one, then names."""

_RENAMED: dict[str, dict[str, tuple[str, str]]] = {
    "trainers": {"GroupAdam": ("trainers", "GuardedAdam")},
}
"""Old package, then old name, then new package and name."""

_MODULES = {
    "bench.baselines": "bench.peers.baselines",
    "bench.flashbax_peer": "bench.peers.flashbax",
    "bench.jax_peer": "bench.peers.jax",
    "functional.copies": "functional.rows.copies",
    "functional.distributional": "functional.losses.distributional",
    "functional.dqn": "functional.losses.dqn",
    "functional.elbo": "functional.losses.elbo",
    "functional.hybrid": "functional.losses.hybrid",
    "functional.icm": "functional.losses.icm",
    "functional.information": "functional.losses.information",
    "functional.missing": "functional.rows.missing",
    "functional.nonfinite": "functional.rows.nonfinite",
    "functional.options": "functional.losses.options",
    "functional.permutation": "functional.rows.permutation",
    "functional.ppo": "functional.losses.ppo",
    "functional.risk": "functional.losses.risk",
    "functional.sac": "functional.losses.sac",
    "functional.selection": "functional.rows.selection",
    "functional.shuffle": "functional.rows.shuffle",
    "functional.valid": "functional.rows.valid",
    "functional.windows": "functional.rows.windows",
    "metrics.colony_picture": "systems.durotaxis.picture",
    "metrics.equity_picture": "systems.options_market.picture",
    "metrics.fire_picture": "systems.fuel_breaks.picture",
    "metrics.marine_picture": "systems.marine.picture",
    "metrics.phase_picture": "systems.active_dynamics.picture",
    "modules.categorical_q": "modules.values.categorical_q",
    "modules.cnn": "modules.encoders.cnn",
    "modules.component_values": "modules.values.component_values",
    "modules.conv_q": "modules.values.conv_q",
    "modules.information_reward": "systems.active_dynamics.information_reward",
    "modules.joined": "modules.encoders.joined",
    "modules.latent_dynamics": "systems.active_dynamics.latent_dynamics",
    "modules.latent_maps": "systems.active_dynamics.latent_maps",
    "modules.node_encoder": "modules.encoders.node_encoder",
    "modules.q_networks": "modules.values.q_networks",
    "modules.quantile": "modules.values.quantile",
    "modules.risk": "modules.values.risk",
    "modules.seq_vae": "systems.active_dynamics.seq_vae",
    "modules.set_encoder": "modules.encoders.set_encoder",
    "modules.value_head": "modules.values.value_head",
    "objectives.elbo": "systems.active_dynamics.elbo",
    "objectives.predictive_elbo": "systems.active_dynamics.predictive_elbo",
    "runtime._frames": "runtime.waits.frames",
    "runtime._host_copies": "runtime.waits.host_copies",
    "runtime._wait_rules": "runtime.waits.rules",
    "runtime._waits": "runtime.waits.operators",
    "runtime.audit": "runtime.waits.audit",
    "runtime.audit_report": "runtime.waits.audit_report",
    "runtime.doctor_checks": "runtime.doctor.checks",
    "runtime.doctor_device": "runtime.doctor.device",
    "runtime.doctor_host": "runtime.doctor.host",
    "runtime.doctor_software": "runtime.doctor.software",
    "runtime.interception": "runtime.waits.interception",
    "runtime.loop_marks": "runtime.waits.loop_marks",
    "runtime.replacements": "runtime.waits.replacements",
    "runtime.script_audit": "runtime.waits.script_audit",
    "runtime.sites": "runtime.waits.sites",
    "trainers.ac_iqn_config": "trainers.ac_iqn",
    "trainers.active_dynamics": "systems.active_dynamics.trainer",
    "trainers.active_dynamics_config": "systems.active_dynamics.config",
    "trainers.active_dynamics_evaluation": "systems.active_dynamics.evaluation",
    "trainers.active_dynamics_model": "systems.active_dynamics.networks",
    "trainers.actor_critic_config": "trainers.off_policy.actor_critic",
    "trainers.adam_settings": "trainers.optim.settings",
    "trainers.checkpoint": "trainers.run.checkpoint",
    "trainers.ddpg_config": "trainers.ddpg",
    "trainers.deterministic": "trainers.off_policy.deterministic",
    "trainers.dqn_config": "trainers.dqn",
    "trainers.durotaxis": "systems.durotaxis.trainer",
    "trainers.durotaxis_config": "systems.durotaxis.config",
    "trainers.durotaxis_episodes": "systems.durotaxis.evaluation",
    "trainers.durotaxis_networks": "systems.durotaxis.networks",
    "trainers.fault": "trainers.run.fault",
    "trainers.fuel_breaks": "systems.fuel_breaks.trainer",
    "trainers.fuel_breaks_config": "systems.fuel_breaks.config",
    "trainers.fuel_breaks_evaluation": "systems.fuel_breaks.evaluation",
    "trainers.fuel_breaks_networks": "systems.fuel_breaks.networks",
    "trainers.group_adam": "trainers.optim.optimization",
    "trainers.hooks_log": "trainers.torchrl.log",
    "trainers.hooks_replay": "trainers.torchrl.replay",
    "trainers.hooks_stepper": "trainers.torchrl.stepper",
    "trainers.hybrid_ppo_config": "trainers.hybrid_ppo",
    "trainers.iqn_config": "trainers.iqn",
    "trainers.loop": "trainers.run.loop",
    "trainers.made_of": "trainers.run.made_of",
    "trainers.marine": "systems.marine.trainer",
    "trainers.marine_config": "systems.marine.config",
    "trainers.marine_evaluation": "systems.marine.evaluation",
    "trainers.marine_networks": "systems.marine.networks",
    "trainers.marine_presets": "systems.marine.presets",
    "trainers.memory_estimate": "trainers.run.memory_estimate",
    "trainers.memory_floor": "trainers.run.memory_floor",
    "trainers.metric_names": "trainers.run.metric_names",
    "trainers.numerics": "trainers.run.numerics",
    "trainers.off_policy_actor_critic": "trainers.off_policy.actor_critic",
    "trainers.off_policy_algorithm": "trainers.off_policy.algorithm",
    "trainers.off_policy_config": "trainers.off_policy.config",
    "trainers.off_policy_task": "trainers.off_policy.task",
    "trainers.on_policy_algorithm": "trainers.on_policy.algorithm",
    "trainers.optimization": "trainers.optim.optimization",
    "trainers.options_market": "systems.options_market.trainer",
    "trainers.options_market_config": "systems.options_market.config",
    "trainers.options_market_evaluation": "systems.options_market.evaluation",
    "trainers.options_market_networks": "systems.options_market.networks",
    "trainers.rainbow_config": "trainers.rainbow",
    "trainers.run_files": "trainers.run.files",
    "trainers.sac_config": "trainers.sac",
    "trainers.sac_options_config": "trainers.sac_options",
    "trainers.schedules": "trainers.run.schedules",
    "trainers.torchrl_hooks": "trainers.torchrl.install",
    "trainers.train_state": "trainers.run.state",
    "trainers.twin_critics": "trainers.off_policy.twin_critics",
    "trainers.value_based": "trainers.off_policy.value_based",
    "trainers.value_config": "trainers.off_policy.value_based",
}
"""Old module, then new one; without modules whose name their package exports, which importing them would replace."""


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
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} has moved. Remedy: {line}.", DeprecationWarning, stacklevel=2)
        return found

    return moved


class _MovedModules(MetaPathFinder, Loader):
    """Finds modules that have moved: ``from old.module import name`` goes on, with a warning."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """That of an old module alone."""
        return ModuleSpec(fullname, self) if fullname.removeprefix("torchrl_perf.") in _MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the new module in the place of the old one."""
        new = f"torchrl_perf.{_MODULES[module.__name__.removeprefix('torchrl_perf.')]}"
        warnings.warn(f"{module.__name__} has moved. Remedy: import {new}.", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)


def install() -> None:
    """Lets old modules be imported; asked last, so that a module that is there costs nothing."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
