"""DQN on CartPole with every step of the loop on one device, in one file.

Run it with ``python examples/dqn.py``; ``--help`` lists the settings. It takes about three quarters of a minute on
one CPU core. Expected last line:

    mean return of the last 100 episodes: 500.0

On a GPU the same file captures the whole iteration (rollout, writes to the replay buffer, samples, updates, metrics)
into one CUDA graph: two iterations compile, the third records, and each later one is a single launch.

Read it from top to bottom: Config, make_env, make_policy, make_buffer, td_loss, make_update, main. DQN:
arXiv:1312.5602, double Q-learning: arXiv:1509.06461, n-step returns: arXiv:1710.02298.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.functional.losses.dqn import action_value, q_loss, q_targets
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.modules import EpsilonGreedy, FusedMLP
from torchrl_perf.replay import DeviceReplayBuffer, make_replay_buffer
from torchrl_perf.runtime import capture, compiled
from torchrl_perf.trainers import GuardedAdam


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    num_envs: int = 64
    """Envs that run at once (N)."""
    num_steps: int = 4
    """Steps of each env in one iteration (T)."""
    total_steps: int = 300_000
    """Env steps of the whole run."""
    updates: int = 32
    """Updates in one iteration."""
    minibatch_size: int = 128
    """Rows that one update learns from."""
    capacity: int = 300_000
    """Rows of the replay buffer: the whole run, since a policy without failures in sight unlearns how to avoid them."""
    n_step: int = 5
    """Rewards that are summed before the target network's value."""
    learning_starts: int = 1_024
    """Frames collected before the first update."""
    learning_rate: float = 1e-3
    """Step size of Adam at the start; falls linearly to 0."""
    gamma: float = 0.98
    """Discount factor."""
    target_interval: int = 256
    """Updates between two copies of the network to the target network."""
    eps_end: float = 0.03
    """Probability of a random action after eps_frames; it starts at 1."""
    eps_frames: int = 40_000
    """Frames in which that probability falls."""
    hidden_size: int = 128
    """Width of the network's two hidden layers."""
    log_interval: int = 50
    """Iterations between two lines; each costs one copy to the host."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where everything runs."""

    @property
    def frames_per_batch(self) -> int:
        """Env steps of one iteration, N * T."""
        return self.num_envs * self.num_steps

    @property
    def iterations(self) -> int:
        """Iterations of the run."""
        return -(-self.total_steps // self.frames_per_batch)


def make_env(config: Config) -> EnvBase:
    """N CartPoles in one batch of tensors; time limit and resets happen inside the step."""
    return CartPole(config.num_envs, device=config.device)


def make_policy(env: EnvBase, config: Config) -> EpsilonGreedy:
    """Epsilon-greedy on a network of action values; its schedule is on the device."""
    size, num_actions = env.observation_spec["observation"].shape[-1], 2  # push left, push right
    network = FusedMLP(size, num_actions, hidden_size=config.hidden_size, activation="relu", device=env.device)
    return EpsilonGreedy(
        network, spec=env.action_spec, eps_end=config.eps_end, decay_frames=config.eps_frames, write_values=False
    )


def make_buffer(config: Config) -> DeviceReplayBuffer:
    """A ring of rows on the device; n-step returns are computed when rows are drawn."""
    return make_replay_buffer(
        config.capacity,
        batch_size=config.minibatch_size,
        device=config.device,
        n_step=config.n_step,
        gamma=config.gamma,
    )


def td_loss(sample: TensorDictBase, online: nn.Module, target: nn.Module, gamma: float) -> tuple[Tensor, Tensor]:
    """Huber loss of the temporal differences, and the mean value of the actions taken."""
    following = sample["next"]
    with torch.no_grad():
        goal = q_targets(
            following["reward"].squeeze(-1),
            following["terminated"].squeeze(-1),
            gamma ** sample["steps_to_next_obs"].squeeze(-1) if "steps_to_next_obs" in sample.keys() else gamma,
            target(following["observation"]),
            online_values=online(following["observation"]),
        )
    value = action_value(online(sample["observation"]), sample["action"])
    return q_loss(value, goal, "huber"), value.detach().mean()


def make_update(
    online: nn.Module, optimizer: GuardedAdam, metrics: DeviceMetrics, config: Config
) -> Callable[[TensorDictBase], None]:
    """One update: loss, clipped step of Adam, and the target network every ``target_interval`` updates."""
    target = copy.deepcopy(online).requires_grad_(False)
    updates = torch.zeros((), dtype=torch.int64, device=config.device)

    def loss_fn(sample: TensorDictBase) -> tuple[Tensor, Tensor]:
        return td_loss(sample, online, target, config.gamma)

    def update_target() -> None:
        updates.add_(1)
        due = (updates % config.target_interval == 0).to(torch.float32)  # decided on the device
        with torch.no_grad():
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                old.lerp_(new, due)

    # compiled on a GPU, where it pays within seconds
    compile_ = compiled if "cuda" in config.device else lambda fn: fn
    loss_fn, update_target = compile_(loss_fn), compile_(update_target)

    def update(sample: TensorDictBase) -> None:
        optimizer.zero_grad()
        loss, value = loss_fn(sample)
        loss.backward()
        optimizer.step()
        update_target()
        metrics.add_all({"loss": loss, "value": value})

    return update


def main(config: Config) -> float:
    """Trains; returns the mean return of the last 100 finished episodes."""
    torch.manual_seed(config.seed)
    if "cpu" in config.device:
        torch.set_num_threads(1)  # such networks gain nothing from a second core
    device, on_gpu = torch.device(config.device), "cuda" in config.device

    # PARTS
    env = make_env(config)
    policy = make_policy(env, config)
    collector = DeviceCollector(
        env, policy, frames_per_batch=config.frames_per_batch, mode="compile" if on_gpu else "eager"
    )
    buffer = make_buffer(config)
    optimizer = GuardedAdam(policy.network.parameters(), learning_rate=config.learning_rate, max_grad_norm=10.0)
    metrics = DeviceMetrics(device)
    episodes = EpisodeStatistics(config.num_envs, device)
    progress = torch.zeros((), device=device)  # share of the run that is done
    update = make_update(policy.network, optimizer, metrics, config)

    # ONE ITERATION: nothing in it waits for the host, so that it can be captured
    def collect() -> None:
        batch = collector.collect()
        policy.step(config.frames_per_batch)
        buffer.extend(batch.exclude("collector"))
        episodes.update(batch["next", "reward"], batch["next", "done"])
        progress.add_(1.0 / config.iterations)

    def iteration() -> None:
        collect()
        optimizer.learning_rate.copy_(config.learning_rate * (1.0 - progress))
        for _ in range(config.updates):
            update(buffer.sample())
        metrics.add("return", episodes.mean_return, reduce="last")

    # TRAIN: first fill the buffer a little
    filling = -(-config.learning_starts // config.frames_per_batch)
    for _ in range(filling):
        collect()
    step = capture(iteration, device=device)
    mean_return = float("nan")
    for done in range(filling + 1, config.iterations + 1):
        step()
        if done % config.log_interval == 0 or done == config.iterations:
            steps = done * config.frames_per_batch
            row = metrics.flush(steps)  # the only copy to the host
            mean_return = row["return"]
            print(f"{steps:>9,} steps   return {mean_return:6.1f}   value {row['value']:.2f}   loss {row['loss']:.5f}")
    collector.shutdown()
    print(f"mean return of the last 100 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
