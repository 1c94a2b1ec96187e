"""The policies that ``torchrl-perf bench policies`` measures: one function for each agent.

All have the sizes below: observations ``[N, 32]``, 8 choices or 4 continuous actions, hidden layers of 64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, Composite
from torchrl.modules import (
    AdditiveGaussianModule,
    DistributionalQValueActor,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    TanhModule,
    TanhNormal,
)

from torchrl_perf.modules import (
    CategoricalMLP,
    DeterministicActor,
    DeviceActor,
    DuelingMLP,
    EpsilonGreedy,
    FusedMLP,
    HybridActor,
    ImplicitQuantileMLP,
    OptionActor,
    OptionController,
    OptionPolicy,
    OptionSet,
    QuantileMLP,
    SquashedNormal,
    SquashedNormalHead,
    TimeHazard,
    hybrid_features,
)
from torchrl_perf.modules.deterministic import Squash
from torchrl_perf.modules.noise import GaussianNoise, OUNoise

OBS, CHOICES, AXES, EPSILON = 32, 8, 4, 0.05
OPTIONS = ("north", "east", "south", "west")
MIN_DURATION = 8

Row = Callable[[TensorDictBase], Tensor]


@dataclass(frozen=True)
class Agent:
    """A policy, its inputs, and its peers.

    Attributes:
        policy: reads and writes a TensorDict ``[*]``.
        td: ``[N]``, all that it reads.
        keys: where it writes its action.
        plain: the policy for one row ``[1]``, as in a script for single samples: network and greedy action, without
            exploration and TensorDict; the policy itself if that is no simple function.
        outputs: results ``[*, ...]`` that have to agree row by row and for all rows together: the actions' values, or
            the action without noise.
        peer: TorchRL's own module, which explores, too; None if it has none.
    """

    policy: TensorDictModuleBase
    td: TensorDictBase
    keys: tuple[NestedKey, ...]
    plain: Row
    outputs: Row
    peer: TensorDictModuleBase | None = None


def build(name: str, num_rows: int, device: torch.device) -> Agent:
    """The agent of a name with ``num_rows`` observations; parameters and observations are the same at each call."""
    torch.manual_seed(0)
    return AGENTS[name](num_rows, device)


def observations(num_rows: int, device: torch.device, **entries: Tensor) -> TensorDict:
    """``[N]`` with "observation" ``[N, 32]`` and other entries."""
    return TensorDict({"observation": torch.randn(num_rows, OBS, device=device), **entries}, [num_rows], device=device)


def plain_network(outputs: int, device: torch.device) -> nn.Module:
    """The network of TorchRL's modules: ReLU, 64-64."""
    layers = [nn.Linear(OBS, 64, device=device), nn.ReLU(), nn.Linear(64, 64, device=device), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, outputs, device=device))


class Transposed(nn.Module):
    """The log-probabilities of a categorical network in TorchRL's layout, ``[*, M, D]``.

    Args:
        network: has ``log_probs(x) -> [*, D, M]``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """``[*, O]`` -> ``[*, M, D]``."""
        return cast("Any", self.network).log_probs(x).mT


# -- discrete ---------------------------------------------------------------------------------------------------------


def dqn(num_rows: int, device: torch.device) -> Agent:
    """Epsilon-greedy on a duelling network."""
    spec = choices(num_rows, device)
    alone = Categorical(CHOICES, device=device)  # QValueActor wants the spec of one row
    peer = QValueActor(plain_network(CHOICES, device), in_keys=["observation"], spec=alone)
    network = DuelingMLP(OBS, CHOICES, device=device)
    return _greedy(network, num_rows, device, TensorDictSequential(peer, _egreedy(spec)))


def qr_dqn(num_rows: int, device: torch.device) -> Agent:
    """Epsilon-greedy on the means of 32 quantiles."""
    return _greedy(QuantileMLP(OBS, CHOICES, num_quantiles=32, device=device), num_rows, device)


def iqn(num_rows: int, device: torch.device) -> Agent:
    """Epsilon-greedy on means over 32 levels, drawn anew at each step."""
    return _greedy(ImplicitQuantileMLP(OBS, CHOICES, num_action_taus=32, device=device), num_rows, device)


def c51(num_rows: int, device: torch.device) -> Agent:
    """Epsilon-greedy on the means of 51 atoms."""
    network, spec = CategoricalMLP(OBS, CHOICES, device=device), choices(num_rows, device)
    peer = categorical_peer(network, spec)
    return _greedy(network, num_rows, device, TensorDictSequential(peer, _egreedy(spec)))


def rainbow(num_rows: int, device: torch.device) -> Agent:
    """Greedy on the means of 51 atoms of a duelling network with noise in its layers, drawn anew at each step."""
    network = CategoricalMLP(OBS, CHOICES, dueling=True, noisy="shared", device=device)
    return _greedy(network, num_rows, device, epsilon=0.0)


def choices(num_rows: int, device: torch.device) -> Categorical:
    """The spec of index actions."""
    return Categorical(CHOICES, shape=[num_rows], device=device)


def categorical_peer(network: CategoricalMLP, spec: Categorical | None = None) -> DistributionalQValueActor:
    """TorchRL's policy on the same network."""
    module: Any = TensorDictModule(Transposed(network), ["observation"], ["action_value"])
    # of a sequence, which the loss asks for
    return DistributionalQValueActor(
        TensorDictSequential(module), support=network.support, spec=spec, action_space="categorical"
    )


