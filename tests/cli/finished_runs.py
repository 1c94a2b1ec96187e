"""Small runs that are over, for the commands that read one."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from torchrl_perf.registry import entry_of
from torchrl_perf.trainers import train

SETTINGS = {
    "ppo": {"num_envs": 4, "num_steps": 16, "total_steps": 640, "minibatches": 2, "hidden_size": 32},
    "dqn": {
        "num_envs": 4,
        "num_steps": 4,
        "total_steps": 320,
        "capacity": 400,
        "learning_starts": 32,
        "minibatch_size": 16,
    },
    "sac": {"num_envs": 4, "total_steps": 880, "capacity": 1000, "learning_starts": 800},
    "sac-options": {
        "num_envs": 4,
        "num_steps": 10,
        "total_steps": 400,
        "capacity": 400,
        "learning_starts": 80,
        "minibatch_size": 16,
    },
    "hybrid-ppo": {"num_envs": 4, "num_steps": 8, "total_steps": 320, "minibatches": 2},
    "marine-iqn": {
        **{"num_envs": 2, "num_steps": 4, "total_steps": 160, "max_robots": 2, "max_obstacles": 1, "stage_frames": "0"},
        **{"stage_robots": "2", "stage_obstacles": "1", "stage_distance": "10", "max_episode_steps": 12},
        **{
            "hidden_size": 16,
            "self_size": 8,
            "object_size": 20,
            "capacity": 240,
            "learning_starts": 24,
            "minibatch_size": 16,
        },
    },
    "durotaxis": {
        **{"num_envs": 2, "num_steps": 8, "total_steps": 64, "critical_nodes": 12, "encoder_width": 8},
        **{"simplex_groups": 2, "minibatches": 2, "hidden_size": 32, "max_episode_steps": 20},
    },
    "fuel-breaks": {
        **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "size": 6, "budget": 0.12, "fires": 4, "blocks": 1},
        **{"hidden_size": 4, "capacity": 64, "minibatch_size": 16, "updates_per_iteration": 2, "learning_starts": 32},
    },
    "options-market": {
        **{"num_envs": 4, "num_steps": 4, "total_steps": 160, "window": 2, "max_episode_steps": 20, "hidden_size": 16},
        **{"capacity": 64, "minibatch_size": 16, "updates_per_iteration": 2, "learning_starts": 16},
        **{"option_capacity": 16, "max_option_share": 1.0, "min_options_used": 1},
    },
    "active-dynamics": {"num_envs": 4, "num_steps": 25, "total_steps": 200, "max_episode_steps": 30, "history": 100},
}
WITHOUT_PRESET = ("fuel-breaks", "options-market")


@cache
def finished(name: str, seed: int = 0, **options) -> Path:
    """The folder of a run of an algorithm or system; made once, and not to be changed."""
    kind = entry_of(name)
    settings = {"device": "cpu", "mode": "eager", "log_interval": 1, **SETTINGS[name], **options}
    config = kind.load("config")
    make = config.without_task if name in WITHOUT_PRESET else config
    trainer = kind.load("trainer")(make(**settings, seed=seed, run_dir=mkdtemp()))
    try:
        return train(trainer, progress=False).run_dir
    finally:
        trainer.close()
