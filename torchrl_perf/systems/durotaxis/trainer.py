"""PPO that teaches a colony of cells to climb a stiffness gradient, with every step of the loop on the device."""

from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.modules import ValueOperator

from torchrl_perf.envs.durotaxis import GRAPH_FEATURES, Durotaxis
from torchrl_perf.metrics import DeviceMetrics
from torchrl_perf.modules import HybridActor
from torchrl_perf.runtime.precision import Acceleration
from torchrl_perf.systems.durotaxis.blueprint import make_colony
from torchrl_perf.systems.durotaxis.config import DurotaxisConfig
from torchrl_perf.systems.durotaxis.evaluation import EpisodeColumns
from torchrl_perf.systems.durotaxis.networks import make_colony_actor, make_colony_critic
from torchrl_perf.systems.durotaxis.stages import curriculum_of
from torchrl_perf.trainers.on_policy.trainer import OnPolicyTrainer
from torchrl_perf.trainers.ppo import PPO
from torchrl_perf.trainers.run.numerics import NumericalGuard
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.transforms import ComponentAdvantage, GAETransform

ENDS = Durotaxis.outcomes[1:]
"""How an episode may end."""

WINDOW = 100
COLUMNS = "weighted_components"
_PROGRESS = GRAPH_FEATURES.index("progress")
_NEEDED = ("component_names", "reward_weights", "settings")


class ColonyPPO(PPO):
    """PPO whose critic may value each component of the reward (arXiv:1707.06347, nodes: arXiv:1903.01344).

    Attributes:
        component_names: of the reward's components that count.
        colonies: outcomes, progress and returns of finished episodes, on the device.
        component_advantage: adds the advantages of the components up; None with ``value_heads="total"``.
    """

    metric_names: ClassVar[tuple[str, ...]] = (
        *("episode/score", "episode/progress", "curriculum/stage", "colony/nodes"),
    )
    component_advantage: ComponentAdvantage | None

    def __init__(self, config: DurotaxisConfig, env: EnvBase, acceleration: Acceleration, **networks: Any) -> None:
        super().__init__(config, env, acceleration, **networks)
        self.colonies = EpisodeColumns(
            config.num_envs,
            totals=("return", *self.component_names),
            ends=(*ENDS, "progress"),
            device=cast("torch.device", env.device),
            window=max(WINDOW, config.num_envs),
        )

    def make_actor(self, env: EnvBase) -> HybridActor:
        """:func:`~torchrl_perf.systems.durotaxis.networks.make_colony_actor`."""
        return make_colony_actor(_durotaxis(env), self.config)

    def make_critic(self, env: EnvBase) -> ValueOperator:
        """:func:`~torchrl_perf.systems.durotaxis.networks.make_colony_critic`, a value for each component."""
        return make_colony_critic(_durotaxis(env), self.config, self._choose_columns(env))

    def _choose_columns(self, env: EnvBase) -> tuple[str, ...]:
        """Names of the values: the components of the reward whose weight is not 0, or the whole."""
        colony = _durotaxis(env)
        counting = [number for number, weight in enumerate(colony.reward_weights.tolist()) if weight]
        if not counting:
            raise ValueError(
                "env: expected a reward_weights that is not 0 everywhere, received zeros. Remedy: a weight above 0 "
                "for at least one component."
            )
        self._chosen = torch.tensor(counting, device=env.device)
        self.component_names = tuple(colony.component_names[number] for number in counting)
        return self.component_names if self.config.value_heads == "components" else ("total",)

    def make_gae(self) -> GAETransform:
        """Advantages of the components or of the whole."""
        names = self._choose_columns(self.env)
        self.value_size = len(names)
        self.component_advantage, keys = None, {}
        if self.config.value_heads == "components":
            keys = {"reward": COLUMNS, "advantage": "advantage_components"}
            self.component_advantage = ComponentAdvantage(
                torch.ones(len(names), device=self.env.device),
                names=names,
                standardize=self.config.standardize_components,
            )
        return GAETransform(
            gamma=self.config.gamma, lmbda=self.config.lmbda, value_network=self.critic, keys=keys, chunk_size=16_384
        )

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds beside the networks, by name."""
        parts: dict[str, Stateful] = {"colonies": self.colonies}
        return parts if self.component_advantage is None else {**parts, "component_advantage": self.component_advantage}

    def watched(self, batch: TensorDictBase) -> TensorDictBase:
        """All of a batch except the next nodes, its largest part, which are also the nodes of the following step."""
        return batch.exclude(("next", "nodes"))

    def columns(self, batch: TensorDictBase) -> Tensor:
        """The components of the reward that count, in its units: ``[N, T, C]``, whose sum is the reward."""
        weights = _durotaxis(self.env).reward_weights
        columns = batch.get(("next", "reward_components"))
        return columns.index_select(-1, self._chosen) * weights.index_select(0, self._chosen)

    def estimate(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds ``advantage [N, T, 1]``, and ``value_target`` and ``state_value [N, T, C]`` to the batch."""
        if self.component_advantage is None:
            return self.gae(batch)
        batch.set(("next", COLUMNS), self.columns(batch))
        return self.component_advantage(self.gae(batch))

    def measure(self, batch: TensorDictBase, metrics: DeviceMetrics, guard: NumericalGuard) -> None:
        """How the colonies' episodes ended, and the parts of their returns."""
        following = batch.get("next")
        outcome, done = following.get("outcome"), following.get("done")
        ends = [(outcome == number).float() for number in range(1, 1 + len(ENDS))]
        ends.append(following.get("graph")[..., _PROGRESS : _PROGRESS + 1])
        totals = [following.get("reward"), self.columns(batch)]
        finite = guard.finite
        self.colonies.update(finite(torch.cat(totals, -1)), finite(torch.cat(ends, -1)), done)
        means, finished = self.colonies.means(), self.colonies.count > 0
        score = 1000 * means["success"] + 100 * means["progress"] + means["return"]
        rows = {f"episode/{name}": means[name] for name in (*ENDS, "progress")} | {"episode/score": score}
        rows |= {f"component/{name}": means[name] for name in self.component_names}
        for name, value in rows.items():
            metrics.add(name, value, reduce="last", mask=finished)
        metrics.add("curriculum/stage", _durotaxis(self.env).get_buffer("state_stage"), reduce="max")
        metrics.add("colony/nodes", following.get("node_mask").sum(-1, dtype=torch.float32))


