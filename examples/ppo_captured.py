"""The shortest whole PPO: a ten-line iteration, captured once and replayed.

Run it with ``python examples/ppo_captured.py``; a few seconds on two CPU cores. Expected last line, the number within a
few per cent:

    mean return of the last 100 episodes: 500.0

``examples/ppo.py`` is the same with settings, metrics and a schedule, and says more about each part.
"""

import torch
from tensordict import TensorDictBase
from torchrl.modules import ValueOperator

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.metrics import EpisodeStatistics
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.runtime import capture, compiled
from torchrl_perf.trainers import GuardedAdam, PPOConfig, make_actor, make_critic, minibatches
from torchrl_perf.transforms import GAETransform


def main(iterations: int = 60, seed: int = 0) -> float:
    """Trains on 128 CartPoles, 32 steps an iteration; returns the mean return of the last 100 finished episodes."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = CartPole(128, device=device)
    actor = make_actor(env, PPOConfig())
    critic: ValueOperator = make_critic(env, PPOConfig())
    collector = DeviceCollector(
        env, actor, frames_per_batch=128 * 32, mode="compile" if device.type == "cuda" else "eager"
    )
    gae = GAETransform(gamma=0.98, lmbda=0.95, value_network=critic)
    loss = DeviceClipPPOLoss(
        actor, critic, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True, functional=False
    )
    optimizer = GuardedAdam(loss.parameters(), learning_rate=1.5e-3, max_grad_norm=0.5)
    episodes = EpisodeStatistics(128, device)

    def optimize(losses: TensorDictBase) -> None:
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    loss_fn = compiled(loss) if device.type == "cuda" else loss

    def iteration() -> None:
        batch = collector.collect()
        gae(batch)
        for minibatch in minibatches(batch, epochs=8, parts=4):
            losses = loss_fn(minibatch)
            optimize(losses)
        episodes.update(batch["next", "reward"], batch["next", "done"])

    step = capture(iteration, device=device)
    for _ in range(iterations):
        step()
    mean_return = float(episodes.mean_return)
    print(f"mean return of the last 100 episodes: {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main()
