"""PPO with one policy for all agents, on the navigation task of VMAS, in one file.

Run it with ``pip install 'torchrl_perf[marl]'`` and ``python examples/vmas_navigation.py``; ``--help`` lists the
settings. It takes about a minute on two CPU cores. Each of three agents goes to its own goal and sees the others with a
lidar; the reward is their joint progress towards the goals, minus collisions. Agents that do not move have a return of
0. The last line is like

    mean return of the last 100 episodes: 2.8

``DeviceVmasEnv`` resets finished rows by mask inside the step, where TorchRL's ``VmasEnv`` resets them one by one on
the host; ``AgentStreams`` makes each agent a row of its own. What follows is PPO for a single agent.

Read it from top to bottom: Config, make_env, make_actor_critic, main. VMAS: arXiv:2207.03530, PPO with shared weights
for several agents: arXiv:2103.01955.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import tyro
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import AgentStreams, DeviceVmasEnv
from torchrl_perf.metrics import DeviceMetrics, EpisodeStatistics
from torchrl_perf.modules import BoundedNormal, DeviceActor, FusedMLP, SquashedNormalHead
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.trainers import GuardedAdam, minibatches
from torchrl_perf.transforms import GAETransform


@dataclass(frozen=True)
class Config:
    """Settings of the run."""

    scenario: str = "navigation"
    """Task of VMAS, of those that DeviceVmasEnv takes."""
    num_agents: int = 3
    """Agents of each env."""
    num_envs: int = 64
    """Envs that run at once."""
    num_steps: int = 50
    """Steps of each env in one iteration."""
    max_steps: int = 100
    """Length of an episode, after which it is truncated."""
    total_steps: int = 128_000
    """Env steps of the whole run; each is one of all agents."""
    epochs: int = 6
    """Passes over each batch."""
    parts: int = 6
    """Minibatches of one pass."""
    learning_rate: float = 1e-3
    """Step size of Adam."""
    gamma: float = 0.95
    """Discount factor."""
    hidden_size: int = 64
    """Width of the two hidden layers of actor and critic."""
    log_interval: int = 4
    """Iterations between two lines; each costs one copy to the host."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "cpu"
    """Where everything runs."""


def make_env(config: Config) -> AgentStreams:
    """The agents of all envs as rows of one batch, [num_envs * num_agents]."""
    env = DeviceVmasEnv(
        config.scenario,
        config.num_envs,
        max_steps=config.max_steps,
        device=config.device,
        n_agents=config.num_agents,
    )
    return AgentStreams(env)


def make_actor_critic(env: EnvBase, config: Config) -> tuple[DeviceActor, ValueOperator]:
    """A squashed normal policy within the bounds of the forces, and a value function; both see one agent."""
    spec = env.full_action_spec["action"]
    size, forces = env.observation_spec["observation"].shape[-1], spec.shape[-1]
    box = cast("Any", spec.space)
    options = {"hidden_size": config.hidden_size, "device": env.device}
    head = SquashedNormalHead(box.low[0], box.high[0], log_scale_min=-2.0, log_scale_max=1.0)
    actor = DeviceActor(
        torch.nn.Sequential(FusedMLP(size, 2 * forces, output_gain=0.01, **options), head),
        distribution_class=BoundedNormal,
        param_keys=["loc", "scale", "low", "high"],
        spec=env.full_action_spec,
    )
    return actor, ValueOperator(FusedMLP(size, 1, **options), in_keys=["observation"])


def main(config: Config) -> float:
    """Trains; returns the mean return of an agent over the last 100 finished episodes."""
    torch.manual_seed(config.seed)
    env = make_env(config)
    actor, critic = make_actor_critic(env, config)
    streams = env.batch_size[0]
    # "auto" finds out whether the scenario's step may be captured, and says what keeps it from that
    collector = DeviceCollector(env, actor, frames_per_batch=streams * config.num_steps, mode="auto")
    gae = GAETransform(gamma=config.gamma, lmbda=0.9, value_network=critic)
    loss = DeviceClipPPOLoss(actor, critic, entropy_coeff=1e-3, critic_coeff=0.5, normalize_advantage=True)
    optimizer = GuardedAdam(loss.parameters(), learning_rate=config.learning_rate, max_grad_norm=0.5)
    metrics = DeviceMetrics(env.device)
    episodes = EpisodeStatistics(streams, env.device)
    keys = ("observation", "action", "action_log_prob", "advantage", "value_target")
    iterations = -(-config.total_steps // (config.num_envs * config.num_steps))
    mean_return = float("nan")
    for done in range(1, iterations + 1):
        batch = collector.collect().copy()
        gae(batch)
        for minibatch in minibatches(batch, epochs=config.epochs, parts=config.parts, keys=keys):
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optimizer.step()
            metrics.add("kl", losses["kl_approx"])
        episodes.update(batch["next", "reward"], batch["next", "done"])
        metrics.add("return", episodes.mean_return, reduce="last")
        if done % config.log_interval == 0 or done == iterations:
            steps = done * config.num_envs * config.num_steps
            row = metrics.flush(steps)  # the only copy to the host
            mean_return = row["return"]
            print(f"{steps:>9,} steps   return {mean_return:6.2f}   kl {row['kl']:.4f}")
    collector.shutdown()
    print(f"mean return of the last 100 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
