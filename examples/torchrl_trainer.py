"""TorchRL's own PPOTrainer, SACTrainer and DQNTrainer, without waiting for the host.

    python examples/torchrl_trainer.py                    # PPO on CartPole
    python examples/torchrl_trainer.py --algorithm dqn    # DQN on CartPole
    python examples/torchrl_trainer.py --algorithm sac    # SAC on Pendulum

Networks, losses and trainers are TorchRL's; collector, advantage, replay buffer, optimiser step and logging are this
package's, installed by one call, ``use_device_parts``. Each runs for less than a minute on a CPU. Expected last line,
with a mean return above 300 (PPO), 100 (DQN) or -400 (SAC, where a random policy gets -1200):

    ppo: 0.0 host reads a batch, mean return of the last 20 episodes 500.0
"""

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import DQNLoss, SACLoss, SoftUpdate
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import DQNTrainer, PPOTrainer, SACTrainer

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.modules import EpsilonGreedy, GumbelCategorical, SquashedNormal, SquashedNormalHead
from torchrl_perf.objectives import DeviceClipPPOLoss
from torchrl_perf.replay import make_replay_buffer
from torchrl_perf.runtime import HostSyncReport, host_syncs
from torchrl_perf.trainers import DeviceParts, GuardedAdam, use_device_parts
from torchrl_perf.transforms import GAETransform


@dataclass(frozen=True)
class Config:
    """Settings of the run; None takes the algorithm's own."""

    algorithm: Literal["ppo", "dqn", "sac"] = "ppo"
    """Which trainer."""
    total_frames: int | None = None
    """Frames of the run: 102,400, 40,960 or 16,384."""
    prioritized: bool = False
    """Prioritised replay, for DQN and SAC."""
    mode: Literal["eager", "graph"] = "graph" if torch.cuda.is_available() else "eager"
    """How an optimiser step runs."""
    seed: int = 0
    """Seed of networks, envs and sampling."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where everything runs."""


# TorchRL's own parts of these trainers, left out
NO_PARTS = {"replay_buffer": None, "optimizer": None, "enable_logging": False, "progress_bar": False, "frame_skip": 1}


class HostReads:
    """Counts the host reads of the batches from ``first`` to ``last``, from inside the trainer's loop.

    Collection, optimisation and hooks all count.
    """

    def __init__(self, trainer: Trainer, first: int, last: int) -> None:
        self.first, self.last, self.batch = first, last, 0
        self._open = ExitStack()
        self._report: HostSyncReport | None = None
        trainer.register_op("pre_steps_log", self.begin_or_end)

    def __str__(self) -> str:
        if self._report is None or self.batch <= self.last:
            return f"no host reads counted before batch {self.last + 1}"
        return f"{self._report.total / (self.last - self.first + 1):.1f} host reads a batch"

    def begin_or_end(self, batch: TensorDictBase) -> None:
        """After a batch has been collected, before it is learnt from."""
        self.batch += 1
        if self.batch == self.first:
            self._report = self._open.enter_context(host_syncs())
        elif self.batch == self.last + 1:
            self._open.close()


def make_ppo(config: Config) -> tuple[Trainer, DeviceParts]:
    """PPO: the buffer is the batch itself, and the advantage is estimated once an epoch."""
    frames = config.total_frames or 102_400
    env = CartPole(128, device=config.device)
    net = TensorDictModule(mlp(4, 2, env.device), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        net, ["logits"], distribution_class=GumbelCategorical, return_log_prob=True, spec=env.full_action_spec
    )
    critic = ValueOperator(mlp(4, 1, env.device), in_keys=["observation"])
    loss = DeviceClipPPOLoss(actor, critic, entropy_coeff=0.01, loss_critic_type="l2", normalize_advantage=True)
    trainer = PPOTrainer(
        collector=DeviceCollector(env, actor, frames_per_batch=4096, total_frames=frames, exclude_keys=("logits",)),
        total_frames=frames,
        optim_steps_per_batch=4096 // 512,
        num_epochs=8,
        loss_module=loss,
        gae=GAETransform(gamma=0.98, lmbda=0.95, value_network=critic),
        **NO_PARTS,
    )
    optimizer = GuardedAdam(loss.parameters(), learning_rate=1e-3, max_grad_norm=0.5)
    return trainer, use_device_parts(
        trainer, optimizer, minibatch_size=512, log_interval=10 * 4096, window=20, mode=config.mode
    )


