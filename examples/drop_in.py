"""An ordinary TorchRL PPO script, and the three to five lines that take the waiting out of it.

    python examples/drop_in.py                # TorchRL's Collector, GAE and ClipPPOLoss
    python examples/drop_in.py --ours         # DeviceCollector, GAETransform and DeviceClipPPOLoss
    python examples/drop_in.py --all-ours     # and the replay buffer, and the optimiser with its clipping

The lines that change are marked (1) to (5); everything else is the same for all: networks, env, settings, loop. The env
is this package's CartPole throughout, so that the difference is the loop's alone.
Expected last line, with the frames/s of your machine and a return above 475; these are of --all-ours on an H200, where
--ours gave 28,503 and TorchRL's parts 8,033:

    torchrl_perf: 33,954 frames/s, mean return of the last batches 500.0
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
import tyro
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.trainers import GuardedAdam
from torchrl_perf.transforms import GAETransform


@dataclass(frozen=True)
class Config:
    """Settings of the run, the same before and after."""

    ours: bool = False
    """Use torchrl_perf's collector, advantages and loss."""
    all_ours: bool = False
    """Use its replay buffer and its optimiser, too."""
    num_envs: int = 128
    """Envs that run at once (N)."""
    frames_per_batch: int = 4096
    """Frames of one batch, N * T."""
    total_frames: int = 204_800
    """Frames of the run."""
    epochs: int = 8
    """Passes over each batch."""
    minibatch_size: int = 512
    """Frames of a minibatch (B)."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    gamma: float = 0.98
    """Discount factor."""
    lmbda: float = 0.95
    """Lambda of generalised advantage estimation."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where everything runs."""


def make_env(config: Config) -> EnvBase:
    """A batch of CartPoles that carries the return of each episode."""
    return TransformedEnv(CartPole(config.num_envs, device=config.device), RewardSum())


def make_actor_critic(env: EnvBase) -> tuple[ProbabilisticActor, ValueOperator]:
    """TorchRL's own networks: two hidden layers of 64 each."""
    size, num_actions = env.observation_spec["observation"].shape[-1], 2  # push left, push right
    options = {"num_cells": [64, 64], "activation_class": torch.nn.Tanh, "device": env.device}
    logits = MLP(size, num_actions, **options)
    actor = ProbabilisticActor(
        TensorDictModule(logits, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        spec=env.full_action_spec,
    )
    return actor, ValueOperator(MLP(size, 1, **options), in_keys=["observation"])


def main(config: Config) -> float:
    """Trains; returns the mean return of the episodes that the last ten batches finished."""
    torch.manual_seed(config.seed)
    env = make_env(config)
    actor, critic = make_actor_critic(env)
    frames, total = config.frames_per_batch, config.total_frames
    loss_options = {"entropy_coeff": 0.01, "critic_coeff": 0.5, "loss_critic_type": "l2", "normalize_advantage": True}

    if config.ours or config.all_ours:
        collector = DeviceCollector(env, actor, frames_per_batch=frames, total_frames=total)  # (1)
        advantage = GAETransform(gamma=config.gamma, lmbda=config.lmbda, value_network=critic)  # (2)
        loss = DeviceClipPPOLoss(actor, critic, **loss_options)  # (3)
    else:
        collector = Collector(env, actor, frames_per_batch=frames, total_frames=total)  # (1)
        advantage = GAE(gamma=config.gamma, lmbda=config.lmbda, value_network=critic)  # (2)
        loss = ClipPPOLoss(actor, critic, **loss_options)  # (3)

    size, rate = config.minibatch_size, config.learning_rate
    if config.all_ours:
        buffer = make_replay_buffer(frames, batch_size=size, sampler="epoch", device=config.device)  # (4)
        optimizer = GuardedAdam(loss.parameters(), lr=rate, max_grad_norm=0.5)  # (5)
    else:
        storage = LazyTensorStorage(frames, device=config.device)
        buffer = ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=size)  # (4)
        optimizer = torch.optim.Adam(loss.parameters(), lr=rate)  # (5)
    returns: deque[float] = deque(maxlen=10)
    collected, start = 0, time.perf_counter()
    for batch in collector:
        with torch.no_grad():
            advantage(batch)
        buffer.extend(batch.reshape(-1))
        for _ in range(config.epochs):
            for minibatch in buffer:
                losses = loss(minibatch)
                objective = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                objective.backward()
                if not config.all_ours:
                    torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)  # (5), which clips by itself
                optimizer.step()
                optimizer.zero_grad()
        finished = batch["next", "episode_reward"][batch["next", "done"]]
        if finished.numel():
            returns.append(finished.mean().item())
        collected += batch.numel()
    collector.shutdown()

    speed = collected / (time.perf_counter() - start)
    mean_return = sum(returns) / len(returns)
    name = "torchrl_perf" if config.ours or config.all_ours else "torchrl"
    print(f"{name}: {speed:,.0f} frames/s, mean return of the last batches {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
