"""DQN that places fuel breaks, with every step of the loop on the device."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.envs.fuel_breaks import FuelBreaks
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.systems.fuel_breaks.config import FuelBreaksConfig
from torchrl_perf.systems.fuel_breaks.ground import make_breaks
from torchrl_perf.systems.fuel_breaks.networks import BREAK_KEYS, make_break_policy
from torchrl_perf.trainers.dqn import QLoss
from torchrl_perf.trainers.off_policy.task import NOT_STORED, Task, both
from torchrl_perf.trainers.off_policy.trainer import OffPolicyTrainer
from torchrl_perf.trainers.off_policy.value_based import ValueAlgorithm

__all__ = ["FuelBreaksTask", "FuelBreaksTrainer", "make_fuel_breaks_env"]

# entries that follow from breaks, remaining budget and the number of the landscape, and those that only metrics read
REBUILT = ("observation", "action_mask", "burned")


def make_fuel_breaks_env(config: FuelBreaksConfig, device: torch.device | str, **options: Any) -> FuelBreaks:
    """The task of a run, whose observations leave out the planes.

    Args:
        config: landscape, budget, fires and reward.
        device: of everything.
        **options: replace arguments of :class:`~torchrl_perf.envs.fuel_breaks.FuelBreaks`, or ``num_envs``.

    Raises:
        ValueError: for a budget above the burnable cells.
    """
    own: dict[str, Any] = {
        "reward": config.reward,
        "common_random_numbers": config.common_random_numbers,
        "observation": "compact",
    }
    return make_breaks(config, device, **{**own, **options})


class FuelBreaksTask(Task):
    """The task: rows store breaks, budget and the number of the landscape; metrics say how much burned."""

    not_stored: ClassVar[tuple[NestedKey, ...]] = (*NOT_STORED, *both(REBUILT))
    metric_names = ("fire/burned",)

    def make_env(self, config: Any, device: torch.device) -> FuelBreaks:
        """The landscapes that the config describes."""
        return make_fuel_breaks_env(config, device)

    def check(self, env: EnvBase | None) -> None:
        """Refuses an env that is not a :class:`FuelBreaks` in sequential mode."""
        if not isinstance(env, FuelBreaks) or env.mode != "sequential":
            mode = f" in mode {env.mode!r}" if isinstance(env, FuelBreaks) else ""
            raise ValueError(
                f"env: expected a FuelBreaks in mode 'sequential', received {type(env).__name__}{mode}. Remedy: "
                "make_fuel_breaks_env(config, device)."
            )

    def measure(self, trainer: Any, batch: TensorDictBase) -> None:
        """The mean burned fraction of the episodes that ended in the interval."""
        following = cast("Mapping[str, Tensor]", batch.get("next"))
        trainer.metrics.add("fire/burned", trainer.guard.finite(following["burned"]), mask=following["done"])


class MaskedQLoss:
    """The temporal differences of DQN, whose next action is chosen among the cells that may become a break.

    Args:
        loss: the temporal differences.
        env: says what is burnable.
    """

    def __init__(self, loss: QLoss, env: FuelBreaks) -> None:
        self.loss, self.env = loss, env
        self.target_network = loss.target_network

    def losses(self, td: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`QLoss.losses`, of a sample ``[b]`` without the masks that follow from its breaks."""
        td = td.clone(recurse=False)
        following = cast("TensorDictBase", td.get("next"))
        following.set("action_mask", self.allowed(following))
        return self.loss.losses(td)

    def allowed(self, rows: TensorDictBase) -> Tensor:
        """Bool ``[B, H W]``: cells that may become a break, of ``breaks`` and ``landscape_id`` of rows ``[B]``."""
        return (self.env.burnable(rows.get("landscape_id")) & ~rows.get("breaks")).flatten(1)


class BreakDQN(ValueAlgorithm):
    """DQN on maps (arXiv:1312.5602, arXiv:1509.06461); the policy demonstrates first, and explores along lines."""

    config: FuelBreaksConfig
    fills_at_random = False  # the policy demonstrates, and epsilon is 1 at the start

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """Epsilon-greedy on the values of all cells."""
        return make_break_policy(cast("FuelBreaks", env), self.config)

    def make_loss(self, network: nn.Module, policy: EpsilonGreedy) -> MaskedQLoss:
        """Temporal differences, with a copy of the network; both make their planes of the env's."""
        if list(policy.network_keys) != list(BREAK_KEYS) or policy.mask_key != "action_mask":
            raise ValueError(
                f"policy: expected in_keys {list(BREAK_KEYS)} and mask_key 'action_mask', received "
                f"{list(policy.network_keys)} and {policy.mask_key!r}. Remedy: a BreakPolicy."
            )
        return MaskedQLoss(QLoss(network, policy, self.config), cast("FuelBreaks", self.setup.env))


class FuelBreaksTrainer(OffPolicyTrainer):
    """DQN on :class:`~torchrl_perf.envs.fuel_breaks.FuelBreaks`.

    A row of the replay buffer holds the breaks as bool ``[H, W]``, the remaining budget, the number of the landscape,
    action and reward. Planes and action masks are made from them for each sample: the static planes are in memory once.
    The next action of the targets is chosen among those that its mask allows.

    Metrics beside those of DQN: ``fire/burned``, mean burned fraction of the episodes that ended in the interval.

    Args:
        config: every choice of the run.
        env: a :class:`FuelBreaks`; by default :func:`make_fuel_breaks_env`.
        collector: collects ``[N, T]`` batches with ``policy``.
        policy: a :class:`BreakPolicy` of your own; by default :func:`make_break_policy`.

    Raises:
        ValueError: for an env that is no :class:`FuelBreaks` in sequential mode, and parts that do not fit each other.
    """

    algorithm_class = BreakDQN
    task_class = FuelBreaksTask
