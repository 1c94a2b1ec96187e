"""Settings of the navigation agents for the whole curriculum, and for one vessel in an empty world."""

from typing import Any

from torchrl_perf.systems.marine.config import (
    MarineACIQNConfig,
    MarineDDPGConfig,
    MarineDQNConfig,
    MarineIQNConfig,
    MarineRainbowConfig,
    MarineSACConfig,
)

# The curriculum of six million steps. Updates are fewer and larger than for a single env: 8 rows are learnt from for
# each env step, so that an iteration is a few large kernels.
#
# An overestimate of the value of staying where one is keeps itself up: it is its own target, and falls by
# 1 - gamma^n in the time in which the targets follow the networks. With n = 1 and tau = .005 that takes 20,000 updates,
# more than a run of a million steps has, and vessels circled near their goals for as long. Rewards of several steps and
# faster targets bring it to 1,000, and for hard targets of 500 updates from 50,000 to 3,400. SAC takes the lower of two
# critics and has no such fault: with them .70 and .91 of three vessels arrived, with slow targets .89 to .97; so of IQN
# .78 to .89, and .89 to .94. DDPG has it, yet with them .80, .78 and .49 arrived, and .82 to .92 with slow targets.
_WHOLE: dict[str, Any] = {
    "num_envs": 256,
    "num_steps": 4,
    "total_steps": 6_000_000,
    "gamma": 0.99,
    "capacity": 1_000_000,
    "minibatch_size": 512,
    "updates_per_iteration": 16,
    "learning_starts": 10_000,
    "max_grad_norm": 0.5,
    "hidden_size": 128,
    "log_interval": 20,
    "checkpoint_interval": 500,
}
_WHOLE_VALUES: dict[str, Any] = {
    **_WHOLE,
    "n_step": 3,
    "learning_rate": 3e-4,
    "target_interval": 100,
    "eps_start": 0.6,
    "eps_end": 0.05,
    "eps_frames": 1_500_000,
}
_WHOLE_ACTORS: dict[str, Any] = {
    **_WHOLE,
    "n_step": 5,
    "actor_learning_rate": 1e-4,
    "critic_learning_rate": 3e-4,
    "tau": 0.02,
}
_SLOW_VALUES: dict[str, Any] = {"n_step": 1, "target_interval": 500}
_SLOW_ACTORS: dict[str, Any] = {"n_step": 1, "tau": 0.005}
_WHOLE_NOISE: dict[str, Any] = {"noise_start": 0.3, "noise_end": 0.05, "noise_frames": 1_500_000}

# One vessel, no obstacle, no current, a goal at least 40 m away.
_EMPTY: dict[str, Any] = {
    "env": "MarineEmpty",
    "max_robots": 1,
    "max_obstacles": 0,
    "max_cores": 0,
    "stage_frames": "0",
    "stage_robots": "1",
    "stage_obstacles": "0",
    "stage_distance": "40",
    "max_episode_steps": 200,
    "self_size": 32,
    "object_size": 20,
    "num_envs": 32,
    "num_steps": 4,
    "total_steps": 120_000,
    "gamma": 0.98,
    "capacity": 120_000,
    "minibatch_size": 128,
    "updates_per_iteration": 16,
    "learning_starts": 2_000,
    "max_grad_norm": 10.0,
    "hidden_size": 64,
    "log_interval": 20,
}
_EMPTY_VALUES: dict[str, Any] = {
    **_EMPTY,
    "n_step": 3,
    "learning_rate": 1e-3,
    "anneal_learning_rate": True,
    "target_interval": 200,
    "eps_start": 0.6,
    "eps_end": 0.05,
    "eps_frames": 40_000,
}
_EMPTY_ACTORS: dict[str, Any] = {**_EMPTY, "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "tau": 0.01}
_EMPTY_NOISE: dict[str, Any] = {"noise_start": 0.4, "noise_end": 0.1, "noise_frames": 40_000}

# the least and the greatest possible discounted return
_ATOMS: dict[str, Any] = {"v_min": -20.0, "v_max": 60.0}
_PRIORITIES: dict[str, Any] = {"alpha": 0.5, "beta": 0.4}

MARINE_DQN_PRESETS: dict[str, MarineDQNConfig] = {
    "MarineNavigation": MarineDQNConfig(**_WHOLE_VALUES),
    "MarineEmpty": MarineDQNConfig(**_EMPTY_VALUES),
}
"""Settings of DQN, by env name."""

MARINE_IQN_PRESETS: dict[str, MarineIQNConfig] = {
    "MarineNavigation": MarineIQNConfig(**{**_WHOLE_VALUES, **_SLOW_VALUES}),
    "MarineEmpty": MarineIQNConfig(**_EMPTY_VALUES, double=True, num_cosines=32),
}
"""Settings of IQN, by env name."""

MARINE_RAINBOW_PRESETS: dict[str, MarineRainbowConfig] = {
    "MarineNavigation": MarineRainbowConfig(
        **{**_WHOLE_VALUES, **_ATOMS, **_PRIORITIES, "eps_start": 0.0, "eps_end": 0.0}
    ),
    "MarineEmpty": MarineRainbowConfig(**{**_EMPTY_VALUES, **_ATOMS, **_PRIORITIES}),
}
"""Settings of Rainbow, by env name."""

MARINE_DDPG_PRESETS: dict[str, MarineDDPGConfig] = {
    "MarineNavigation": MarineDDPGConfig(**{**_WHOLE_ACTORS, **_SLOW_ACTORS, **_WHOLE_NOISE}),
    "MarineEmpty": MarineDDPGConfig(**_EMPTY_ACTORS, **_EMPTY_NOISE),
}
"""Settings of DDPG, by env name."""

MARINE_ACIQN_PRESETS: dict[str, MarineACIQNConfig] = {
    "MarineNavigation": MarineACIQNConfig(**_WHOLE_ACTORS, **_WHOLE_NOISE),
    "MarineEmpty": MarineACIQNConfig(**_EMPTY_ACTORS, **_EMPTY_NOISE, num_cosines=32),
}
"""Settings of AC-IQN, by env name."""

MARINE_SAC_PRESETS: dict[str, MarineSACConfig] = {
    "MarineNavigation": MarineSACConfig(
        **{**_WHOLE_ACTORS, **_SLOW_ACTORS}, initial_temperature=0.078, learn_temperature=False
    ),
    "MarineEmpty": MarineSACConfig(**_EMPTY_ACTORS, initial_temperature=0.078, learn_temperature=False),
}
"""Settings of SAC, by env name."""
