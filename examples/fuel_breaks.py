"""A network learns where to break the fuel so that wildfires burn less: DQN, with every step of the loop on one device.

Run it with ``python examples/fuel_breaks.py``; ``--help`` lists the settings. On 10 x 10 cells with 10 breaks it takes
two or three minutes on a CPU core. Expected last lines, give or take:

    burned: policy 0.395 ± 0.006, random 0.668 ± 0.008, column 0.362 ± 0.004, domirank 0.620 ± 0.008, none 0.873 ± ...
    picture: fuel_breaks.png

``torchrl-perf train fuel-breaks`` learns 20 x 20 cells with checkpoints, curves and a resume. This file shows what it
is made of: settings, a trainer whose ``step`` is one iteration (place breaks, store them, learn, measure), and one row
of metrics at a time that comes to the host. In a landscape that is the same everywhere a straight line is hard to beat.

Read it from top to bottom: Config, make_trainer, learn, main.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from torchrl_perf.systems.fuel_breaks import FUEL_BREAKS_PRESETS, FuelBreaksTrainer, PlacementFigures
from torchrl_perf.systems.fuel_breaks.evaluation import compare, draw


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    env: str = "FuelBreaksSmall"
    """Settings to start from: FuelBreaksSmall (10 x 10 cells), FuelBreaks (20 x 20) or FuelBreaksOriginal."""
    total_steps: int | None = None
    """Breaks placed in the whole run; None for those of the settings."""
    fractal: bool = False
    """Hills and patches of vegetation instead of ground that is the same everywhere."""
    fires: int = 1024
    """Fires that each placement is judged by in the end."""
    log_interval: int = 20
    """Iterations between two rows."""
    picture: Path = Path("fuel_breaks.png")
    """Where the picture of breaks and burn probability goes."""
    seed: int = 0
    """Seed of networks, fires and sampling."""
    device: str = "auto"
    """Device of everything."""


def make_trainer(config: Config) -> FuelBreaksTrainer:
    """Env, network, replay buffer and optimiser, as the settings have them."""
    usual = FUEL_BREAKS_PRESETS[config.env]
    settings = dataclasses.replace(
        usual,
        total_steps=config.total_steps or usual.total_steps,
        landscape="fractal" if config.fractal else "uniform",
        seed=config.seed,
        device=config.device,
        logger="none",
    )
    return FuelBreaksTrainer(settings)


def learn(trainer: FuelBreaksTrainer, log_interval: int) -> None:
    """Run all iterations; demonstrations and random breaks come first."""
    iterations = trainer.config.iterations
    for done in range(1, iterations + 1):
        trainer.step()
        if done % log_interval and done != iterations:
            continue
        steps = done * trainer.config.batch_size
        row = trainer.metrics.flush(steps)
        print(f"{steps:>8,} breaks   burned {row['fire/burned']:.3f}   epsilon {row['train/epsilon']:.2f}")


def main(config: Config) -> PlacementFigures:
    """Learns, compares with placements that need no learning, and draws; returns the burned fractions."""
    trainer = make_trainer(config)
    learn(trainer, config.log_interval)
    figures = compare(trainer.policy, trainer.env, fires=config.fires)
    print(figures)
    print(f"picture: {draw(trainer.policy, trainer.env, config.picture, fires=config.fires)}")
    trainer.close()
    return figures


if __name__ == "__main__":
    main(tyro.cli(Config))
