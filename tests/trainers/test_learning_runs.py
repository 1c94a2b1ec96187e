"""The presets learn their tasks: whole runs of three seeds in the marked set, one seed until it has in any other."""

import dataclasses

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf import envs
from torchrl_perf.registry import ALGORITHMS
from torchrl_perf.transforms import OptionState

# preset, steps of an episode, and what a greedy policy has to reach on average over 32 episodes
GOALS = {
    "dqn": ("CartPole", 500, 475),
    "qr-dqn": ("CartPole", 500, 475),
    "iqn": ("CartPole", 500, 475),
    "rainbow": ("CartPole", 500, 475),
    "sac": ("Pendulum", 200, -200),
    "ddpg": ("Pendulum", 200, -200),
    "td3": ("Pendulum", 200, -200),
    "ac-iqn": ("Pendulum", 200, -200),
    "sac-options": ("Ferry", 50, 45),  # the best is 50, without options 10.8
    "hybrid-ppo": ("HybridTarget", 8, -1.6),  # the best is -0.79, without choosing about -4.5
}


def training(name, seed, parts):
    """The trainer of a preset's run after each of some equal parts of it."""
    env, *_ = GOALS[name]
    preset = ALGORITHMS[name].load("presets")[env]
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
    name, steps, _ = GOALS[trainer.config.algorithm]
    env = getattr(envs, name)(num_envs, device="cpu")
    if name == "Ferry":
        env = TransformedEnv(env, OptionState(2))
    policy = trainer.actor if name == "HybridTarget" else trainer.policy
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        batch = env.rollout(steps, policy, break_when_any_done=False)
    reward, done = batch["next", "reward"], batch["next", "done"].float()
    alive = torch.cat([torch.ones_like(done[:, :1]), 1 - done[:, :-1]], 1).cumprod(1)
    return float((reward * alive).sum(1).mean())


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("name", GOALS)
def test_the_preset_solves_its_task_in_time(name):
    assert any(greedy_return(trainer, 128) >= GOALS[name][2] for trainer in training(name, 0, parts=4))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GOALS)
def test_the_whole_run_solves_its_task(name, seed):
    (trainer,) = training(name, seed, parts=1)
    assert greedy_return(trainer) >= GOALS[name][2]
