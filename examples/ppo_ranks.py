"""A PPO loop of one's own on several GPUs: ``SharedGradients`` in it, and the whole iteration captured.

    torchrun --nproc-per-node 2 examples/ppo_ranks.py        # two GPUs, or two processes on a CPU
    python examples/ppo_ranks.py                             # one

The loop is that of ``examples/ppo_captured.py``; the lines for several ranks are marked (1) to (5). The envs are
divided between the ranks. Expected last line, the number within a few per cent:

    mean return of the last episodes of each rank: 500.0
"""

import argparse

import torch
from tensordict import TensorDictBase
from torchrl.modules import ValueOperator

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole
from torchrl_perf.metrics import EpisodeStatistics
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.parallel import SharedGradients, join, leave
from torchrl_perf.runtime import capture
from torchrl_perf.trainers import GuardedAdam, PPOConfig, make_actor, make_critic, minibatches
from torchrl_perf.transforms import GAETransform


def main(iterations: int = 60, seed: int = 0, num_envs: int = 128, eager: bool = False) -> float:
    """Trains on so many CartPoles in all, 32 steps an iteration; returns the mean return of all ranks."""
    ranks = join()  # (1) its GPU becomes the current one; a process alone without torchrun
    envs = num_envs // ranks.size
    torch.manual_seed(seed * 1_000 + ranks.rank)  # (2) envs, actions and minibatches of its own
    env = CartPole(envs, device=ranks.device)
    actor = make_actor(env, PPOConfig())
    critic: ValueOperator = make_critic(env, PPOConfig())
    collector = DeviceCollector(env, actor, frames_per_batch=envs * 32, mode="eager" if eager else "auto")
    gae = GAETransform(gamma=0.98, lmbda=0.95, value_network=critic)
    loss_fn = DeviceClipPPOLoss(
        actor, critic, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True, functional=False
    )
    shared = SharedGradients(loss_fn)  # (3) the first rank's parameters, on all
    optimizer = GuardedAdam(loss_fn.parameters(), learning_rate=1.5e-3, max_grad_norm=0.5)
    episodes = EpisodeStatistics(envs, ranks.device)

    def optimize(losses: TensorDictBase) -> None:
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        shared.mean_()  # (4) gradients of all ranks: one all-reduce, which the graph holds
        optimizer.step()
        optimizer.zero_grad()

    def iteration() -> None:
        batch = collector.collect()
        gae(batch)
        # advantages are standardised within the minibatch of each rank
        for minibatch in minibatches(batch, epochs=8, parts=4):
            optimize(loss_fn(minibatch))
        episodes.update(batch["next", "reward"], batch["next", "done"])

    step = iteration if eager else capture(iteration, device=ranks.device)
    for _ in range(iterations):
        step()
    each = ranks.values(float(episodes.mean_return))
    mean_return = sum(each) / len(each)
    if ranks.first:
        print(f"mean return of the last episodes of each rank: {mean_return:.1f}")
    leave()  # (5) releases the graph first: NCCL would wait for it
    return mean_return


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--iterations", type=int, default=60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--num-envs", type=int, default=128)
    options.add_argument("--eager", action="store_true", help="capture nothing")
    main(**vars(options.parse_args()))
