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
from torchrl.modules import (
    MLP,
    DistributionalQValueActor,
    MultiAgentMLP,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
)
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
    GAILLoss,
    IPPOLoss,
    IQLLoss,
    KLPENPPOLoss,
    LossModule,
    MAPPOLoss,
    PPOLoss,
    REDQLoss,
    ReinforceLoss,
    RNDLoss,
    SACLoss,
    TD3BCLoss,
    TD3Loss,
    TQCLoss,
)
from torchrl.objectives.value import GAE

from torchrl_perf.collectors import DeviceCollector
from torchrl_perf.envs import MarineNavigation, Pendulum

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


def curiosity() -> None:
    """RND's predictor on next observations of our batch."""
    fixed_seed()
    predictor, target = MLP(4, 8, **SMALL), MLP(4, 8, **SMALL)
    loss = RNDLoss(predictor, target, update_fraction=1.0)
    learns = {name: p for name, p in loss.named_parameters() if p.requires_grad}
    assert learns
    differentiate(dict(loss(batch_of(True).reshape(-1))), learns)


class JoinedSigmoid(torch.nn.Module):
    """A probability that state and action are the expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(4, 1, **SMALL)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """``[*, 1]``."""
        return self.net(observation, action).sigmoid()


def imitation() -> None:
    """GAIL's discriminator between our batch and rows of an expert."""
    fixed_seed()
    batch = batch_of(False).reshape(-1)
    expert = batch["observation"] + 1.0
    net = TensorDictModule(JoinedSigmoid(), ["observation", "action"], ["d_logits"])
    loss = GAILLoss(net)
    for who, observation in (("collector", batch["observation"]), ("expert", expert)):
        batch[f"{who}_observation"], batch[f"{who}_action"] = observation, batch["action"]
    differentiate(dict(loss(batch)), dict(loss.named_parameters()))


def agents(kind: type[LossModule], centralized: bool) -> None:
    """Three batches of five agents, with advantages by TorchRL's estimator for agents."""
    fixed_seed()
    env = MarineNavigation(2)
    seen, acted = ("agents", "observation"), ("agents", "action")
    size, width = env.full_observation_spec[seen].shape[-1], env.full_action_spec[acted].shape[-1]
    options = {"n_agents": 5, "share_params": True, "depth": 1, "num_cells": 16}
    net = torch.nn.Sequential(MultiAgentMLP(size, 2 * width, centralized=False, **options), NormalParamExtractor())
    params = [("agents", "loc"), ("agents", "scale")]
    actor = ProbabilisticActor(
        TensorDictModule(net, [seen], params),
        dict(zip(("loc", "scale"), params, strict=True)),
        [acted],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = TensorDictModule(
        MultiAgentMLP(size, 1, centralized=centralized, **options), [seen], [("agents", "state_value")]
    )
    loss = kind(actor, critic)
    names = {name: ("agents", name) for name in ("reward", "done", "terminated")}
    loss.set_keys(value=("agents", "state_value"), action=acted, **names)
    loss.make_value_estimator(gamma=0.9, lmbda=0.9)
    for batch in DeviceCollector(env, actor, frames_per_batch=16, total_frames=32):
        loss.value_estimator(batch)
        loss.zero_grad()
        differentiate(dict(loss(batch)), dict(loss.named_parameters()))


NO_SEQUENCES = "it learns from whole sequences of an offline data set, which no collector makes"
UNTRIED = {
    "DTLoss": NO_SEQUENCES,
    "OnlineDTLoss": NO_SEQUENCES,
    "ACTLoss": "it learns from demonstrated chunks of actions, which no collector makes",
    "DiffusionBCLoss": "it learns from demonstrations, which no collector makes",
    "QMixerLoss": "none of our envs has a state of all agents beside one reward for the team",
    "DreamerModelLoss": "its policy carries the state of a world model between steps, which no memory of ours has",
    "DreamerV3Loss": "its policy carries the state of a world model between steps, which no memory of ours has",
}
OTHERS: dict[str, Callable[[], None]] = {
    "RNDLoss": curiosity,
    "GAILLoss": imitation,
    "IPPOLoss": partial(agents, IPPOLoss, False),
    "MAPPOLoss": partial(agents, MAPPOLoss, True),
}

CELLS = no_cells_twice(
    [Cell(TABLE, "DeviceCollector", name, partial(on_policy, *made)) for name, made in ON_POLICY.items()]
    + [Cell(TABLE, "DeviceCollector", name, partial(off_policy, *made)) for name, made in OFF_POLICY.items()]
    + [Cell(TABLE, "DeviceCollector", name, run) for name, run in OTHERS.items()]
    + [Cell(TABLE, "DeviceCollector", name, fixed_seed, untried=reason) for name, reason in UNTRIED.items()]
)
