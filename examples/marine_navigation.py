"""Vessels learn to navigate with one policy for all: train, evaluate on fixed scenarios, draw their paths.

Run it with ``python examples/marine_navigation.py``; ``--help`` lists the settings. It trains five vessels among four
vortices for some minutes on two CPU cores and compares them with a scripted controller. The last lines are like

    scripted: 500 vessels: ...
    sac: 500 vessels: ...
    marine/trajectories.png marine/trajectories.gif

``--env MarineEmpty`` is one vessel in an empty world, which learns in half of the time. On a GPU the whole iteration
(every vessel's step, replay buffer, updates, metrics) is one CUDA graph. The curriculum of six million steps with up to
five vessels and four obstacles is ``--env MarineNavigation``, or, with checkpoints and logs, ``torchrl-perf train
marine --agent sac``.

Read it from top to bottom: Config, make_trainer, train, compare, draw, main.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from torchrl_perf.envs.marine import record
from torchrl_perf.systems.marine import presets as marine_presets
from torchrl_perf.systems.marine import trainer as marine
from torchrl_perf.systems.marine.evaluation import NavigationFigures, Scenarios, evaluate, scripted, start
from torchrl_perf.systems.marine.picture import animate, draw_trajectories

# trainer and settings of each agent; the first three choose among 25 actions
AGENTS = {
    "iqn": (marine.MarineIQNTrainer, marine_presets.MARINE_IQN_PRESETS),
    "dqn": (marine.MarineDQNTrainer, marine_presets.MARINE_DQN_PRESETS),
    "rainbow": (marine.MarineRainbowTrainer, marine_presets.MARINE_RAINBOW_PRESETS),
    "ac-iqn": (marine.MarineACIQNTrainer, marine_presets.MARINE_ACIQN_PRESETS),
    "ddpg": (marine.MarineDDPGTrainer, marine_presets.MARINE_DDPG_PRESETS),
    "sac": (marine.MarineSACTrainer, marine_presets.MARINE_SAC_PRESETS),
}

# five vessels and four vortices, on the small networks of an empty world; each step of an env is one of five vessels
CURRENTS = {"max_robots": 5, "max_cores": 4, "stage_robots": "5", "stage_cores": "4", "stage_distance": "30"}
CURRENTS |= {"num_envs": 16, "total_steps": 20_000}


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    agent: Literal["iqn", "dqn", "rainbow", "ac-iqn", "ddpg", "sac"] = "sac"
    """What learns."""
    env: Literal["currents", "MarineEmpty", "MarineNavigation"] = "currents"
    """Five vessels among vortices, one vessel in an empty world, or the whole curriculum."""
    total_steps: int | None = None
    """Env steps of the training; None for those of the task's settings."""
    num_scenarios: int = 100
    """Fixed worlds that policies are compared in."""
    folder: Path = Path("marine")
    """Where the pictures go."""
    seed: int = 0
    """Seed of networks, worlds and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where everything runs."""


def make_trainer(config: Config) -> Any:
    """The agent's trainer: each place of a vessel is a row, and all rows share one policy."""
    kind, presets = AGENTS[config.agent]
    changes = {"seed": config.seed, "device": config.device}
    preset = "MarineEmpty" if config.env == "currents" else config.env
    if config.env == "currents":
        changes |= CURRENTS
    if config.total_steps is not None:
        changes["total_steps"] = config.total_steps
    return kind(dataclasses.replace(presets[preset], **changes))


def train(trainer: Any) -> None:
    """All iterations, with a line now and then: the only copies to the host."""
    iterations = trainer.config.iterations
    for done in range(1, iterations + 1):
        trainer.step()
        if done % max(1, iterations // 10) == 0:
            row = trainer.metrics.flush(done * trainer.config.batch_size)
            names = ("episode/mean_return", "navigation/success", "navigation/collision")
            words = "   ".join(f"{name} {row.get(name, float('nan')):6.2f}" for name in names)
            print(f"{done * trainer.config.batch_size:>9,} steps   {words}")


def compare(trainer: Any, config: Config) -> tuple[NavigationFigures, NavigationFigures, Scenarios]:
    """The scripted controller and the trained policy, in the same worlds."""
    worlds = {
        "currents": {"robots": 5, "cores": 4, "distance": 30.0, "max_episode_steps": 200},
        "MarineEmpty": {"robots": 1, "exact": True, "max_episode_steps": 200},
        "MarineNavigation": {"robots": 5, "obstacles": 4},
    }
    scenarios = Scenarios(count=config.num_scenarios, **worlds[config.env])
    by_script = scenarios.env("continuous", config.device)
    learnt = scenarios.env("discrete" if config.agent in marine.DISCRETE else "continuous", config.device)
    return evaluate(scripted(by_script), scenarios, by_script), evaluate(trainer.policy, scenarios, learnt), scenarios


def draw(trainer: Any, scenarios: Scenarios, config: Config) -> list[Path]:
    """A picture of the first worlds, and an animation of the first one."""
    few = dataclasses.replace(scenarios, count=min(4, scenarios.count))
    env = few.env("discrete" if config.agent in marine.DISCRETE else "continuous", config.device)
    start(few, env)
    recording = record(env, trainer.policy, steps=min(few.max_episode_steps, 120))
    config.folder.mkdir(parents=True, exist_ok=True)
    picture = draw_trajectories(recording, config.folder / "trajectories.png", title=f"{config.agent}, trained")
    return [picture, animate(recording, config.folder / "trajectories.gif")]


def main(config: Config) -> NavigationFigures:
    """Trains, compares and draws; returns what became of the trained policy's vessels."""
    trainer = make_trainer(config)
    train(trainer)
    by_script, learnt, scenarios = compare(trainer, config)
    print(f"scripted: {by_script}\n{config.agent}: {learnt}")
    print(*draw(trainer, scenarios, config))
    trainer.close()
    return learnt


if __name__ == "__main__":
    main(tyro.cli(Config))