def _egreedy(spec: Categorical) -> EGreedyModule:
    return EGreedyModule(spec, eps_init=EPSILON, eps_end=EPSILON, device=spec.device)


def _greedy(
    network: nn.Module,
    num_rows: int,
    device: torch.device,
    peer: TensorDictModuleBase | None = None,
    epsilon: float = EPSILON,
) -> Agent:
    spec = choices(num_rows, device)
    policy = EpsilonGreedy(network, spec=spec, eps_start=epsilon, eps_end=epsilon, write_values=False)

    def plain(row: TensorDictBase) -> Tensor:
        return network(row.get("observation")).argmax(-1)

    return Agent(policy, observations(num_rows, device), ("action",), plain, policy.action_values, peer)


# -- continuous and mixed ---------------------------------------------------------------------------------------------


def ddpg(num_rows: int, device: torch.device) -> Agent:
    """A deterministic actor with Ornstein-Uhlenbeck noise."""
    agent, spec = _deterministic(num_rows, device, "tanh"), box(num_rows, device)
    # at the beginning of episodes the process starts anew, so that two calls with the same draws are the same
    agent.td.set("is_init", torch.ones(num_rows, 1, dtype=torch.bool, device=device))
    noise = OrnsteinUhlenbeckProcessModule(spec=spec, device=device)
    return replace(agent, policy=OUNoise(agent.policy), peer=_torchrl_deterministic(spec, noise))


def td3(num_rows: int, device: torch.device) -> Agent:
    """A deterministic actor with normal noise."""
    agent, spec = _deterministic(num_rows, device, "tanh"), box(num_rows, device)
    noise = AdditiveGaussianModule(spec, sigma_init=0.1, sigma_end=0.1, device=device)
    return replace(agent, policy=GaussianNoise(agent.policy), peer=_torchrl_deterministic(spec, noise))


def ac_iqn(num_rows: int, device: torch.device) -> Agent:
    """A deterministic actor that squashes by the arc tangent, with normal noise."""
    agent = _deterministic(num_rows, device, "atan")
    return replace(agent, policy=GaussianNoise(agent.policy))


def _deterministic(num_rows: int, device: torch.device, squash: Squash) -> Agent:
    network = FusedMLP(OBS, AXES, activation="relu", device=device)
    policy = DeterministicActor(network, spec=box(num_rows, device), squash=squash)

    def plain(row: TensorDictBase) -> Tensor:
        return policy.action(row.get("observation"))

    return Agent(policy, observations(num_rows, device), ("action",), plain, _written(policy, "action"))


def _torchrl_deterministic(spec: Bounded, noise: TensorDictModuleBase) -> TensorDictModuleBase:
    net = TensorDictModule(plain_network(AXES, cast("torch.device", spec.device)), ["observation"], ["action"])
    return TensorDictSequential(net, TanhModule(["action"], spec=spec), noise)


