"""The six agents of marine with one encoder, as the package's policies and as agents for one observation.

The encoder has the sizes of the original: 7 own numbers to 56, five objects to 200, joined to 256 and 128.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import set_interaction_type
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical

from studies.originals.policy_wrapper import SampleAgent, SampleWrapper
from torchrl_perf.modules import (
    CategoricalMLP,
    DeterministicActor,
    DeviceActor,
    EpsilonGreedy,
    GaussianNoise,
    ImplicitQuantileMLP,
    OUNoise,
    QuantileMLP,
    SetEncoder,
    SquashedNormal,
    SquashedNormalHead,
)

OBSERVATION, CHOICES, AXES, EPSILON = 37, 25, 2, 0.05
FEATURES = 128


class ObjectTrunk(nn.Module):
    """The set encoder on a flat observation: 7 own numbers, 5 objects of 5, 5 flags of those that exist.

    Args:
        precision: of its layers.
    """

    def __init__(self, precision: str = "tf32") -> None:
        super().__init__()
        self.encoder = SetEncoder(7, 5, precision=precision)

    def forward(self, observation: Tensor) -> Tensor:
        """``[*, 37]`` -> ``[*, 128]``."""
        own, objects, flags = observation.split([7, 25, 5], -1)
        return self.encoder(own, objects.unflatten(-1, (5, 5)), flags > 0.5)


@dataclass(frozen=True)
class Agent:
    """One agent in both forms.

    Attributes:
        policy: reads and writes a TensorDict ``[N]``.
        td: ``[N]``, what it reads.
        single: ``[1, 37]`` -> values ``[1, 25]`` or action ``[1, 2]``, exploring or not as the policy does.
        values: ``[N, 37]`` -> values ``[N, 25]`` or actions ``[N, 2]``, without exploration.
        discrete: whether actions are numbers of choices.
    """

    policy: TensorDictModuleBase
    td: TensorDict
    single: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    discrete: bool

    def wrapper(self, epsilon: float = EPSILON) -> SampleWrapper:
        """The original's wrapper around the same network."""
        device = self.td["observation"].device
        return SampleWrapper(SampleAgent(self.single, device, epsilon if self.discrete else None))

    def act(self) -> Tensor:
        """The policy's actions ``[N]`` or ``[N, 2]``, exploring."""
        with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
            return self.policy(self.td)["action"]


def observations(num_rows: int) -> Tensor:
    """``[N, 37]`` of the env's form, with one to five objects in each row; the same at each call."""
    draw = torch.Generator().manual_seed(4)
    own, objects = torch.randn(num_rows, 7, generator=draw), torch.randn(num_rows, 5, 5, generator=draw)
    exists = torch.arange(5) < torch.randint(1, 6, (num_rows, 1), generator=draw)
    return torch.cat([own, (objects * exists.unsqueeze(-1)).flatten(1), exists.float()], -1)


def build(name: str, num_rows: int, device: torch.device) -> Agent:
    """The agent of a name; parameters and observations are the same at each call."""
    torch.manual_seed(0)
    td = TensorDict({"observation": observations(num_rows)}, [num_rows]).to(device)
    network = _NETWORKS[name]().to(device)
    if name in DISCRETE:
        spec = Categorical(CHOICES, shape=[num_rows], device=device)
        policy: TensorDictModuleBase = EpsilonGreedy(
            network, spec=spec, eps_start=EPSILON, eps_end=EPSILON, write_values=False
        )
        return Agent(policy, td, network, network, discrete=True)
    box = Bounded(-1.0, 1.0, shape=[num_rows, AXES], device=device)
    if name == "sac":
        actor = DeviceActor(
            network, distribution_class=SquashedNormal, param_keys=SquashedNormalHead.param_keys, spec=box
        )

        def single(row: Tensor) -> Tensor:
            return SquashedNormal(*network(row)).sample()

        def greedy(rows: Tensor) -> Tensor:
            return SquashedNormal(*network(rows)).deterministic_sample

        return Agent(actor, td, single, greedy, discrete=False)
    actor = DeterministicActor(network, spec=box, squash="atan" if name == "ac-iqn" else "tanh")
    td["is_init"] = torch.zeros(num_rows, 1, dtype=torch.bool, device=device)

    def noisy(row: Tensor) -> Tensor:
        action = actor.action(row)
        return (action + 0.1 * torch.randn_like(action)).clamp(-1.0, 1.0)

    return Agent((OUNoise if name == "ddpg" else GaussianNoise)(actor), td, noisy, actor.action, discrete=False)


def without_noise(agent: Agent) -> Agent:
    """The agent whose single form does not explore either: its actions are those of :attr:`Agent.values`."""
    return Agent(agent.policy, agent.td, agent.values, agent.values, agent.discrete)


def fixed_levels(agent: Agent) -> None:
    """From now on a network of quantiles takes the same levels at each call, and one of noisy layers their means."""
    network = getattr(agent.policy, "network", None)
    if isinstance(network, ImplicitQuantileMLP):
        network.implicit.random = False
    if isinstance(network, nn.Module):
        network.eval()


def _head() -> list[nn.Module]:
    return [nn.Linear(FEATURES, FEATURES), nn.ReLU()]


def _squashed() -> nn.Module:
    head = SquashedNormalHead(torch.full((AXES,), -1.0), torch.full((AXES,), 1.0))
    return nn.Sequential(ObjectTrunk(), *_head(), nn.Linear(FEATURES, 2 * AXES), head)


def _actor() -> nn.Module:
    return nn.Sequential(ObjectTrunk(), *_head(), nn.Linear(FEATURES, AXES))


_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    # one quantile is a plain value
    "dqn": lambda: QuantileMLP(FEATURES, CHOICES, num_quantiles=1, trunk=ObjectTrunk(), hidden_size=FEATURES),
    "iqn": lambda: ImplicitQuantileMLP(FEATURES, CHOICES, trunk=ObjectTrunk(), hidden_size=FEATURES),
    "rainbow": lambda: CategoricalMLP(
        FEATURES,
        CHOICES,
        v_min=-20.0,
        v_max=60.0,
        trunk=ObjectTrunk(),
        hidden_size=FEATURES,
        dueling=True,
        noisy="shared",
    ),
    "ddpg": _actor,
    "sac": _squashed,
    "ac-iqn": _actor,
}
DISCRETE = ("dqn", "iqn", "rainbow")
AGENTS = tuple(_NETWORKS)
"""Names of the agents."""
