"""DQN on an Atari game: the emulator steps on the CPU, everything else is on the device, in one file.

Run it with ``python examples/dqn_atari.py``; ``--help`` lists the settings. It needs
``pip install torchrl_perf[atari]``: ale-py is GPL, and its emulator runs on the CPU, in threads of its own: this loop
is not on the device from end to end, and is as fast as the CPU emulates. A random player of Pong loses by 20 or 21.
Last line, with a figure that depends on the number of steps:

    mean return of the last 100 episodes: -20.0

The policy sees stacks of four frames, as the env gives them. The buffer stores one frame for each step, once, and makes
stacks when it is sampled: 7 kB a transition in place of 56.

Read it from top to bottom: Config, make_envs, make_policy, StackedDQN, main. DQN: arXiv:1312.5602, double
Q-learning: arXiv:1509.06461.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import tyro
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorSpec

from torchrl_perf.collectors import HostCollector, host_specs
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.replay import DeviceStorage
from torchrl_perf.trainers import DQNConfig, DQNTrainer

try:
    from ale_py.vector_env import AtariVectorEnv
except ImportError as error:
    raise ImportError(f"expected ale-py, received: {error}. Remedy: pip install 'torchrl_perf[atari]'.") from error

FRAMES = 4  # of a stack


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    game: str = "pong"
    """Name of the ROM, such as pong or breakout."""
    num_envs: int = 16
    """Games that run at once (N)."""
    total_steps: int = 1_000_000
    """Env steps of the whole run; one is four frames of the game."""
    learning_starts: int = 20_000
    """Random steps before the first update."""
    updates_per_iteration: int = 4
    """Updates for each step of all games."""
    minibatch_size: int = 32
    """Rows of one update."""
    capacity: int = 100_000
    """Rows of the replay buffer, 7 kB each."""
    learning_rate: float = 1e-4
    """Step size of Adam."""
    eps_frames: int = 100_000
    """Steps in which the share of random actions falls from 1 to 0.01."""
    log_interval: int = 500
    """Iterations between two lines; each costs one copy to the host."""
    seed: int = 0
    """Seed of network, games and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where policy, buffer and updates are."""

    @property
    def dqn(self) -> DQNConfig:
        """The trainer's settings."""
        return DQNConfig(
            env=self.game,
            num_envs=self.num_envs,
            num_steps=1,
            total_steps=self.total_steps,
            capacity=self.capacity,
            compact=True,
            minibatch_size=self.minibatch_size,
            updates_per_iteration=self.updates_per_iteration,
            learning_starts=self.learning_starts,
            learning_rate=self.learning_rate,
            target_interval=1000,
            eps_end=0.01,
            eps_frames=self.eps_frames,
            seed=self.seed,
            device=self.device,
        )


def make_envs(config: Config) -> AtariVectorEnv:
    """All games in one vector env: grey 84x84 frames in stacks of four, rewards clipped to their sign."""
    return AtariVectorEnv(
        config.game, config.num_envs, stack_num=FRAMES, reward_clipping=True, autoreset_mode=AutoresetMode.SAME_STEP
    )


class Pixels(nn.Module):
    """Bytes to numbers in [0, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        """``[*]`` uint8 -> ``[*]`` float32."""
        return x.to(torch.float32) / 255


def make_policy(spec: TensorSpec, config: Config) -> EpsilonGreedy:
    """Epsilon-greedy on the convolutional network of the DQN paper."""
    layers: list[nn.Module] = [Pixels(), nn.Conv2d(FRAMES, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(512, cast("Any", spec.space).n)).to(config.device)
    dqn = config.dqn
    return EpsilonGreedy(
        network,
        spec=spec,
        eps_start=dqn.eps_start,
        eps_end=dqn.eps_end,
        decay_frames=dqn.eps_frames,
        write_values=False,
    ).to(config.device)


class StackedDQN(DQNTrainer):
    """DQN whose buffer stores the newest frame of each stack."""

    def store(self, batch: TensorDictBase) -> None:
        """Writes the transitions with one frame each."""
        frames = batch.copy()
        for key in ("observation", ("next", "observation")):
            frames.set(key, batch.get(key)[:, :, -1:])
        super().store(frames)

    def update(self, sample: TensorDictBase) -> None:
        """One update from ``sample [B]``, with stacks in place of frames."""
        stack = self.stack(sample.get("index"))
        newest = sample.get(("next", "observation"))
        sample.set("observation", stack).set(("next", "observation"), torch.cat([stack[:, 1:], newest], 1))
        super().update(sample)

    def stack(self, index: Tensor) -> Tensor:
        """``[B, FRAMES, 84, 84]`` for rows ``[B]``: black before an episode's first frame, as the env has it."""
        storage = cast("DeviceStorage", self.buffer.storage)
        ring = storage.ring
        frames, done = storage.field("observation"), storage.field(("next", "done"))
        row, stream = index // ring.num_streams, index % ring.num_streams
        age = (ring.cursor - 1 - row) % ring.steps
        seen = torch.ones_like(index, dtype=torch.bool)
        stack = [frames[row, stream]]
        for back in range(1, FRAMES):
            before = (row - back) % ring.steps
            seen = seen & (age + back < ring.length) & ~done[before, stream].squeeze(-1)
            stack.append(torch.where(seen.view(-1, 1, 1, 1), frames[before, stream], 0))
        return torch.cat(stack[::-1], 1)


def main(config: Config) -> float:
    """Trains; returns the mean return of the last 100 finished episodes."""
    # PARTS
    torch.manual_seed(config.seed)
    dqn, envs = config.dqn, make_envs(config)
    policy = make_policy(host_specs(envs, config.device).action_spec, config)
    collector = HostCollector(
        envs,
        policy,
        frames_per_batch=dqn.batch_size,
        init_random_frames=dqn.fill_iterations * dqn.batch_size,
        device=config.device,
        seed=config.seed,
    )
    trainer = StackedDQN(dqn, collector=collector)

    # TRAIN
    mean_return = float("nan")
    for done in range(1, dqn.iterations + 1):
        trainer.step()  # collect, store, learn, measure
        if done % config.log_interval == 0 or done == dqn.iterations:
            steps = done * dqn.batch_size
            row = trainer.metrics.flush(steps)  # the only copy to the host
            mean_return = row.get("episode/mean_return", mean_return)
            print(f"{steps:>9,} steps   return {mean_return:6.1f}   epsilon {row['train/epsilon']:.3f}")
    trainer.close()
    print(f"mean return of the last 100 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
