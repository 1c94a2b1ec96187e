"""Normalisation of observations and rewards in a run: its settings, the layers of the networks, what a run does."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_perf.functional.rows.valid import fitted_rows
from torchrl_perf.modules.normalization import DiscountedReturnNormalization, EmpiricalNormalization
from torchrl_perf.parallel import Ranks
from torchrl_perf.trainers.config_checks import Checks, is_positive
from torchrl_perf.trainers.run.state import Stateful
from torchrl_perf.trainers.spaces import Inputs

__all__ = [
    "NORMALIZATION_SETTINGS",
    "NormalizationSettings",
    "RunNormalization",
    "make_normalization",
    "normalized",
]

NORMALIZATION_SETTINGS = ("normalize_observations", "normalize_rewards")
"""Fields that a resumed run cannot change, since they add state."""


@dataclass(frozen=True)
class NormalizationSettings:
    """Normalisation of what the networks read and learn from.

    Attributes:
        not_normalized: fields that networks or samples of an algorithm's own do not follow, and that it refuses.
    """

    not_normalized: ClassVar[tuple[str, ...]] = ()

    normalize_observations: bool = False
    """Normalise observations by mean and variance of all those acted on so far; greater than 10 is clipped."""
    normalize_rewards: bool = False
    """Divide rewards by the deviation of the discounted return so far; returns of episodes are those of the env."""
    reward_clip: float | None = None
    """Greatest absolute value of a reward that is learnt from, after its normalisation; None is no limit."""

    def _check(self, checks: Checks) -> None:
        super()._check(checks)  # pyright: ignore[reportAttributeAccessIssue]  of the config beside it
        checks.each(("reward_clip",), is_positive, "a positive number")
        for name in self.not_normalized:
            if checks.sound(name) and (value := getattr(self, name)):
                checks.add(
                    name,
                    f"{name}: expected it left out for {type(self).__name__}, whose networks or samples do not follow "
                    f"it, received {value}. Remedy: RunningNorm or RunningRewardNorm in the env.",
                )


def make_normalization(inputs: Inputs, config: Any, device: Any) -> EmpiricalNormalization | None:
    """The first layer of a network, where the settings ask for one and all that it reads are vectors.

    Args:
        inputs: what the network reads.
        config: with ``normalize_observations``; a config without it has none.
        device: of the statistics.
    """
    if inputs.parts or not getattr(config, "normalize_observations", False):
        return None
    return EmpiricalNormalization(inputs.size, in_keys=inputs.keys, device=device)


def normalized(network: nn.Module, inputs: Inputs, config: Any, device: Any) -> nn.Module:
    """A network of one vector ``[*, O]``, behind a layer that normalises it where the settings ask for that."""
    layer = make_normalization(inputs, config, device)
    return network if layer is None else nn.Sequential(layer, network)


class RunNormalization:
    """What a trainer does about normalisation.

    Networks have layers (:class:`EmpiricalNormalization`), the default ones where the settings ask for it; so the state
    of a policy has all that it needs in order to act. Their statistics change once in an iteration, by the observations
    of the batch that was collected (:meth:`observe`). Copies, such as the critic's and those of target networks, follow
    the first layer of the same entries. Rewards are normalised when they are learnt from.

    Args:
        config: every choice of the run.
        num_envs: rows of one step of all envs.
        modules: networks, the policy first, and losses.
        device: of everything.
        valid_key: the env's flag of the rows that count, or None.
        ranks: the processes whose rows count as one batch; by default this one alone.

    Attributes:
        rewards: statistics of the discounted return; None where rewards are not normalised.
        layers: of the networks, the policy's first.

    Raises:
        ValueError: for ``normalize_observations`` where no network has such a layer.
    """

    def __init__(
        self,
        config: Any,
        num_envs: int,
        modules: Iterable[nn.Module],
        device: torch.device,
        valid_key: str | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.layers = _layers_of(modules)
        self._valid_key = valid_key
        settings = config if isinstance(config, NormalizationSettings) else NormalizationSettings()
        self._clip = settings.reward_clip
        self.rewards: DiscountedReturnNormalization | None = None
        if settings.normalize_rewards:
            self.rewards = DiscountedReturnNormalization(num_envs, gamma=config.gamma, device=device)
        if ranks is not None and ranks.several:
            for layer in (*self.layers, *([] if self.rewards is None else [self.rewards.statistics])):
                layer.merge = ranks.merged
        if settings.normalize_observations and not self.layers:
            raise ValueError(
                "normalize_observations: expected networks with an EmpiricalNormalization, as the default ones of "
                "vectors have it, received networks without. Remedy: torchrl_perf.modules.EmpiricalNormalization(size)"
                " as their first layer, whose statistics the trainer keeps; or normalize_observations=False."
            )

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds besides the networks."""
        return {} if self.rewards is None else {"reward_normalization": self.rewards}

    def observe(self, batch: TensorDictBase) -> None:
        """Takes the observations of a batch ``[N, T]`` into the statistics of all layers."""
        sources: dict[tuple[NestedKey, ...], EmpiricalNormalization] = {}
        for layer in self.layers:
            keys = tuple(layer.in_keys)
            if keys in sources:
                layer.copy_(sources[keys])
                continue
            entries = [batch.get(key) for key in keys]
            rows = entries[0] if len(entries) == 1 else torch.cat(entries, -1)
            layer.update(rows, self._valid(batch, rows.shape[:-1]))
            sources[keys] = layer

    def observe_rewards(self, batch: TensorDictBase) -> None:
        """Takes the rewards of a batch ``[N, T]`` into the statistics of the return.

        Raises:
            ValueError: for rewards of another shape than ``[N, T, 1]``.
        """
        if self.rewards is None:
            return
        reward, done = batch.get(("next", "reward")), batch.get(("next", "done"))
        if reward.shape != (*batch.shape, 1) or done.shape != reward.shape:
            raise ValueError(
                f"normalize_rewards: expected one reward and one end for each step, {[*batch.shape, 1]}, received "
                f"{list(reward.shape)} and {list(done.shape)}. Remedy: normalize_rewards=False."
            )
        self.rewards.update(reward, done, self._valid(batch, batch.shape))

    @property
    def changes_rewards(self) -> bool:
        """Whether rewards are normalised or clipped."""
        return self.rewards is not None or self._clip is not None

    def learnt(self, rows: TensorDictBase) -> TensorDictBase:
        """A shallow copy of rows ``[*]`` with the rewards that are learnt from; the rows themselves where none change.

        Args:
            rows: with rewards as the env gave them.
        """
        if not self.changes_rewards:
            return rows
        following = cast("TensorDictBase", rows.get("next")).copy()
        reward = following.get("reward")
        scaled = reward if self.rewards is None else self.rewards(reward)
        following.set("reward", scaled if self._clip is None else scaled.clamp(-self._clip, self._clip))
        return rows.copy().set("next", following)

    def stored(self, batch: TensorDictBase) -> TensorDictBase:
        """What a buffer is to have: rewards as they are where they are normalised later, else clipped already.

        So each reward is clipped by itself before several are summed up.
        """
        return batch if self.rewards is not None else self.learnt(batch)

    def drawn(self, sample: TensorDictBase) -> TensorDictBase:
        """A sample of the buffer with the rewards that are learnt from."""
        return sample if self.rewards is None else self.learnt(sample)

    def _valid(self, batch: TensorDictBase, rows: Sequence[int]) -> Tensor | None:
        return None if self._valid_key is None else fitted_rows(batch.get(self._valid_key), rows)


def _layers_of(modules: Iterable[nn.Module]) -> list[EmpiricalNormalization]:
    """All layers, each once; those with one set of statistics before the stacked ones of several networks."""
    found = {
        id(layer): layer
        for module in modules
        for layer in module.modules()
        if isinstance(layer, EmpiricalNormalization)
    }
    return sorted(found.values(), key=lambda layer: layer.mean.ndim)