class DurotaxisTrainer(OnPolicyTrainer):
    """PPO on :class:`~torchrl_perf.envs.Durotaxis` (arXiv:1707.06347; actions for each node: arXiv:1903.01344).

    Actor and critic have a transformer encoder of nodes and colony each (:class:`~torchrl_perf.modules.NodeEncoder`).
    With ``value_heads="components"`` the critic has a value for each component of the reward that counts, in the units
    of the reward, so that the values add up to that of the whole; each has its own advantage, and the policy learns
    from their sum weighted by ``component_advantage.weights`` (on the device, all 1 at first; they may be changed in
    place and are saved). With all weights 1, and unless they are standardised, that is the advantage of the reward.

    Metrics beside PPO's, of the last finished episodes: the shares of outcomes ``episode/success``,
    ``episode/overgrowth``, ...; ``episode/progress`` of the colony's centre to the goal; ``episode/score``, which is
    ``1000 * success + 100 * progress + return`` and marks the best checkpoint; and the return of each component,
    ``component/...``. Of the interval: ``colony/nodes``, the mean number of nodes.

    Arguments and errors are those of :class:`~torchrl_perf.trainers.PPOTrainer`, and so are the other attributes.

    Attributes:
        component_names: of the reward's components that count.
        colonies: outcomes, progress and returns of finished episodes, on the device.
        component_advantage: adds the advantages of the components up; None with ``value_heads="total"``.
    """

    algorithm_class: ClassVar[type[PPO]] = ColonyPPO  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        config: DurotaxisConfig,
        *,
        env: EnvBase | None = None,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
    ) -> None:
        super().__init__(config, env=env, actor=actor, critic=critic)

    def make_env(self) -> EnvBase:
        """The colony as the config describes it."""
        return make_colony(self.config, self.device, curriculum=curriculum_of(self.config))


def _durotaxis(env: EnvBase) -> Durotaxis:
    """The env, if it is a colony that the trainer can use."""
    if absent := [name for name in _NEEDED if not hasattr(env, name)]:
        raise ValueError(
            f"env: expected a Durotaxis, which has {', '.join(_NEEDED)}, received {type(env).__name__} without "
            f"{', '.join(absent)}. Remedy: one, or PPOTrainer."
        )
    return cast("Durotaxis", env)
