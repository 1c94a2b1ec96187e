"""DQN that places fuel breaks, with every step of the loop on the device."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_perf.envs.fuel_breaks import FuelBreaks, Landscape
from torchrl_perf.modules.exploration import EpsilonGreedy
from torchrl_perf.systems.fuel_breaks.config import FuelBreaksConfig
from torchrl_perf.systems.fuel_breaks.networks import BREAK_KEYS, make_break_policy
from torchrl_perf.trainers.dqn import DQNTrainer
from torchrl_perf.trainers.off_policy import NOT_STORED

__all__ = ["FuelBreaksTrainer", "make_fuel_breaks_env"]

# what follows from breaks, remaining budget and the number of the landscape, and what only metrics read
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
    if config.landscape == "uniform":
        ground = Landscape.uniform(config.base, config.size)
    else:
        ground = Landscape.fractal(config.landscape_seed, config.size, count=config.landscapes, base=config.base)
    arguments: dict[str, Any] = {
        "num_envs": config.num_envs,
        "landscape": ground,
        "budget": config.cells,
        "reward": config.reward,
        "fires": config.fires,
        "neighbours": config.neighbours,
        "common_random_numbers": config.common_random_numbers,
        "observation": "compact",
        "device": device,
    }
    return FuelBreaks(**{**arguments, **options})


class FuelBreaksTrainer(DQNTrainer):
    """:class:`DQNTrainer` on :class:`~torchrl_perf.envs.fuel_breaks.FuelBreaks` (arXiv:1312.5602, arXiv:1509.06461).

    A row of the replay buffer holds the breaks as bool ``[H, W]``, the remaining budget, the number of the landscape,
    action and reward. Planes and action masks are made of them when a sample is learnt from: the static planes are in
    memory once. The next action of the targets is chosen among those that its mask allows.

    Metrics beside those of DQN: ``fire/burned``, mean burned fraction of the episodes that ended in the interval.

    Arguments, attributes and errors are those of :class:`ValueTrainer`, and

    Raises:
        ValueError: for an env that is no :class:`FuelBreaks` in sequential mode.
    """

    config: FuelBreaksConfig
    env: FuelBreaks  # pyright: ignore[reportIncompatibleVariableOverride]
    not_stored: ClassVar[tuple[NestedKey, ...]] = (*NOT_STORED, *REBUILT, *(("next", name) for name in REBUILT))
    fills_at_random: ClassVar[bool] = False  # the policy demonstrates, and epsilon is 1 at the start

    def make_env(self) -> FuelBreaks:
        """:func:`make_fuel_breaks_env`."""
        return make_fuel_breaks_env(self.config, self.device)

    def build(self) -> EpsilonGreedy:
        """See :meth:`ValueTrainer.build`."""
        env = self.env
        if not isinstance(env, FuelBreaks) or env.mode != "sequential":
            mode = f" in mode {env.mode!r}" if isinstance(env, FuelBreaks) else ""
            raise ValueError(
                f"env: expected a FuelBreaks in mode 'sequential', received {type(env).__name__}{mode}. Remedy: "
                "make_fuel_breaks_env(config, device)."
            )
        return super().build()

    def make_policy(self, env: EnvBase) -> EpsilonGreedy:
        """:func:`make_break_policy`."""
        return make_break_policy(cast("FuelBreaks", env), self.config)

    def make_target(self, policy: EpsilonGreedy) -> nn.Module:
        """A copy of the online network; both make their planes of the env's."""
        if list(policy.network_keys) != list(BREAK_KEYS) or policy.mask_key != "action_mask":
            raise ValueError(
                f"policy: expected in_keys {list(BREAK_KEYS)} and mask_key 'action_mask', received "
                f"{list(policy.network_keys)} and {policy.mask_key!r}. Remedy: a BreakPolicy."
            )
        return super().make_target(policy)

    def sample_losses(self, sample: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`ValueTrainer.sample_losses`; the mask of the next actions is made first."""
        sample = sample.clone(recurse=False)
        following = cast("TensorDictBase", sample.get("next"))
        following.set("action_mask", self.allowed(following))
        return super().sample_losses(sample)

    def allowed(self, rows: TensorDictBase) -> Tensor:
        """Bool ``[B, H W]``: cells that may become a break, of ``breaks`` and ``landscape_id`` of rows ``[B]``."""
        return (self.env.burnable(rows.get("landscape_id")) & ~rows.get("breaks")).flatten(1)

    def measure(self, batch: TensorDictBase) -> None:
        """Those of every trainer, and how much burned."""
        super().measure(batch)
        following = cast("Mapping[str, Tensor]", batch.get("next"))
        self.metrics.add("fire/burned", self.guard.finite(following["burned"]), mask=following["done"])
