"""One run of training on CPU envs, timed from the first frame to the last: ours, or Stable-Baselines3's.

    python training_run.py '{"side": "sb3", "algorithm": "ppo", "env": "CartPole-v1", "frames": 4096, ...}'

Prints ``frames_per_second: X`` last. The settings are those of :class:`torchrl_perf.bench.training.Case`.
"""

import json
import sys
import time
from typing import Any


def ours(settings: dict[str, Any]) -> float:
    """This package's trainer, without files."""
    from torchrl_perf.trainers import PPOConfig, PPOTrainer, SACConfig, SACTrainer

    shared = {
        "env": settings["env"],
        "num_envs": settings["num_envs"],
        "num_steps": settings["num_steps"],
        "total_steps": settings["frames"],
        "device": "cpu",
        "logger": "none",
    }
    trainer: Any
    if settings["algorithm"] == "ppo":
        passes = {"epochs": settings["epochs"], "minibatches": settings["minibatches"]}
        trainer = PPOTrainer(PPOConfig(**shared, **passes, hidden_size=64, activation="tanh"))
    else:
        trainer = SACTrainer(
            SACConfig(
                **shared,
                hidden_size=256,
                minibatch_size=settings["batch_size"],
                updates_per_iteration=settings["num_envs"] * settings["num_steps"],
                learning_starts=settings["learning_starts"],
            )
        )
    start = time.perf_counter()
    for _ in range(trainer.config.iterations):
        trainer.step()
        trainer.iterations_done += 1
    seconds = time.perf_counter() - start
    trainer.close()
    return trainer.config.iterations * settings["num_envs"] * settings["num_steps"] / seconds


def sb3(settings: dict[str, Any]) -> float:
    """Stable-Baselines3 over its own vector env in one process, the faster one for envs of this size."""
    import torch
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env(settings["env"], n_envs=settings["num_envs"])
    model: Any
    if settings["algorithm"] == "ppo":
        rows = settings["num_envs"] * settings["num_steps"] // settings["minibatches"]
        widths = {"net_arch": [64, 64], "activation_fn": torch.nn.Tanh}
        sizes = {"n_steps": settings["num_steps"], "batch_size": rows, "n_epochs": settings["epochs"]}
        model = PPO("MlpPolicy", envs, policy_kwargs=widths, device="cpu", **sizes)
    else:
        updates = settings["num_envs"] * settings["num_steps"]
        sizes = {"batch_size": settings["batch_size"], "learning_starts": settings["learning_starts"]}
        rhythm = {"train_freq": settings["num_steps"], "gradient_steps": updates}
        model = SAC("MlpPolicy", envs, policy_kwargs={"net_arch": [256, 256]}, device="cpu", **sizes, **rhythm)
    start = time.perf_counter()
    model.learn(settings["frames"])
    return model.num_timesteps / (time.perf_counter() - start)


def main() -> None:
    """Runs the side that the settings name."""
    settings = json.loads(sys.argv[1])
    speed = {"torchrl_perf": ours, "sb3": sb3}[settings["side"]](settings)
    print(f"frames_per_second: {speed}")


if __name__ == "__main__":
    main()
