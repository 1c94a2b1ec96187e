"""TorchRL's losses on batches of our collector, with TorchRL's networks."""

from collections.abc import Callable
from functools import partial

import torch
from batches import (
    SMALL,
    action_value,
    batch_of,
    continuous_actor,
    deterministic_actor,
    discrete_actor,
    q_actor,
    state_value,
)
from cells import Cell, differentiate, fixed_seed, no_cells_twice
from tensordict.nn import TensorDictModule
from torchrl.data import OneHot
from torchrl.modules import MLP, DistributionalQValueActor, TanhNormal
from torchrl.objectives import (
    A2CLoss,
    BCLoss,
    ClipPPOLoss,
    CQLLoss,
    CrossQLoss,
    DDPGLoss,
    DiscreteCQLLoss,
    DiscreteIQLLoss,
    DiscreteSACLoss,
    DistributionalDQNLoss,
    DQNLoss,
    IQLLoss,
    KLPENPPOLoss,
    LossModule,
    PPOLoss,
    REDQLoss,
    ReinforceLoss,
    SACLoss,
    TD3BCLoss,
    TD3Loss,
    TQCLoss,
)
from torchrl.objectives.value import GAE

from torchrl_perf.envs import Pendulum

TABLE = "Our collector and TorchRL's losses"
ACTION = Pendulum(1).action_spec_unbatched


def q_of_each_action() -> TensorDictModule:
    """Q(s, .) under the key that the discrete actor-critic losses read."""
    return TensorDictModule(MLP(4, 2, **SMALL), ["observation"], ["action_value"])


def atoms_actor() -> DistributionalQValueActor:
    """TorchRL's C51 network of five atoms."""
    return DistributionalQValueActor(
        MLP(4, (5, 2), **SMALL), support=torch.linspace(0, 10, 5), spec=OneHot(2), in_keys=["observation"]
    )


def cross_q() -> CrossQLoss:
    """CrossQ, whose critic sees states and next states in one batch."""
    return CrossQLoss(continuous_actor(TanhNormal), action_value(), action_spec=ACTION)


ON_POLICY: dict[str, tuple[bool, Callable[[], LossModule]]] = {
    "ClipPPOLoss": (True, lambda: ClipPPOLoss(discrete_actor(), state_value(4))),
    "ClipPPOLoss, TanhNormal": (False, lambda: ClipPPOLoss(continuous_actor(TanhNormal), state_value(3))),
    "KLPENPPOLoss": (True, lambda: KLPENPPOLoss(discrete_actor(), state_value(4))),
    "PPOLoss": (True, lambda: PPOLoss(discrete_actor(), state_value(4))),
    "A2CLoss": (True, lambda: A2CLoss(discrete_actor(), state_value(4))),
    "ReinforceLoss": (True, lambda: ReinforceLoss(discrete_actor(), critic_network=state_value(4))),
}
OFF_POLICY: dict[str, tuple[bool, Callable[[], LossModule]]] = {
    "DQNLoss": (True, lambda: DQNLoss(q_actor(), delay_value=True, action_space="categorical")),
    "DistributionalDQNLoss": (True, lambda: DistributionalDQNLoss(atoms_actor(), gamma=0.99, delay_value=True)),
    "DiscreteSACLoss": (
        True,
        lambda: DiscreteSACLoss(discrete_actor(), q_of_each_action(), action_space="categorical", num_actions=2),
    ),
    "DiscreteCQLLoss": (True, lambda: DiscreteCQLLoss(q_actor(), action_space="categorical")),
    "DiscreteIQLLoss": (
        True,
        lambda: DiscreteIQLLoss(
            discrete_actor(),
            TensorDictModule(MLP(4, 2, **SMALL), ["observation"], ["state_action_value"]),
            value_network=state_value(4),
            action_space="categorical",
        ),
    ),
    "BCLoss": (False, lambda: BCLoss(continuous_actor(TanhNormal))),
    "SACLoss": (False, lambda: SACLoss(continuous_actor(TanhNormal), action_value(), action_spec=ACTION)),
    "TD3Loss": (False, lambda: TD3Loss(deterministic_actor(), action_value(), action_spec=ACTION)),
    "TD3BCLoss": (False, lambda: TD3BCLoss(deterministic_actor(), action_value(), action_spec=ACTION)),
    "DDPGLoss": (False, lambda: DDPGLoss(deterministic_actor(), action_value())),
    "CQLLoss": (False, lambda: CQLLoss(continuous_actor(TanhNormal), action_value(), action_spec=ACTION)),
    "IQLLoss": (False, lambda: IQLLoss(continuous_actor(), action_value(), value_network=state_value(3))),
    "REDQLoss": (False, lambda: REDQLoss(continuous_actor(TanhNormal), action_value(), action_spec=ACTION)),
    "TQCLoss": (False, lambda: TQCLoss(continuous_actor(TanhNormal), action_value(out=25), action_spec=ACTION)),
    "CrossQLoss": (False, cross_q),
}
"""Losses by name: whether on CartPole (else Pendulum), and how TorchRL's documentation makes them."""


def on_policy(discrete: bool, make: Callable[[], LossModule]) -> None:
    """Advantages by TorchRL's GAE, then the loss of the whole batch."""
    fixed_seed()
    batch, loss = batch_of(discrete), make()
    GAE(gamma=0.9, lmbda=0.9, value_network=state_value(4 if discrete else 3))(batch)
    differentiate(dict(loss(batch.reshape(-1))), dict(loss.named_parameters()))


def off_policy(discrete: bool, make: Callable[[], LossModule]) -> None:
    """The loss of the batch's rows, as a replay buffer would give them."""
    fixed_seed()
    batch, loss = batch_of(discrete).reshape(-1), make()
    if isinstance(loss, DistributionalDQNLoss):  # it takes one-hot actions alone
        batch["action"] = torch.nn.functional.one_hot(batch["action"], 2)
    elif not isinstance(loss, BCLoss):
        loss.make_value_estimator(gamma=0.9)
    differentiate(dict(loss(batch)), dict(loss.named_parameters()))


CELLS = no_cells_twice(
    [Cell(TABLE, "DeviceCollector", name, partial(on_policy, *made)) for name, made in ON_POLICY.items()]
    + [Cell(TABLE, "DeviceCollector", name, partial(off_policy, *made)) for name, made in OFF_POLICY.items()]
)
