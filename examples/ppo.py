"""PPO on CartPole with every step of the loop on one device, in one file.

Run it with ``python examples/ppo.py``; ``--help`` lists the settings. It takes about ten seconds on two CPU cores.
Expected last line:

    mean return of the last 100 episodes: 500.0

On a GPU the same file captures the whole iteration (rollout, advantages, 32 minibatches, metrics) into one CUDA graph:
the first two iterations compile, the third records, and each later one is a single launch.

Read it from top to bottom: Config, make_env, make_actor_critic, make_loss, optimize, main. PPO: arXiv:1707.06347, GAE:
arXiv:1506.02438.
"""

from dataclasses import dataclass

import torch
import tyro
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.modules import DeviceActor, FusedMLP, GumbelCategorical
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime import capture, compiled
from torchrl_perf.trainers import GuardedAdam, minibatches
from torchrl_perf.transforms import GAETransform


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    num_envs: int = 128
    """Envs that run at once (N)."""
    num_steps: int = 32
    """Steps of each env in one iteration (T)."""
    total_steps: int = 300_000
    """Env steps of the whole run."""
    epochs: int = 8
    """Passes over each batch."""
    parts: int = 4
    """Minibatches of one pass."""
    learning_rate: float = 1.5e-3
    """Step size of Adam at the start; falls linearly to 0."""
    gamma: float = 0.98
    """Discount factor."""
    lmbda: float = 0.95
    """Lambda of generalised advantage estimation."""
    clip_epsilon: float = 0.2
    """Clipping range of the probability ratio."""
    entropy_coeff: float = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""
    hidden_size: int = 64
    """Width of the two hidden layers of actor and critic."""
    log_interval: int = 10
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


def make_actor_critic(env: EnvBase, config: Config) -> tuple[DeviceActor, ValueOperator]:
    """A policy over the two actions and a value function, as TensorDict modules on the env's device."""
    size, num_actions = env.observation_spec["observation"].shape[-1], 2  # push left, push right
    options = {"hidden_size": config.hidden_size, "device": env.device}
    # The small last layer makes the first policy nearly uniform.
    logits = FusedMLP(size, num_actions, output_gain=0.01, **options)
    actor = DeviceActor(logits, distribution_class=GumbelCategorical, param_keys=["logits"], spec=env.full_action_spec)
    critic = ValueOperator(FusedMLP(size, 1, **options), in_keys=["observation"])
    return actor, critic


def make_loss(actor: DeviceActor, critic: ValueOperator, config: Config) -> DeviceClipPPOLoss:
    """Clipped surrogate, squared value error and entropy bonus."""
    return DeviceClipPPOLoss(
        actor,
        critic,
        clip_epsilon=config.clip_epsilon,
        entropy_coeff=config.entropy_coeff,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
        functional=False,
    )


def optimize(optimizer: GuardedAdam, total: Tensor) -> None:
    """One step of Adam, clipped; a gradient that is not finite skips it on the device."""
    optimizer.zero_grad()
    total.backward()
    optimizer.step()


def main(config: Config) -> float:
    """Trains; returns the mean return of the last 100 finished episodes."""
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"

    # PARTS
    env = make_env(config)
    actor, critic = make_actor_critic(env, config)
    collector = DeviceCollector(
        env, actor, frames_per_batch=config.frames_per_batch, mode="compile" if on_gpu else "eager"
    )
    gae = GAETransform(gamma=config.gamma, lmbda=config.lmbda, value_network=critic)
    loss = make_loss(actor, critic, config)
    optimizer = GuardedAdam(loss.parameters(), learning_rate=config.learning_rate, max_grad_norm=config.max_grad_norm)
    metrics = DeviceMetrics(device)
    episodes = EpisodeStatistics(config.num_envs, device)
    progress = torch.zeros((), device=device)  # share of the run that is done

    # LOSS: compiled on a GPU, where it pays within seconds
    keys = ("observation", "action", "action_log_prob", "advantage", "value_target")

    def total_loss(minibatch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        losses = loss(minibatch)
        total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        return total, losses["entropy"], losses["kl_approx"]

    loss_fn = compiled(total_loss) if on_gpu else total_loss

    # ONE ITERATION: nothing in it waits for the host, so that it can be captured
    def iteration() -> None:
        # COLLECT and ADVANTAGES; the copy is shallow: the collector's own batch does not keep the advantages
        batch = collector.collect().copy()
        gae(batch)

        # UPDATE
        optimizer.learning_rate.copy_(config.learning_rate * (1.0 - progress))
        for minibatch in minibatches(batch, epochs=config.epochs, parts=config.parts, keys=keys):
            total, entropy, kl = loss_fn(minibatch)
            optimize(optimizer, total)
            metrics.add_all({"loss": total, "entropy": entropy, "kl": kl})
        progress.add_(1.0 / config.iterations)

        # MEASURE
        episodes.update(batch["next", "reward"], batch["next", "done"])
        metrics.add("return", episodes.mean_return, reduce="last")

    # TRAIN
    step = capture(iteration, device=device)
    mean_return = float("nan")
    for done in range(1, config.iterations + 1):
        step()
        if done % config.log_interval == 0 or done == config.iterations:
            steps = done * config.frames_per_batch
            row = metrics.flush(steps)  # the only copy to the host
            mean_return = row["return"]
            print(f"{steps:>9,} steps   return {mean_return:6.1f}   entropy {row['entropy']:.3f}   kl {row['kl']:.4f}")
    collector.shutdown()
    print(f"mean return of the last 100 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
