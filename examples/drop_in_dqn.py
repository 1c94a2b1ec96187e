"""An ordinary TorchRL DQN script, and the five lines that take the waiting out of it.

    python examples/drop_in_dqn.py            # TorchRL's EGreedyModule, Collector, DQNLoss, replay buffer, SoftUpdate
    python examples/drop_in_dqn.py --ours     # this package's

The lines that change are marked (1) to (5); everything else is the same for both: network, optimiser, env, settings,
loop. The env is this package's CartPole in both. Last line, on one thread of a CPU that did other work too;
docs/drop_in.md has speeds, line by line, and says of which machine:

    torchrl_perf: 31 updates/s, mean return of the last 50 episodes 133.9
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
import tyro
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.modules import EpsilonGreedy
from torchrl_perf.objectives import DeviceDQNLoss, DeviceSoftUpdate
from torchrl_perf.replay import make_replay_buffer


@dataclass(frozen=True)
class Config:
    """Settings of the run, the same before and after."""

    ours: bool = False
    """Use torchrl_perf's parts."""
    num_envs: int = 32
    """Envs that run at once (N)."""
    frames_per_batch: int = 128
    """Frames of one batch, N * T."""
    total_frames: int = 64_000
    """Frames of the run."""
    updates: int = 8
    """Updates after each batch."""
    batch_size: int = 256
    """Rows of an update (B)."""
    capacity: int = 16_384
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
    env = TransformedEnv(CartPole(config.num_envs, device=config.device), RewardSum())
    spec = env.full_action_spec_unbatched["action"]
    network = MLP(4, 2, num_cells=[128, 128], device=config.device)
    actor = QValueActor(network, in_keys=["observation"], spec=spec)
    kind = EpsilonGreedy if config.ours else EGreedyModule  # (1)
    explore = kind(spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=20_000).to(config.device)
    policy = TensorDictSequential(actor, explore)
    frames, total, size = config.frames_per_batch, config.total_frames, config.batch_size

    if config.ours:
        collector = DeviceCollector(env, policy, frames_per_batch=frames, total_frames=total)  # (2)
        loss = DeviceDQNLoss(actor, action_space=spec, delay_value=True)  # (3)
        buffer = make_replay_buffer(config.capacity, batch_size=size, device=config.device)  # (4)
        target = DeviceSoftUpdate(loss, tau=0.01)  # (5)
    else:
        collector = Collector(env, policy, frames_per_batch=frames, total_frames=total)  # (2)
        loss = DQNLoss(actor, action_space=spec, delay_value=True)  # (3)
        storage = LazyTensorStorage(config.capacity, device=config.device)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=size)  # (4)
        target = SoftUpdate(loss, tau=0.01)  # (5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=config.learning_rate, fused=True)
    loss.make_value_estimator(gamma=0.99)

    returns: deque[float] = deque(maxlen=50)
    updates, start = 0, time.perf_counter()
    for batch in collector:
        buffer.extend(batch.reshape(-1))
        explore.step(batch.numel())
        for _ in range(config.updates):
            loss(buffer.sample())["loss"].backward()
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
