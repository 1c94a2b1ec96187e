"""Curiosity: PPO finds a goal that chance does not reach, by a reward for what a model does not foresee yet.

Run it with ``python examples/curiosity.py``; a few minutes on one CPU core. MountainCar says -1 at each step, so that
nothing is learnt before the flag is reached once. An intrinsic curiosity module (``ICM``, arXiv:1705.05363) learns to
foresee the features of the next state beside the policy, and its error is added to the reward: fast cars are new, and
fast cars reach the flag. Last line on a CPU:

    flag reached 527 times, mean return -169.7, mean surprise 9.6e-05

Seeds 1 and 2: 624 and 409 times, -168.4 and -176.3. Without the reward (``--curiosity 0``) none of the three reaches
the flag once, and all returns are -200.
"""

import torch
import tyro
from torchrl.envs import ObservationNorm, TransformedEnv

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import MountainCar
from torchrl_perf.metrics import EpisodeStatistics
from torchrl_perf.modules import ICM
from torchrl_perf.objectives import DeviceClipPPOLoss, ICMLoss
from torchrl_perf.replay import BoundedHistory
from torchrl_perf.trainers import GuardedAdam, PPOConfig, make_actor, make_critic, minibatches
from torchrl_perf.transforms import GAETransform

NUM_ENVS, NUM_STEPS = 16, 200


def main(iterations: int = 100, seed: int = 0, curiosity: float = 1.0) -> tuple[int, float]:
    """Trains for 320,000 steps; returns how often the flag was reached, and the mean return of the last 100 episodes.

    Args:
        iterations: of 16 cars and 200 steps each.
        seed: of the networks and the env.
        curiosity: weight of the intrinsic reward, whose standard deviation is 1; 0 for plain PPO.
    """
    torch.manual_seed(seed)
    # a speed of 0.07 is as much as a position of 0.9: the networks and the curiosity see both alike
    scale = ObservationNorm(torch.tensor([-0.3, 0.0]), torch.tensor([0.9, 0.07]), ["observation"], standard_normal=True)
    env = TransformedEnv(MountainCar(NUM_ENVS), scale)
    actor, critic = make_actor(env, PPOConfig()), make_critic(env, PPOConfig())
    collector = DeviceCollector(env, actor, frames_per_batch=NUM_ENVS * NUM_STEPS, mode="eager")
    gae = GAETransform(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = DeviceClipPPOLoss(
        actor, critic, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True, functional=False
    )
    optimizer = GuardedAdam(loss.parameters(), learning_rate=1e-3, max_grad_norm=0.5)

    icm = ICM(2, spec=env.action_spec, hidden_size=64, num_features=16)
    icm_loss = ICMLoss(icm)
    icm_optimizer = GuardedAdam(icm_loss.parameters(), learning_rate=3e-4, max_grad_norm=0.5)
    surprise = BoundedHistory(maxlen=10)  # the mean error of the newest ten iterations
    episodes, reached = EpisodeStatistics(NUM_ENVS, "cpu"), 0

    for _ in range(iterations):
        batch = collector.collect()
        episodes.update(batch["next", "reward"], batch["next", "done"])
        reached += int(batch["next", "terminated"].sum())

        intrinsic = icm(batch)["next", "intrinsic_reward"]
        surprise.append(float(intrinsic.mean()))
        # in place, since the next batch is written into the same memory; the error falls, its share of the reward not
        batch["next", "reward"].add_(intrinsic / intrinsic.std(), alpha=curiosity)

        gae(batch)
        for minibatch in minibatches(batch, epochs=2, parts=4):
            losses = loss(minibatch)
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses = icm_loss(minibatch)
            (losses["loss_inverse"] + losses["loss_forward"]).backward()
            icm_optimizer.step()
            icm_optimizer.zero_grad()

    mean_return = float(episodes.mean_return)
    print(f"flag reached {reached} times, mean return {mean_return:.1f}, mean surprise {surprise.mean():.2g}")
    return reached, mean_return


if __name__ == "__main__":
    tyro.cli(main)
