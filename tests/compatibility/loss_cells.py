"""Our losses with TorchRL's collectors, trainers, replay buffers and updaters of targets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from batches import SMALL, action_value, continuous_actor, discrete_actor, make_env, q_actor, state_value
from cells import Cell, differentiate, fixed_seed, no_cells_twice
from module_cells import BOUNDS, deterministic
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import EnvBase
from torchrl.modules import MLP, QValueActor, TanhNormal
from torchrl.objectives import HardUpdate, LossModule, SoftUpdate
from torchrl.objectives.value import GAE
from torchrl.trainers.algorithms import DDPGTrainer, DQNTrainer, PPOTrainer, SACTrainer, TD3Trainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

from torchrl_perf.envs import CartPole, HybridTarget, Pendulum
from torchrl_perf.modules import (
    ICM,
    CategoricalMLP,
    EnsembleHybridQ,
    HybridActor,
    ImplicitQuantileCritic,
    QuantileMLP,
    hybrid_features,
)
from torchrl_perf.objectives import (
    ACIQNLoss,
    DeviceC51Loss,
    DeviceClipPPOLoss,
    DeviceDQNLoss,
    DeviceKLPENPPOLoss,
    DeviceSACLoss,
    DeviceTD3Loss,
    HybridSACLoss,
    ICMLoss,
    QuantileDQNLoss,
)

TABLE = "Our losses and TorchRL's collector, trainers and updaters"
FRAMES = 48


@dataclass(frozen=True)
class Learner:
    """A loss, the policy that collects for it, and where."""

    loss: LossModule
    policy: TensorDictModuleBase
    env: EnvBase


def ppo(kind: type[LossModule], discrete: bool = True) -> Learner:
    """An on-policy loss on TorchRL's actor and critic."""
    actor = discrete_actor() if discrete else continuous_actor(TanhNormal)
    return Learner(kind(actor, state_value(4 if discrete else 3)), actor, make_env(discrete))


def sac() -> Learner:
    """On TorchRL's actor and critic."""
    actor = continuous_actor(TanhNormal)
    return Learner(DeviceSACLoss(actor, action_value(), action_spec=BOUNDS), actor, make_env(False))


def td3(**options: Any) -> Learner:
    """On our deterministic actor and TorchRL's critic."""
    actor = deterministic()
    return Learner(DeviceTD3Loss(actor, action_value(), action_spec=BOUNDS, **options), actor, make_env(False))


def ac_iqn() -> Learner:
    """On our implicit-quantile critic."""
    actor = deterministic()
    critic = ImplicitQuantileCritic(3, 1, hidden_size=8)
    return Learner(ACIQNLoss(actor, critic, critic_keys=None), actor, make_env(False))


def dqn() -> Learner:
    """On TorchRL's QValueActor."""
    actor = q_actor()
    return Learner(DeviceDQNLoss(actor, action_space="categorical"), actor, make_env(True))


def values(kind: type[LossModule], make: Callable[[], nn.Module]) -> Learner:
    """On our networks of distributions of values, in TorchRL's QValueActor."""
    actor = QValueActor(make(), in_keys=["observation"], spec=CartPole(1).action_spec_unbatched)
    return Learner(kind(actor), actor, make_env(True))


def hybrid() -> Learner:
    """On an action of two parts."""
    env = HybridTarget(6)
    spec, size = env.full_action_spec_unbatched, env.observation_spec["observation"].shape[-1]
    actor = HybridActor(MLP(size, hybrid_features(spec), **SMALL), spec=spec)
    (kind, choice), (push, amount) = sorted(spec.items(True, True), key=lambda item: item[1].dtype.is_floating_point)
    del kind
    network = EnsembleHybridQ(2, size + amount.shape[-1], choice.space.n, hidden_sizes=(8,))
    critic = TensorDictModule(network, ["observation", push], ["action_value"])
    return Learner(HybridSACLoss(actor, critic), actor, env)


def icm() -> Learner:
    """Curiosity beside a policy that does not learn."""
    module = ICM(4, spec=CartPole(1).action_spec_unbatched, hidden_size=16, num_features=8)
    return Learner(ICMLoss(module), discrete_actor(), make_env(True))


LEARNERS: dict[str, tuple[Callable[[], Learner], type | None]] = {
    "DeviceClipPPOLoss": (partial(ppo, DeviceClipPPOLoss), PPOTrainer),
    "DeviceClipPPOLoss, TanhNormal": (partial(ppo, DeviceClipPPOLoss, False), PPOTrainer),
    "DeviceKLPENPPOLoss": (partial(ppo, DeviceKLPENPPOLoss), PPOTrainer),
    "DeviceSACLoss": (sac, SACTrainer),
    "DeviceTD3Loss": (td3, TD3Trainer),
    "DeviceTD3Loss as DDPG": (partial(td3, num_qvalue_nets=None, policy_noise=0.0), DDPGTrainer),
    "ACIQNLoss": (ac_iqn, DDPGTrainer),
    "DeviceDQNLoss": (dqn, DQNTrainer),
    "DeviceC51Loss": (partial(values, DeviceC51Loss, lambda: CategoricalMLP(4, 2, num_atoms=5)), DQNTrainer),
    "QuantileDQNLoss": (partial(values, QuantileDQNLoss, lambda: QuantileMLP(4, 2, num_quantiles=4)), DQNTrainer),
    "HybridSACLoss": (hybrid, SACTrainer),
    "ICMLoss": (icm, None),
}
"""Losses by name, and the trainer of TorchRL for the algorithm."""


