"""Settings that are known to work with envs that are no tasks of the package: Gymnasium's, Atari games, VMAS."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torchrl_perf.envs.registry import registered
from torchrl_perf.registry import ROBOTS

__all__ = ["KNOWN", "settings_for"]

Settings = Mapping[str, Mapping[str, Any]]

_PPO_CPU: dict[str, Any] = {
    "num_envs": 8,
    "num_steps": 256,
    "total_steps": 1_000_000,
    "minibatches": 32,
    "epochs": 10,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "entropy_coeff": 0.0,
    "log_interval": 5,
}
_DQN_CPU: dict[str, Any] = {
    "num_envs": 8,
    "num_steps": 1,
    "total_steps": 500_000,
    "learning_rate": 5e-4,
    "updates_per_iteration": 4,
    "minibatch_size": 128,
    "hidden_size": 256,
    "target_interval": 250,
    "log_interval": 500,
}
_ACTOR_CRITIC_CPU: dict[str, Any] = {
    "total_steps": 1_000_000,
    "learning_starts": 10_000,
    "critic_learning_rate": 3e-4,
    "log_interval": 500,
}
_CPU: Settings = {
    "ppo": _PPO_CPU,
    "hybrid-ppo": _PPO_CPU,
    "pqn": {"num_envs": 8, "num_steps": 128, "total_steps": 1_000_000, "learning_rate": 5e-4, "eps_frames": 200_000},
    **dict.fromkeys(("dqn", "iqn", "qr-dqn", "rainbow"), _DQN_CPU),
    **dict.fromkeys(("sac", "td3", "ddpg", "ac-iqn"), _ACTOR_CRITIC_CPU),
}
"""Of envs that step on the CPU, in the absence of better ones: few envs, whose steps are what takes the time."""


_LOCOMOTION: Settings = {
    **_CPU,
    # observations and rewards of joints have many scales
    "ppo": {**_PPO_CPU, "normalize_observations": True, "normalize_rewards": True},
}
"""Of MuJoCo's robots that walk."""

_ROBOT_PPO: dict[str, Any] = {
    "num_envs": 4096,
    "num_steps": 24,
    "total_steps": 60_000_000,
    "epochs": 4,
    "minibatches": 16,
    "learning_rate": 3e-4,
    "anneal_learning_rate": False,
    "gamma": 0.97,
    "clip_epsilon": 0.3,
    "entropy_coeff": 1e-3,
    "max_grad_norm": 1.0,
    "initial_scale": 0.6,
    "hidden_sizes": (256, 256),
    "activation": "silu",
    "normalize_observations": True,
    "normalize_rewards": True,
    "log_interval": 10,
}
_ROBOT_REPLAY: dict[str, Any] = {
    "num_envs": 1024,
    "total_steps": 20_000_000,
    "capacity": 1_048_576,
    "minibatch_size": 8_192,
    "updates_per_iteration": 4,
    "learning_starts": 20_480,
    "n_step": 3,
    "actor_learning_rate": 3e-4,
    "critic_learning_rate": 3e-4,
    "tau": 0.01,
    "hidden_sizes": (512, 256),
    "critic_hidden_sizes": (512, 512),
    "layer_norm": True,
    "normalize_observations": True,
    "log_interval": 200,
}
"""Few updates of large batches from many worlds, as FastTD3 (arXiv:2505.22642) and FastSAC (arXiv:2512.01996) do.
FastTD3's own code has targets that follow faster, ``tau=0.1``, and another noise and critic."""
_ROBOT_SAC: dict[str, Any] = {**_ROBOT_REPLAY, "temperature_learning_rate": 3e-4, "initial_temperature": 0.1}
_ROBOT: Settings = {"ppo": _ROBOT_PPO, "sac": _ROBOT_SAC, "td3": _ROBOT_REPLAY, "ddpg": _ROBOT_REPLAY}


def _robot(**ppo: Any) -> Settings:
    """Settings of a robot whose PPO differs from that of the others."""
    return {**_ROBOT, "ppo": {**_ROBOT_PPO, **ppo}}


_BALANCE: dict[str, Any] = {
    "num_envs": 1024,
    "num_steps": 32,
    "total_steps": 40_000_000,
    "epochs": 5,
    "minibatches": 8,
    "learning_rate": 5e-4,
    "desired_kl": 0.02,
    "kl_estimate": "closed_form",
    "min_learning_rate": 5e-5,
    "max_learning_rate": 3e-3,
    "gamma": 0.99,
    "clip_epsilon": 0.2,
    "entropy_coeff": 0.0,
    "initial_scale": 1.0,
    "hidden_sizes": (128, 128),
    "activation": "tanh",
}
"""Of robots that are paid for standing: iterations are what counts, so they are small, but long enough to see a hop,
and a policy goes as far as ``desired_kl`` allows. With a discount of 0.995 a fall costs more than a step pays:
Hopper learns to stand."""

