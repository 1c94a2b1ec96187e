"""One run of training on CPU envs, timed after its first two iterations: ours, or Stable-Baselines3's.

    python training_run.py '{"side": "sb3", "algorithm": "ppo", "env": "CartPole-v1", "frames": 4096, ...}'

Prints ``start_s: X`` and ``frames_per_second: X``. The settings are those of :class:`torchrl_perf.bench.training.Case`.
"""

import json
import sys
import time
from typing import Any


def ours(settings: dict[str, Any]) -> list[float]:
    """The time of each iteration of this package's trainer, without files."""
    from torchrl_perf.trainers import PPOConfig, PPOTrainer, SACConfig, SACTrainer

    shared = {
        "env": settings["env"],
        "num_envs": settings["num_envs"],
        "num_steps": settings["num_steps"],
        "total_steps": settings["frames"],
        "device": "cpu",
        "logger": "none",
        "mode": "compile" if settings["side"].endswith("compile") else "auto",
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
    marks = [time.perf_counter()]
    for _ in range(trainer.config.iterations):
        trainer.step()
        trainer.iterations_done += 1
        marks.append(time.perf_counter())
    trainer.close()
    return marks


def sb3(settings: dict[str, Any]) -> list[float]:
    """The same of Stable-Baselines3, over its vector env in one process, the faster one for envs of this size."""
    import torch
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
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
    marks: list[float] = []

    class Marks(BaseCallback):
        """Notes when each iteration begins."""

        def _on_rollout_start(self) -> None:
            marks.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

    model.learn(settings["frames"], callback=Marks())
    return [*marks, time.perf_counter()]


def main() -> None:
    """Runs the side that the settings name."""
    settings = json.loads(sys.argv[1])
    marks = (sb3 if settings["side"] == "sb3" else ours)(settings)
    frames = (len(marks) - 1) * settings["num_envs"] * settings["num_steps"]
    # what comes before the first update of SAC is no training
    first = max(2, settings["learning_starts"] * (len(marks) - 1) // frames + 2)
    rest = frames * (len(marks) - 1 - first) / (len(marks) - 1)
    print(f"start_s: {marks[first] - marks[0]}")
    print(f"frames_per_second: {rest / (marks[-1] - marks[first])}")


if __name__ == "__main__":
    main()