def collected(make: Callable[[], Learner]) -> None:
    """The loss of a batch of TorchRL's Collector, whose policy is the one that learns."""
    fixed_seed()
    one = make()
    collector = Collector(one.env, one.policy, frames_per_batch=FRAMES, total_frames=FRAMES)
    for batch in collector:
        if isinstance(one.loss, DeviceClipPPOLoss | DeviceKLPENPPOLoss):
            GAE(gamma=0.9, lmbda=0.9, value_network=one.loss.critic_network)(batch)
        differentiate(dict(one.loss(batch.reshape(-1))), dict(one.loss.named_parameters()))
    collector.shutdown()


def trained(make: Callable[[], Learner], trainer_class: type, updater: Callable[[LossModule], Any] | None) -> None:
    """Two batches of TorchRL's trainer with its own buffer: all parameters move, to finite values."""
    fixed_seed()
    one = make()
    sampler = {"sampler": SamplerWithoutReplacement()} if trainer_class is PPOTrainer else {}
    options: dict[str, Any] = {}
    if trainer_class is PPOTrainer:
        options = {
            "num_epochs": 2,
            "gae": GAE(gamma=0.9, lmbda=0.9, value_network=one.loss.critic_network),
        }
    else:
        options = {"target_net_updater": updater(one.loss)}
    if trainer_class is TD3Trainer:
        critics = [p for name, p in one.loss.named_parameters() if "qvalue" in name]
        actor = [p for name, p in one.loss.named_parameters() if "actor" in name]
        adams = [torch.optim.Adam(parameters, 1e-2) for parameters in (actor, critics)]
        options["optimization_stepper"] = TD3OptimizationStepper(*adams, policy_update_delay=2)
    else:
        options["optimizer"] = torch.optim.Adam(one.loss.parameters(), 1e-2)
    before = {name: p.detach().clone() for name, p in one.loss.named_parameters()}
    targets = {name: p.detach().clone() for name, p in one.loss.named_buffers() if name.startswith("target_")}
    trainer = trainer_class(
        collector=Collector(one.env, one.policy, frames_per_batch=FRAMES, total_frames=2 * FRAMES),
        total_frames=2 * FRAMES,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=one.loss,
        replay_buffer=TensorDictReplayBuffer(
            storage=LazyTensorStorage(2 * FRAMES if updater else FRAMES), batch_size=24, **sampler
        ),
        enable_logging=False,
        progress_bar=False,
        **options,
    )
    trainer.train()
    assert trainer.collected_frames == 2 * FRAMES
    for name, p in one.loss.named_parameters():
        assert p.isfinite().all(), name
        assert not torch.equal(p, before[name]), name
    after = dict(one.loss.named_buffers())
    assert bool(targets) == bool(updater)
    assert all(after[name].isfinite().all() for name in targets)
    if targets:
        assert any(not torch.equal(after[name], old) for name, old in targets.items())


def pendulum() -> EnvBase:
    """For a worker."""
    return Pendulum(2)


def in_processes() -> None:
    """Batches of TorchRL's processes, which hold our env and TorchRL's actor, in our loss."""
    fixed_seed()
    one = sac()
    collector = MultiSyncCollector([pendulum], one.policy, frames_per_batch=16, total_frames=16)
    try:
        for batch in collector:
            differentiate(dict(one.loss(batch.reshape(-1))), dict(one.loss.named_parameters()))
    finally:
        collector.shutdown()


SOFT: dict[str, Callable[[LossModule], Any]] = {
    "SoftUpdate": partial(SoftUpdate, tau=0.1),
    "HardUpdate": partial(HardUpdate, value_network_update_interval=2),
}


def _cells() -> list[Cell]:
    cells = []
    for name, (make, trainer) in LEARNERS.items():
        cells.append(Cell(TABLE, name, "Collector", partial(collected, make)))
        if trainer is PPOTrainer:
            cells.append(Cell(TABLE, name, "its trainer", partial(trained, make, trainer, None)))
        elif trainer is not None:
            cells += [
                Cell(TABLE, name, f"its trainer, {kind}", partial(trained, make, trainer, updater))
                for kind, updater in SOFT.items()
            ]
    return [*cells, Cell(TABLE, "DeviceSACLoss", "MultiSyncCollector", in_processes)]


CELLS = no_cells_twice(_cells())
