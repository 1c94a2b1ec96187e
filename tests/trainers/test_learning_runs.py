"""The presets learn their tasks: whole runs of three seeds in the marked set, one seed until it has in any other."""

import dataclasses

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf import envs
from torchrl_perf.registry import ALGORITHMS
from torchrl_perf.transforms import OptionState

# steps of an episode, and what a greedy policy has to reach on average over 32 episodes
GOALS = {
    "CartPole": (500, 475),
    "Pendulum": (200, -200),
    "Ferry": (50, 45),  # the best is 50, without options 10.8
    "HybridTarget": (8, -1.6),  # the best is -0.79, without choosing about -4.5
}


def task_of(name):
    """The task of an algorithm's first preset."""
    task = next(iter(ALGORITHMS[name].load("presets")))
    assert task in GOALS, f"{name}: {task} has no goal; steps of an episode and a return belong to GOALS in {__file__}"
    return task


def training(name, seed, parts):
    """The trainer of a preset's run after each of some equal parts of it."""
    preset = ALGORITHMS[name].load("presets")[task_of(name)]
    config = dataclasses.replace(preset, device="cpu", mode="eager", logger="none", seed=seed)
    trainer = ALGORITHMS[name].load("trainer")(config)
    ends = [config.iterations * part // parts for part in range(1, parts + 1)]
    for number in range(1, config.iterations + 1):
        trainer.step()
        if number in ends:
            yield trainer
    trainer.close()


def greedy_return(trainer, num_envs=32):
    """Mean return of the first episode of each env."""
    task = trainer.config.env
    env = getattr(envs, task)(num_envs, device="cpu")
    if task == "Ferry":
        env = TransformedEnv(env, OptionState(2))
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        batch = env.rollout(GOALS[task][0], trainer.policy, break_when_any_done=False)
    reward, done = batch["next", "reward"], batch["next", "done"].float()
    alive = torch.cat([torch.ones_like(done[:, :1]), 1 - done[:, :-1]], 1).cumprod(1)
    return float((reward * alive).sum(1).mean())


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_preset_solves_its_task_in_time(name):
    assert any(greedy_return(trainer, 128) >= GOALS[task_of(name)][1] for trainer in training(name, 0, parts=4))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_whole_run_solves_its_task(name, seed):
    (trainer,) = training(name, seed, parts=1)
    assert greedy_return(trainer) >= GOALS[task_of(name)][1]
