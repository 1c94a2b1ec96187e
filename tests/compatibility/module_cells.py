"""Our policies, networks and distributions in TorchRL's losses and in TorchRL's collector."""

from collections.abc import Callable
from functools import partial

import torch
from batches import SMALL, action_value, batch_of, make_env, q_actor, state_value
from cells import Cell, differentiate, fixed_seed, no_cells_twice
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    DDPGLoss,
    DiscreteSACLoss,
    DQNLoss,
    KLPENPPOLoss,
    LossModule,
    REDQLoss,
    ReinforceLoss,
    SACLoss,
    TD3Loss,
)
from torchrl.objectives.value import GAE

from torchrl_perf.envs import CartPole, Pendulum
from torchrl_perf.modules import (
    BoundedNormal,
    CategoricalMLP,
    DeterministicActor,
    DeviceActor,
    DeviceMaskedCategorical,
    DiagonalNormal,
    DuelingMLP,
    EpsilonGreedy,
    FusedMLP,
    GaussianNoise,
    GumbelCategorical,
    HybridActor,
    OUNoise,
    QuantileMLP,
    SquashedNormal,
    SquashedNormalHead,
    hybrid_features,
)

POLICIES = "Our policies and TorchRL's collector"
ON_POLICY = "Our modules and TorchRL's on-policy losses"
OFF_POLICY = "Our modules and TorchRL's off-policy losses"
BOUNDS = Pendulum(1).action_spec_unbatched
LOW, HIGH = BOUNDS.space.low, BOUNDS.space.high


def gumbel() -> DeviceActor:
    """Index actions."""
    return DeviceActor(FusedMLP(4, 2), distribution_class=GumbelCategorical, param_keys=["logits"])


def masked() -> ProbabilisticActor:
    """Index actions of a distribution that takes a mask, here without one."""
    net = TensorDictModule(MLP(4, 2, **SMALL), ["observation"], ["logits"])
    return ProbabilisticActor(net, ["logits"], distribution_class=DeviceMaskedCategorical, return_log_prob=True)


def squashed() -> ProbabilisticActor:
    """Bounded actions."""
    net = nn.Sequential(MLP(3, 2, **SMALL), SquashedNormalHead(LOW, HIGH))
    keys = SquashedNormalHead.param_keys
    module = TensorDictModule(net, ["observation"], keys)
    return ProbabilisticActor(
        module,
        keys,
        distribution_class=SquashedNormal,
        return_log_prob=True,
        spec=Pendulum(1).full_action_spec_unbatched,
    )


