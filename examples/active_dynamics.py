"""Learn an unknown vector field from spike counts, while choosing the inputs that tell most about it.

Run it with ``python examples/active_dynamics.py``; ``--help`` lists the settings. Two runs, one with inputs that are
planned for D-optimal information and one with random ones, take a few minutes on two CPU cores. Expected last lines,
where the R^2 of both is near .95 on this field (a field on which the inputs matter is duffing):

    limit_cycle, embedding: R^2 10 steps ahead 0.9.. (persistence 0.1..)
    pictures: phase_portrait.png, prediction_error.png

``torchrl-perf train active-dynamics`` runs one of them with checkpoints, curves and a resume. This file shows what it
is made of: a config, a trainer whose ``step`` is one iteration (filter, plan, act, fit the model to windows, measure),
and an evaluation on data of its own. The latent state is learned up to a linear map, which is fitted for it alone.

Read it from top to bottom: Config, make_trainer, learn, main.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from torchrl_perf.systems.active_dynamics import ACTIVE_DYNAMICS_PRESETS, ActiveDynamicsTrainer, PredictionFigures
from torchrl_perf.systems.active_dynamics.picture import draw_phase_portrait, draw_prediction_curves

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Config:
    """Settings of the runs."""

    field: str = "limit_cycle"
    """Vector field: limit_cycle, double_limit_cycle, van_der_pol, duffing, snowman or multi_attractor."""
    inputs: str = "embedding"
    """What inputs are planned for: embedding, fisher_d, fisher_a, disagreement or rnd."""
    compare: bool = True
    """Also run with random inputs."""
    num_envs: int = 8
    """Points that move at once (N)."""
    num_steps: int = 25
    """Steps of each env in one iteration (T)."""
    total_steps: int = 16_000
    """Env steps of each run."""
    log_interval: int = 20
    """Iterations between two evaluations."""
    folder: Path = Path()
    """Where the pictures go."""
    seed: int = 0
    """Seed of model, envs and sampling."""
    device: str = "auto"
    """Device of everything."""


def make_trainer(config: Config, inputs: str) -> ActiveDynamicsTrainer:
    """Env, filter, planner, model, loss and optimiser; disagreement needs an ensemble."""
    preset = ACTIVE_DYNAMICS_PRESETS[config.field]
    settings = dataclasses.replace(
        preset,
        inputs=inputs,
        dynamics="ensemble" if config.inputs == "disagreement" else preset.dynamics,
        num_envs=config.num_envs,
        num_steps=config.num_steps,
        total_steps=config.total_steps,
        seed=config.seed,
        device=config.device,
        logger="none",
    )
    return ActiveDynamicsTrainer(settings)


def learn(trainer: ActiveDynamicsTrainer, log_interval: int) -> tuple[Curve, PredictionFigures]:
    """Run all iterations; returns samples and R^2 along the way, and the last evaluation."""
    curve: Curve = []
    figures = trainer.evaluate()
    for done in range(1, trainer.config.iterations + 1):
        trainer.step()
        if done % log_interval and done != trainer.config.iterations:
            continue
        steps = done * trainer.config.batch_size
        row = trainer.metrics.flush(steps)  # the only copy to the host, beside the evaluation's
        figures = trainer.evaluate()
        curve.append((steps, figures.r2[-1]))
        print(
            f"{trainer.config.inputs:>12} {steps:>7,} steps   reconstruction {row['train/loss_recon']:6.2f}   "
            f"divergence {row['train/loss_kl']:6.2f}   R^2 {figures.r2[-1]:6.3f}"
        )
    return curve, figures


def main(config: Config) -> float:
    """Trains and draws; returns R^2 of predictions with planned inputs."""
    torch.set_num_threads(1)  # networks this small gain nothing from a second core
    curves: dict[str, Curve] = {}
    trainer = make_trainer(config, config.inputs)
    curves[config.inputs], figures = learn(trainer, config.log_interval)
    portrait = draw_phase_portrait(trainer.portrait(config.field), config.folder / "phase_portrait.png")
    trainer.close()
    if config.compare:
        other = make_trainer(config, "random")
        curves["random"], random_figures = learn(other, config.log_interval)
        other.close()
        print(f"{config.field}, random: {random_figures}")
    error = config.folder / "prediction_error.png"
    draw_prediction_curves(curves, error, horizon=figures.horizon, title=config.field)
    print(f"{config.field}, {config.inputs}: {figures}")
    print(f"pictures: {portrait}, {error}")
    return figures.r2[-1]


if __name__ == "__main__":
    main(tyro.cli(Config))
