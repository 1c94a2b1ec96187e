"""SAC on Pendulum with every step of the loop on one device, in one file.

Run it with ``python examples/sac.py``; ``--help`` lists the settings. It takes about half a minute on two CPU cores.
Expected last line, give or take fifteen:

    mean return of the last 100 episodes: -160.0

On a GPU the same file captures the whole iteration (env step, replay buffer, four updates, metrics) into one CUDA
graph: the first two iterations compile, the third records, and each later one is a single launch.

Read it from top to bottom: Config, make_env, make_actor_critic, make_collector, make_loss, main. SAC: arXiv:1812.05905.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import tyro
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import Pendulum
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.modules import DeviceActor, EnsembleQ, SquashedNormal, SquashedNormalHead
from torchrl_perf.objectives import DeviceSACLoss
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime import capture, compiled
from torchrl_perf.trainers import GuardedAdam


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    num_envs: int = 16
    """Envs that run at once (N); each iteration takes one step in each."""
    total_steps: int = 32_000
    """Env steps of the whole run."""
    random_steps: int = 1_600
    """Env steps with random actions, before the first update."""
    capacity: int = 50_000
    """Transitions that the replay buffer holds."""
    minibatch_size: int = 256
    """Transitions that one update learns from (B)."""
    updates: int = 4
    """Updates of each iteration."""
    learning_rate: float = 3e-3
    """Step size of Adam, for policy, critics and temperature."""
    gamma: float = 0.95
    """Discount factor."""
    tau: float = 0.01
    """How far the target critics move towards the critics at each update."""
    alpha: float = 0.2
    """Temperature at the start: the weight of the entropy against the reward."""
    max_grad_norm: float = 100.0
    """Largest norm of the gradient."""
    hidden_size: int = 64
    """Width of the two hidden layers of policy and critics."""
    log_interval: int = 200
    """Iterations between two lines; each costs one copy to the host."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where everything runs."""

    @property
    def iterations(self) -> int:
        """Iterations of the run."""
        return -(-self.total_steps // self.num_envs)


def make_env(config: Config) -> EnvBase:
    """N pendulums in one batch of tensors; time limit and resets happen inside the step."""
    return Pendulum(config.num_envs, device=config.device)


def make_actor_critic(env: EnvBase, config: Config) -> tuple[DeviceActor, TensorDictModule]:
    """A squashed normal policy and two critics in one batched network, as TensorDict modules on the env's device."""
    size, spec, hidden = env.observation_spec["observation"].shape[-1], env.action_spec, config.hidden_size
    box = cast("Any", spec.space)
    net = nn.Sequential(
        nn.Linear(size, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 2 * spec.shape[-1]),
        SquashedNormalHead(box.low[0], box.high[0]),
    ).to(env.device)
    actor = DeviceActor(
        net, distribution_class=SquashedNormal, param_keys=SquashedNormalHead.param_keys, spec=env.full_action_spec
    )
    q = EnsembleQ(2, size + spec.shape[-1], hidden_sizes=(hidden, hidden), device=env.device)
    critic = TensorDictModule(q, in_keys=["observation", "action"], out_keys=["state_action_value"])
    return actor, critic


def make_collector(env: EnvBase, actor: DeviceActor, config: Config) -> DeviceCollector:
    """Takes one step in each env, at random at first; keeps what the losses read."""
    return DeviceCollector(
        env,
        actor,
        frames_per_batch=config.num_envs,
        init_random_frames=config.random_steps,
        mode="compile" if env.device.type == "cuda" else "eager",
        exclude_keys=[*SquashedNormalHead.param_keys, "action_log_prob"],
    )


def make_loss(actor: DeviceActor, critic: TensorDictModule, config: Config) -> tuple[DeviceSACLoss, GuardedAdam]:
    """Losses of critics, policy and temperature, with the target critics in them, and one optimiser for all."""
    loss = DeviceSACLoss(actor, critic, loss_function="l2", gamma=config.gamma, alpha_init=config.alpha)
    optimizer = GuardedAdam(
        [param for param in loss.parameters() if param.requires_grad],
        learning_rate=config.learning_rate,
        max_grad_norm=config.max_grad_norm,
    )
    return loss, optimizer


def main(config: Config) -> float:
    """Trains; returns the mean return of the last 100 finished episodes."""
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"

    # PARTS
    env = make_env(config)
    actor, critic = make_actor_critic(env, config)
    collector = make_collector(env, actor, config)
    buffer = make_replay_buffer(config.capacity, batch_size=config.minibatch_size, device=device)
    loss, optimizer = make_loss(actor, critic, config)
    metrics = DeviceMetrics(device)
    episodes = EpisodeStatistics(config.num_envs, device)

    # LOSS: compiled on a GPU, where it pays within seconds
    def total_loss(sample: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        losses = loss(sample)
        total = losses["loss_qvalue"] + losses["loss_actor"] + losses["loss_alpha"]
        return total, losses["alpha"], losses["entropy"]

    loss_fn = compiled(total_loss) if on_gpu else total_loss

    # ONE ITERATION: nothing in it waits for the host, so that it can be captured
    def collect() -> None:
        batch = collector.collect()
        buffer.extend(batch)
        episodes.update(batch["next", "reward"], batch["next", "done"])
        metrics.add("return", episodes.mean_return, reduce="last")

    def iteration() -> None:
        collect()
        for _ in range(config.updates):
            total, alpha, entropy = loss_fn(buffer.sample())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            loss.update_targets_(config.tau)
            metrics.add_all({"loss": total, "alpha": alpha, "entropy": entropy})

    # TRAIN: random steps first, which are not captured
    step = capture(iteration, device=device, compile=False)
    mean_return = float("nan")
    for done in range(1, config.iterations + 1):
        if done * config.num_envs <= config.random_steps:
            collect()
        else:
            step()
        if done % config.log_interval == 0 or done == config.iterations:
            steps = done * config.num_envs
            row = metrics.flush(steps)  # the only copy to the host
            mean_return = row["return"]
            entropy, alpha = row.get("entropy", float("nan")), row.get("alpha", config.alpha)
            print(f"{steps:>7,} steps   return {mean_return:8.1f}   entropy {entropy:6.3f}   alpha {alpha:.4f}")
    collector.shutdown()
    print(f"mean return of the last 100 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
