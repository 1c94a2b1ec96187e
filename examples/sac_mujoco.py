"""SAC on HalfCheetah-v5: MuJoCo steps on the CPU, everything else is on the device, in one file.

Run it with ``python examples/sac_mujoco.py``; ``--help`` lists the settings. It needs
``pip install torchrl_perf[mujoco]``. Expected last line (300,000 steps at one update a step, on an H100 with
``--processes``; one seed; three of ``torchrl-perf bench curves --study half-cheetah`` have 6,263 to 8,667):

    mean return of the last 100 episodes: 7152.9

The ``HostCollector`` acts for 16 envs at once, with one packed copy each way a step; ends of episodes by the time limit
are stored as truncations with their true final observation. On a GPU the policy is one CUDA graph, and storing the
batch with its 16 updates another.

Read it from top to bottom: Config, make_envs, make_trainer, main. SAC: arXiv:1812.05905.
"""

from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import torch
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from torchrl_perf.collectors import HostCollector, host_specs, ignore_interrupts
from torchrl_perf.trainers import SACConfig, SACTrainer, make_sac_actor


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    env: str = "HalfCheetah-v5"
    """Gymnasium id of an env with Box observations and bounded continuous actions."""
    num_envs: int = 16
    """Envs that run at once (N)."""
    groups: int = 1
    """Vector envs that they are split into; one steps while the policy acts for another."""
    processes: bool = False
    """Step each env in a process of its own, which pays where there are as many cores as envs."""
    total_steps: int = 300_000
    """Env steps of the whole run."""
    learning_starts: int = 10_000
    """Random steps before the first update."""
    updates_per_iteration: int = 16
    """Updates for each step of all envs."""
    minibatch_size: int = 256
    """Rows of one update."""
    capacity: int = 1_000_000
    """Rows of the replay buffer."""
    log_interval: int = 500
    """Iterations between two lines; each costs one copy to the host."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where policy, buffer and updates are."""

    @property
    def sac(self) -> SACConfig:
        """The trainer's settings."""
        return SACConfig(
            env=self.env,
            num_envs=self.num_envs,
            total_steps=self.total_steps,
            capacity=self.capacity,
            minibatch_size=self.minibatch_size,
            updates_per_iteration=self.updates_per_iteration,
            learning_starts=self.learning_starts,
            critic_learning_rate=3e-4,
            seed=self.seed,
            device=self.device,
        )


def make_envs(config: Config) -> list[VectorEnv]:
    """The groups. An env that is done is reset within the step, and its final observation is kept."""
    fns = [ignore_interrupts(partial(gym.make, config.env))] * (config.num_envs // config.groups)
    if config.processes:
        # importing torchrl makes "spawn" the default way to start a process, which takes seconds each
        return [
            AsyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP, context="fork") for _ in range(config.groups)
        ]
    return [SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP) for _ in range(config.groups)]


def make_trainer(config: Config) -> SACTrainer:
    """Networks, collector and trainer."""
    envs = make_envs(config)  # before anything on a GPU: a fork must not inherit it
    torch.manual_seed(config.seed)
    sac = config.sac
    specs = host_specs(envs, config.device)
    actor = make_sac_actor(specs.observation_spec["observation"], specs.action_spec, sac)
    collector = HostCollector(
        envs,
        actor,
        frames_per_batch=sac.batch_size,
        init_random_frames=sac.fill_iterations * sac.batch_size,
        device=config.device,
        seed=config.seed,
    )
    return SACTrainer(sac, collector=collector)


def main(config: Config) -> float:
    """Trains; returns the mean return of the last 100 finished episodes."""
    trainer = make_trainer(config)
    iterations, mean_return = config.sac.iterations, float("nan")
    for done in range(1, iterations + 1):
        trainer.step()  # collect, store, learn, measure
        if done % config.log_interval == 0 or done == iterations:
            steps = done * config.sac.batch_size
            row = trainer.metrics.flush(steps)  # the only copy to the host
            mean_return = row.get("episode/mean_return", mean_return)
            alpha = row.get("train/alpha", float("nan"))
            print(f"{steps:>9,} steps   return {mean_return:7.1f}   temperature {alpha:.4f}")
    trainer.close()
    print(f"mean return of the last 100 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