def sac(num_rows: int, device: torch.device) -> Agent:
    """A squashed normal with its log-probability."""
    spec = box(num_rows, device)
    head = SquashedNormalHead(*(torch.full((AXES,), bound, device=device) for bound in (-1.0, 1.0)))
    network = nn.Sequential(FusedMLP(OBS, 2 * AXES, activation="relu", device=device), head)
    policy = DeviceActor(
        network, distribution_class=SquashedNormal, param_keys=SquashedNormalHead.param_keys, spec=spec
    )

    def plain(row: TensorDictBase) -> Tensor:
        return SquashedNormal(*network(row.get("observation"))).deterministic_sample

    net = nn.Sequential(plain_network(2 * AXES, device), NormalParamExtractor())
    peer = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    return Agent(policy, observations(num_rows, device), ("action",), plain, _written(policy, "action"), peer)


def hybrid(num_rows: int, device: torch.device) -> Agent:
    """A choice and a bounded normal, each with its log-probability."""
    parts = Composite(kind=choices(num_rows, device), push=box(num_rows, device), shape=[num_rows], device=device)
    spec = Composite(action=parts, shape=[num_rows], device=device)
    policy = HybridActor(FusedMLP(OBS, hybrid_features(spec), activation="relu", device=device), spec=spec)
    keys = (("action", "kind"), ("action", "push"))

    def outputs(td: TensorDictBase) -> Tensor:
        out = policy(td.copy())
        return torch.cat([out["params", "action", "kind", "logits"], out["action", "push"]], -1)

    class Parameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.split = plain_network(CHOICES + 2 * AXES, device), NormalParamExtractor()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            features = self.net(x)
            return features[..., :CHOICES], *self.split(features[..., CHOICES:])

    params = [("params", "kind", "logits"), ("params", "push", "loc"), ("params", "push", "scale")]
    classes = {"kind": torch.distributions.Categorical, "push": TanhNormal}
    peer = ProbabilisticActor(
        TensorDictModule(Parameters(), ["observation"], params),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": classes, "name_map": dict(zip(("kind", "push"), keys, strict=True))},
        return_log_prob=True,
    )
    return Agent(policy, observations(num_rows, device), keys, _written(policy, *keys), outputs, peer)


def options(num_rows: int, device: torch.device) -> Agent:
    """A controller of four options and a squashed normal conditioned on the running one."""
    # before its minimum duration no option ends: row by row and all at once then go on with the same one
    age = torch.arange(num_rows, device=device) % MIN_DURATION
    option = torch.arange(num_rows, device=device) % len(OPTIONS)
    td = observations(num_rows, device, option=option, option_age=age)
    hazard = TimeHazard(len(OPTIONS), hazard_max=50.0, steepness=0.3)
    rules = OptionSet(OPTIONS, termination=hazard, min_duration=MIN_DURATION)
    count = len(OPTIONS)
    controller = OptionController(FusedMLP(OBS, count, activation="relu", device=device), rules, example=td)
    net = FusedMLP(OBS + count, 2 * AXES, activation="relu", device=device)
    policy = OptionPolicy(controller, OptionActor(net, rules, spec=box(num_rows, device)))
    act = _written(policy, "action")
    return Agent(policy, td, ("action",), act, act)


def box(num_rows: int, device: torch.device) -> Bounded:
    """The spec of continuous actions in [-1, 1]."""
    return Bounded(-1.0, 1.0, shape=[num_rows, AXES], device=device)


def _written(policy: nn.Module, *keys: NestedKey) -> Row:
    """The entries that the policy writes, in one tensor of floats; the rows are not changed."""

    def outputs(td: TensorDictBase) -> Tensor:
        out = policy(td.copy())
        columns = [cast("Tensor", out.get(key)) for key in keys]
        if len(columns) == 1:
            return columns[0]
        return torch.cat([column.float().view(*td.shape, -1) for column in columns], -1)

    return outputs


AGENTS: dict[str, Callable[[int, torch.device], Agent]] = {
    "dqn": dqn,
    "qr-dqn": qr_dqn,
    "iqn": iqn,
    "c51": c51,
    "rainbow": rainbow,
    "ddpg": ddpg,
    "td3": td3,
    "ac-iqn": ac_iqn,
    "sac": sac,
    "hybrid": hybrid,
    "options": options,
}
"""Agents by name."""
