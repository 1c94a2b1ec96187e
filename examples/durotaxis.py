"""A colony learns to climb a stiffness gradient: PPO, with every step of the loop on one device.

Run it with ``python examples/durotaxis.py``; ``--help`` lists the settings. A small colony on a small substrate takes
about a quarter of a minute on two CPU cores. Expected last lines:

    success of the last 100 episodes: 99%
    picture: colony.png

``torchrl-perf train durotaxis`` learns the whole task, with checkpoints, curves and a resume. This file shows what it
is made of: a config, a trainer whose ``step`` is one iteration (collect, advantages of each reward component,
minibatches until the divergence is reached, metrics), and one row of metrics at a time that comes to the host.

The policy has to learn to delete almost half of the nodes each time, since the colony over-grows otherwise, and to
place the children far ahead. Read it from top to bottom: Config, make_trainer, learn, draw, main.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.systems.durotaxis import DurotaxisConfig, DurotaxisTrainer
from torchrl_perf.systems.durotaxis.picture import draw_colony, record_colony


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    num_envs: int = 64
    """Colonies that run at once (N)."""
    num_steps: int = 16
    """Steps of each colony in one iteration (T)."""
    total_steps: int = 50_000
    """Env steps of the whole run."""
    critical_nodes: int = 30
    """An episode ends when a colony has more nodes than this."""
    size: float = 100.0
    """Width and height of the substrate."""
    per_node: bool = False
    """Choose for each node whether it is deleted, instead of a share of the colony."""
    log_interval: int = 10
    """Iterations between two rows."""
    picture: Path = Path("colony.png")
    """Where the picture of a colony goes."""
    seed: int = 0
    """Seed of networks, colonies and sampling."""
    device: str = "auto"
    """Device of everything."""


def make_trainer(config: Config) -> DurotaxisTrainer:
    """Env, encoders, losses and optimiser, with small networks that suit small colonies."""
    settings = DurotaxisConfig(
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        total_steps=config.total_steps,
        critical_nodes=config.critical_nodes,
        width=config.size,
        height=config.size,
        actions="per_node" if config.per_node else "global",
        encoder_width=16,
        seed=config.seed,
        device=config.device,
        logger="none",
    )
    return DurotaxisTrainer(settings)


def learn(trainer: DurotaxisTrainer, log_interval: int) -> float:
    """Run all iterations; returns the share of successes of the last finished episodes."""
    success, iterations = 0.0, trainer.config.iterations
    for done in range(1, iterations + 1):
        trainer.step()
        if done % log_interval and done != iterations:
            continue
        steps = done * trainer.config.batch_size
        row = trainer.metrics.flush(steps)  # the only copy to the host
        success = row.get("episode/success", 0.0)
        print(
            f"{steps:>9,} steps   success {success:5.1%}   over-growth {row.get('episode/overgrowth', 0.0):5.1%}   "
            f"return {row.get('episode/mean_return', 0.0):5.2f}   nodes {row['colony/nodes']:5.1f}   "
            f"kl {row['train/kl']:.4f}"
        )
    return success


def draw(trainer: DurotaxisTrainer, path: Path) -> Path:
    """A picture of one colony under the policy without noise."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        # an env of its own: the trainer's is in the middle of its episodes
        recording = record_colony(trainer.make_env(), trainer.actor, max_steps=200)
    return draw_colony(recording, path)


def main(config: Config) -> float:
    """Trains and draws; returns the share of successes."""
    torch.set_num_threads(1)  # networks this small gain nothing from a second core
    trainer = make_trainer(config)
    success = learn(trainer, config.log_interval)
    path = draw(trainer, config.picture)
    trainer.close()
    print(f"success of the last 100 episodes: {success:.0%}")
    print(f"picture: {path}")
    return success


if __name__ == "__main__":
    main(tyro.cli(Config))
