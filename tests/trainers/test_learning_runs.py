"""The presets learn their tasks: all seeds in the marked set, one short run of an algorithm in any other."""

import dataclasses

import pytest
import torch
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_perf import envs
from torchrl_perf.cli.train import ALGORITHMS
from torchrl_perf.transforms import OptionState

# preset, steps of an episode, and what a greedy policy has to reach on average over 32 episodes
GOALS = {
    "qr-dqn": ("CartPole", 500, 475),
    "iqn": ("CartPole", 500, 475),
    "rainbow": ("CartPole", 500, 475),
    "ddpg": ("Pendulum", 200, -200),
    "td3": ("Pendulum", 200, -200),
    "ac-iqn": ("Pendulum", 200, -200),
    "sac-options": ("Ferry", 50, 45),  # the best is 50, without options 10.8
    "hybrid-ppo": ("HybridTarget", 8, -1.6),  # the best is -0.79, without choosing about -4.5
}


def trained(name, **options):
    env, *_ = GOALS[name]
    config = dataclasses.replace(
        ALGORITHMS[name].load("presets")[env], device="cpu", mode="eager", logger="none", **options
    )
    trainer = ALGORITHMS[name].load("trainer")(config)
    for _ in range(config.iterations):
        trainer.step()
    trainer.close()
    return trainer


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


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GOALS)
def test_the_preset_solves_its_task(name, seed):
    assert greedy_return(trained(name, seed=seed)) >= GOALS[name][2]


SHORT = {
    "sac-options": ({"total_steps": 5_120}, 25),
    "hybrid-ppo": ({"total_steps": 20_480}, -6.5),  # one that does not move gets -8
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_is_better_than_chance(name):
    options, goal = SHORT[name]
    assert greedy_return(trained(name, **options)) >= goal