class LocScale(nn.Module):
    """Location and scale of one action, and the bounds where they are asked for."""

    def __init__(self, bounds: bool) -> None:
        super().__init__()
        self.net, self.bounds = MLP(3, 2, **SMALL), bounds

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[*, 1]`` each."""
        loc, scale = self.net(observation).chunk(2, -1)
        edges = (LOW.expand_as(loc), HIGH.expand_as(loc)) if self.bounds else ()
        return loc, scale.exp(), *edges


def normal(bounded: bool) -> ProbabilisticActor:
    """Actions of a diagonal normal, or of one squashed into bounds."""
    keys = ["loc", "scale", "low", "high"] if bounded else ["loc", "scale"]
    kind = BoundedNormal if bounded else DiagonalNormal
    net = TensorDictModule(LocScale(bounded), ["observation"], keys)
    return ProbabilisticActor(net, keys, distribution_class=kind, return_log_prob=True)


def hybrid() -> HybridActor:
    """One bounded part."""
    spec = Pendulum(1).full_action_spec_unbatched
    return HybridActor(MLP(3, hybrid_features(spec), **SMALL), spec=spec)


def deterministic() -> DeterministicActor:
    """Bounded actions without noise."""
    return DeterministicActor(MLP(3, 1, **SMALL), spec=BOUNDS)


def greedy(network: nn.Module) -> EpsilonGreedy:
    """Epsilon-greedy on one of our networks of action values."""
    return EpsilonGreedy(network, spec=CartPole(1).action_spec_unbatched)


DISCRETE: dict[str, Callable[[], TensorDictModuleBase]] = {
    "DeviceActor, GumbelCategorical, FusedMLP": gumbel,
    "DeviceMaskedCategorical": masked,
}
CONTINUOUS: dict[str, Callable[[], TensorDictModuleBase]] = {
    "SquashedNormal": squashed,
    "BoundedNormal": partial(normal, True),
    "DiagonalNormal": partial(normal, False),
    "HybridActor": hybrid,
}
DETERMINISTIC: dict[str, Callable[[], TensorDictModuleBase]] = {
    "DeterministicActor": deterministic,
    "GaussianNoise": lambda: GaussianNoise(deterministic(), spec=BOUNDS),
    "OUNoise": lambda: OUNoise(deterministic(), spec=make_env(False).action_spec),
}
VALUES: dict[str, Callable[[], nn.Module]] = {
    "FusedMLP": lambda: FusedMLP(4, 2),
    "DuelingMLP": lambda: DuelingMLP(4, 2),
    "QuantileMLP": lambda: QuantileMLP(4, 2, num_quantiles=4),
    "CategoricalMLP": lambda: CategoricalMLP(4, 2, num_atoms=5),
}


def collects(discrete: bool, make: Callable[[], TensorDictModuleBase]) -> None:
    """TorchRL's Collector acts with the policy: actions within the spec, and not all alike."""
    fixed_seed()
    env = make_env(discrete)
    collector = Collector(env, make(), frames_per_batch=48, total_frames=96)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    assert [batch.numel() for batch in batches] == [48, 48]
    action = torch.cat([batch["action"] for batch in batches])
    if discrete:
        assert set(action.unique().tolist()) == {0, 1}
    else:
        assert action.isfinite().all()
        assert action.std() > 0
    if "action_log_prob" in batches[0]:
        assert batches[0]["action_log_prob"].isfinite().all()


def greedy_collects(make: Callable[[], nn.Module]) -> None:
    """With TorchRL's exploration types: greedy where nothing is random."""
    collects(True, lambda: greedy(make()))


def advantages(discrete: bool) -> TensorDictBase:
    """A flat batch with TorchRL's advantages."""
    batch = batch_of(discrete)
    GAE(gamma=0.9, lmbda=0.9, value_network=state_value(4 if discrete else 3))(batch)
    return batch.reshape(-1)


def on_policy(discrete: bool, make: Callable[[], TensorDictModuleBase], loss_class: type[LossModule]) -> None:
    """The log-probability of the taken actions under our distribution gives the loss its gradient."""
    fixed_seed()
    actor, critic = make(), state_value(4 if discrete else 3)
    batch = advantages(discrete)
    with torch.no_grad():
        actor(batch)  # our keys of parameters, actions and log-probabilities
    options = {"critic_network": critic} if loss_class is ReinforceLoss else {}
    loss = loss_class(actor, **options) if options else loss_class(actor, critic)
    if isinstance(actor, HybridActor) and loss_class in (ClipPPOLoss, KLPENPPOLoss):
        loss.set_keys(sample_log_prob=["action_log_prob"])  # a list, as of an action of several parts
    values = loss(batch)
    if loss_class is ClipPPOLoss:
        torch.testing.assert_close(values["kl_approx"], torch.zeros(()), atol=1e-5, rtol=0)
    differentiate(dict(values), dict(loss.named_parameters()))


def soft_actor_critic(make: Callable[[], TensorDictModuleBase], loss_class: type[LossModule]) -> None:
    """Reparametrised actions of our distribution."""
    fixed_seed()
    loss = loss_class(make(), action_value(), action_spec=BOUNDS)
    loss.make_value_estimator(gamma=0.9)
    differentiate(dict(loss(batch_of(False).reshape(-1))), dict(loss.named_parameters()))