_ROBOTS: dict[str, Settings] = {
    **dict.fromkeys(ROBOTS, _ROBOT),
    # networks that are one kernel, and half as many updates: steps of the env are four times as fast as others'
    "HalfCheetah": _robot(
        total_steps=40_000_000,
        num_steps=32,
        minibatches=8,
        learning_rate=5e-4,
        anneal_learning_rate=True,
        hidden_sizes=(128, 128),
        activation="tanh",
    ),
    **dict.fromkeys(("Hopper", "Walker2d"), _robot(**_BALANCE)),
    "Ant": _robot(total_steps=20_000_000, learning_rate=5e-4, anneal_learning_rate=True),
    # forces within +-0.4
    **dict.fromkeys(("Humanoid", "HumanoidStandup"), _robot(gamma=0.98, initial_scale=0.4)),
    # a stroke pays late (arXiv:2208.07587)
    "Swimmer": _robot(gamma=0.999),
}

_ATARI_DQN: dict[str, Any] = {
    "num_envs": 16,
    "num_steps": 1,
    "total_steps": 10_000_000,
    "capacity": 100_000,
    "compact": True,
    "minibatch_size": 32,
    "updates_per_iteration": 4,
    "learning_starts": 20_000,
    "learning_rate": 1e-4,
    "target_interval": 1_000,
    "eps_end": 0.01,
    "eps_frames": 100_000,
    "hidden_sizes": (),  # the features of the image, then a linear layer, as in the DQN of 2015
    "log_interval": 500,
}
_ATARI_PPO: dict[str, Any] = {
    "num_envs": 8,
    "num_steps": 128,
    "total_steps": 10_000_000,
    "epochs": 4,
    "minibatches": 4,
    "learning_rate": 2.5e-4,
    "gamma": 0.99,
    "clip_epsilon": 0.1,
    "hidden_sizes": (),
    "log_interval": 10,
}
_DISTRIBUTIONAL: dict[str, Any] = {**_ATARI_DQN, "hidden_sizes": None, "hidden_size": 512}
_ATARI: Settings = {
    "ppo": _ATARI_PPO,
    "dqn": _ATARI_DQN,
    **dict.fromkeys(("iqn", "qr-dqn"), _DISTRIBUTIONAL),
    "rainbow": {**_DISTRIBUTIONAL, "v_min": -10.0, "v_max": 10.0},
}

KNOWN: dict[str, Settings] = {
    **_ROBOTS,
    "ALE/*": _ATARI,
    "vmas:*": {
        "ppo": {
            "num_envs": 192,  # a multiple of 2, 3, 4 and 6 agents
            "num_steps": 50,
            "total_steps": 400_000,
            "epochs": 6,
            "minibatches": 6,
            "learning_rate": 1e-3,
            "gamma": 0.95,
            "lmbda": 0.9,
            "entropy_coeff": 1e-3,
            "log_interval": 4,
        },
        **{name: {"num_envs": 48} for name in ("sac", "td3", "ddpg", "ac-iqn")},
    },
    **dict.fromkeys((f"{name}-*" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")), _LOCOMOTION),
    "LunarLander-*": {
        **_CPU,
        "ppo": {
            **_PPO_CPU,
            "num_envs": 16,
            "num_steps": 1024,  # a landing takes up to a thousand steps
            "minibatches": 256,
            "epochs": 4,
            "gamma": 0.999,
            "lmbda": 0.98,
            "entropy_coeff": 0.01,
            "log_interval": 1,
        },
        "dqn": {**_DQN_CPU, "total_steps": 200_000},
    },
    "*-v[0-9]*": _CPU,
}
"""Settings of algorithms by patterns of names; the first that fits counts."""


def settings_for(env: str, algorithm: str) -> dict[str, Any]:
    """Settings of an algorithm that are known to work with an env; none for one that nothing is known of.

    Args:
        env: its name. What it was registered with comes first, then :data:`KNOWN`; a class or function of a user's is
            known by its registration alone.
        algorithm: such as ``"ppo"``.
    """
    if entry := registered().get(env):
        return dict(entry.settings.get(algorithm, {}))
    name = re.sub(r"^gym:", "", env)
    settings = next((found for pattern, found in KNOWN.items() if fnmatchcase(name, pattern)), {})
    return dict(settings.get(algorithm, {}))
