"""An ordinary TorchRL SAC script, and the five lines that take the waiting out of it.

    python examples/drop_in_sac.py            # TorchRL's Collector, SACLoss, replay buffer, Adam, SoftUpdate
    python examples/drop_in_sac.py --ours     # this package's

The lines that change are marked (1) to (5); everything else is the same for both: networks, env, settings, loop. The
env is this package's Pendulum in both. Last line of ``--ours --total-frames 6400``, on two cores of a CPU that did
other work too; docs/drop_in.md has speeds, line by line, and says of which machine:

    torchrl_perf: 62 updates/s, mean return of the last 50 episodes -1246.6
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
import tyro
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import Pendulum
from torchrl_perf.objectives import DeviceSACLoss, DeviceSoftUpdate
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.trainers import GuardedAdam


@dataclass(frozen=True)
class Config:
    """Settings of the run, the same before and after."""

    ours: bool = False
    """Use torchrl_perf's parts."""
    num_envs: int = 16
    """Envs that run at once (N)."""
    frames_per_batch: int = 64
    """Frames of one batch, N * T."""
    total_frames: int = 48_000
    """Frames of the run."""
    updates: int = 16
    """Updates after each batch."""
    batch_size: int = 256
    """Rows of an update (B)."""
    capacity: int = 65_536
    """Rows of the replay buffer."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where everything runs."""


def main(config: Config) -> float:
    """Trains; returns the mean return of the last 50 episodes."""
    torch.manual_seed(config.seed)
    env = TransformedEnv(Pendulum(config.num_envs, device=config.device), RewardSum())
    spec, options = env.full_action_spec_unbatched["action"], {"num_cells": [128, 128], "device": config.device}
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(MLP(3, 2, **options), NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        spec=spec,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, **options), in_keys=["observation", "action"])
    frames, total, size = config.frames_per_batch, config.total_frames, config.batch_size

    if config.ours:
        collector = DeviceCollector(env, actor, frames_per_batch=frames, total_frames=total)  # (1)
        loss = DeviceSACLoss(actor, critic)  # (2)
        buffer = make_replay_buffer(config.capacity, batch_size=size, device=config.device)  # (3)
        optimizer = GuardedAdam(loss.parameters(), lr=config.learning_rate)  # (4)
        target = DeviceSoftUpdate(loss, tau=0.005)  # (5)
    else:
        collector = Collector(env, actor, frames_per_batch=frames, total_frames=total)  # (1)
        loss = SACLoss(actor, critic)  # (2)
        storage = LazyTensorStorage(config.capacity, device=config.device)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=size)  # (3)
        optimizer = torch.optim.Adam(loss.parameters(), lr=config.learning_rate)  # (4)
        target = SoftUpdate(loss, tau=0.005)  # (5)
    loss.make_value_estimator(gamma=0.99)

    returns: deque[float] = deque(maxlen=50)
    updates, start = 0, time.perf_counter()
    for batch in collector:
        buffer.extend(batch.reshape(-1))
        for _ in range(config.updates):
            losses = loss(buffer.sample())
            (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()
        updates += config.updates
        returns.extend(batch["next", "episode_reward"][batch["next", "done"]].tolist())
    collector.shutdown()

    speed = updates / (time.perf_counter() - start)
    mean_return = sum(returns) / len(returns)
    name = "torchrl_perf" if config.ours else "torchrl"
    print(f"{name}: {speed:,.0f} updates/s, mean return of the last 50 episodes {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