def discrete_soft_actor_critic(make: Callable[[], TensorDictModuleBase]) -> None:
    """Probabilities of our categorical."""
    fixed_seed()
    critic = TensorDictModule(FusedMLP(4, 2), ["observation"], ["action_value"])
    loss = DiscreteSACLoss(make(), critic, action_space="categorical", num_actions=2)
    loss.make_value_estimator(gamma=0.9)
    differentiate(dict(loss(batch_of(True).reshape(-1))), dict(loss.named_parameters()))


def deterministic_policy(make: Callable[[], TensorDictModuleBase], loss_class: type[LossModule]) -> None:
    """Gradients through our bounded actor."""
    fixed_seed()
    options = {"action_spec": BOUNDS} if loss_class is TD3Loss else {}
    loss = loss_class(make(), action_value(), **options)
    loss.make_value_estimator(gamma=0.9)
    differentiate(dict(loss(batch_of(False).reshape(-1))), dict(loss.named_parameters()))


def q_learning(make: Callable[[], nn.Module]) -> None:
    """Our network in TorchRL's QValueActor, beside its own network in the same loss."""
    fixed_seed()
    network = QValueActor(make(), in_keys=["observation"], spec=CartPole(1).action_spec_unbatched)
    assert set(network.out_keys) == set(q_actor().out_keys)
    loss = DQNLoss(network, delay_value=True, action_space="categorical")
    loss.make_value_estimator(gamma=0.9)
    differentiate(dict(loss(batch_of(True).reshape(-1))), dict(loss.named_parameters()))


def state_values() -> None:
    """FusedMLP as the critic of TorchRL's PPO and GAE."""
    fixed_seed()
    batch, critic = batch_of(True), ValueOperator(FusedMLP(4, 1), in_keys=["observation"])
    GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    loss = ClipPPOLoss(gumbel(), critic)
    differentiate(dict(loss(batch.reshape(-1))), dict(loss.named_parameters()))


PARTS = (
    "TorchRL's loss puts a sample under the key of one action, and a sample of this policy is a TensorDict of the "
    "parts of an action. Use `HybridSACLoss`."
)


def _parts(name: str) -> tuple[str, str] | tuple[()]:
    return (PARTS, "'Tensor' object has no attribute 'batch_size'") if name == "HybridActor" else ()


ACTORS = [(name, True, make) for name, make in DISCRETE.items()]
ACTORS += [(name, False, make) for name, make in CONTINUOUS.items()]
CELLS = no_cells_twice(
    [Cell(POLICIES, name, "Collector", partial(collects, *rest)) for name, *rest in ACTORS]
    + [Cell(POLICIES, name, "Collector", partial(collects, False, make)) for name, make in DETERMINISTIC.items()]
    + [
        Cell(POLICIES, f"EpsilonGreedy on {name}", "Collector", partial(greedy_collects, make))
        for name, make in VALUES.items()
    ]
    + [
        Cell(ON_POLICY, name, kind.__name__, partial(on_policy, discrete, make, kind))
        for name, discrete, make in ACTORS
        for kind in (ClipPPOLoss, KLPENPPOLoss, A2CLoss, ReinforceLoss)
    ]
    + [
        Cell(OFF_POLICY, name, kind.__name__, partial(soft_actor_critic, CONTINUOUS[name], kind), *_parts(name))
        for name in CONTINUOUS
        for kind in (SACLoss, REDQLoss)
    ]
    + [
        Cell(OFF_POLICY, name, "DiscreteSACLoss", partial(discrete_soft_actor_critic, make))
        for name, make in DISCRETE.items()
    ]
    + [
        Cell(OFF_POLICY, "DeterministicActor", kind.__name__, partial(deterministic_policy, deterministic, kind))
        for kind in (DDPGLoss, TD3Loss)
    ]
    + [Cell(OFF_POLICY, name, "DQNLoss", partial(q_learning, make)) for name, make in VALUES.items()]
    + [Cell(ON_POLICY, "FusedMLP as critic", "ClipPPOLoss", state_values)]
)
