"""A colony learns: a small one in seconds, the whole task from the preset within minutes."""

import dataclasses

import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf.systems.durotaxis.config import DUROTAXIS_PRESETS
from torchrl_perf.systems.durotaxis.trainer import DurotaxisTrainer

PRESET = dataclasses.replace(DUROTAXIS_PRESETS["Durotaxis"], device="cpu", mode="eager", logger="none")
SMALL = dataclasses.replace(
    PRESET, num_envs=32, minibatches=1, critical_nodes=30, width=100.0, height=100.0, encoder_width=16
)


def success_of(trainer, steps):
    """Share of the first episodes of fresh colonies that reach the goal, under the policy without noise."""
    env = trainer.make_env()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        batch = env.rollout(steps, trainer.actor, break_when_any_done=False)
    done, outcome = batch["next", "done"].squeeze(-1), batch["next", "outcome"].squeeze(-1)
    first = done.int().argmax(1, keepdim=True)
    return float(((outcome.gather(1, first) == 1) & done.any(1, keepdim=True)).float().mean())


def trained(config):
    trainer = DurotaxisTrainer(config)
    before = success_of(trainer, 60)
    for _ in range(config.iterations):
        trainer.step()
    trainer.close()
    return trainer, before


@pytest.mark.slow
def test_a_small_colony_learns_to_reach_the_goal():
    trainer, before = trained(dataclasses.replace(SMALL, total_steps=25_000))
    assert before == 0.0
    assert success_of(trainer, 60) >= 0.9


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_the_preset_solves_the_whole_task(seed):
    trainer, before = trained(dataclasses.replace(PRESET, seed=seed))
    assert before == 0.0
    assert trainer.metrics.flush(1)["episode/success"] >= 0.95
    assert success_of(trainer, 200) >= 0.95


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_node_for_itself_gets_further_than_chance():
    trainer, _ = trained(dataclasses.replace(SMALL, actions="per_node", total_steps=250_000))
    assert success_of(trainer, 100) >= 0.5