def make_dqn(config: Config) -> tuple[Trainer, DeviceParts]:
    """Double DQN, whose epsilon falls in closed form: the trainer's own takes a step of Python for each frame."""
    frames = config.total_frames or 40_960
    env = CartPole(16, device=config.device)
    spec = env.action_spec_unbatched
    value = QValueActor(mlp(4, 2, env.device), in_keys=["observation"], spec=spec)
    greedy = EpsilonGreedy(nn.Identity(), spec=spec, in_keys=["action_value"], decay_frames=frames // 4)
    loss = DQNLoss(value, delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=0.98)
    trainer = DQNTrainer(
        collector=DeviceCollector(
            env,
            TensorDictSequential(value, greedy),
            frames_per_batch=256,
            total_frames=frames,
            init_random_frames=1024,
            exclude_keys=("action_value", "chosen_action_value"),
        ),
        total_frames=frames,
        optim_steps_per_batch=16,
        loss_module=loss,
        target_net_updater=SoftUpdate(loss, tau=0.01),
        greedy_module=greedy,
        **NO_PARTS,
    )
    optimizer = GuardedAdam(loss.parameters(), learning_rate=1e-3, max_grad_norm=10.0)
    return trainer, install_off_policy(trainer, optimizer, config, interval=40 * 256)


def make_sac(config: Config) -> tuple[Trainer, DeviceParts]:
    """SAC with a squashed normal that asks the host nothing."""
    frames = config.total_frames or 16_384
    env = Pendulum(16, device=config.device)
    keys = SquashedNormalHead.param_keys
    limit = torch.tensor([2.0], device=env.device)
    head = SquashedNormalHead(-limit, limit)
    actor = ProbabilisticActor(
        TensorDictModule(nn.Sequential(mlp(3, 2, env.device), head), ["observation"], keys),
        in_keys=keys,
        distribution_class=SquashedNormal,
        spec=env.full_action_spec_unbatched,
    )
    critic = ValueOperator(mlp(4, 1, env.device), in_keys=["observation", "action"], out_keys=["state_action_value"])
    # minus the number of action dims: what "auto" makes of a spec that holds all envs is N times that
    loss = SACLoss(actor, critic, num_qvalue_nets=2, target_entropy=-1.0, loss_function="l2")
    loss.make_value_estimator(gamma=0.99)
    trainer = SACTrainer(
        collector=DeviceCollector(
            env, actor, frames_per_batch=64, total_frames=frames, init_random_frames=1024, exclude_keys=keys
        ),
        total_frames=frames,
        optim_steps_per_batch=16,
        loss_module=loss,
        target_net_updater=SoftUpdate(loss, tau=0.01),
        **NO_PARTS,
    )
    optimizer = GuardedAdam(loss.parameters(), learning_rate=2e-3, max_grad_norm=100.0)
    return trainer, install_off_policy(trainer, optimizer, config, interval=64 * 64)


def install_off_policy(trainer: Trainer, optimizer: GuardedAdam, config: Config, interval: int) -> DeviceParts:
    """The device's replay buffer, and the rest."""
    buffer = make_replay_buffer(
        50_000,
        batch_size=256,
        device=config.device,
        sampler="prioritized" if config.prioritized else "random",
    )
    return use_device_parts(
        trainer, optimizer, replay_buffer=buffer, log_interval=interval, window=20, mode=config.mode
    )


def mlp(inputs: int, outputs: int, device: torch.device | None) -> MLP:
    """Two hidden layers of 64 each."""
    return MLP(inputs, outputs, num_cells=[64, 64], activation_class=nn.ReLU, device=device)


def main(config: Config) -> float:
    """Trains; returns the mean return of the last 20 finished episodes."""
    warnings.filterwarnings("ignore", message=".*Trainer is an experimental")
    torch.manual_seed(config.seed)
    make = {"ppo": make_ppo, "dqn": make_dqn, "sac": make_sac}[config.algorithm]
    trainer, parts = make(config)
    reads = HostReads(trainer, *((6, 7) if config.algorithm == "ppo" else (24, 27)))
    trainer.train()
    mean_return = parts.log.row.get("episode/mean_return", float("nan"))
    print(f"{config.algorithm}: {reads}, mean return of the last 20 episodes {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main(tyro.cli(Config))
