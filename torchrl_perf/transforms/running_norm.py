"""Running normalisation of observations and rewards in TorchRL scripts."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded
from torchrl.envs import Transform

from torchrl_perf.functional.rows.valid import fitted_rows
from torchrl_perf.modules.normalization import DiscountedReturnNormalization, EmpiricalNormalization

__all__ = ["RunningNorm", "RunningRewardNorm"]


class RunningNorm(Transform):
    """Observations normalised by mean and variance of all rows so far, on the device.

    The counterpart of TorchRL's ``VecNormV2`` and ``ObservationNorm``. It differs in this:

    - ``VecNormV2`` weighs rows by ``decay ** age`` and adds each step's variance to that of the means, so its result
      depends on how rows fall into batches; here each row counts the same, and the statistics are those of all rows
      together, merged in float64.
    - It takes a lock at each step, which waits for the host; here nothing does, and a captured graph may hold a step.
    - ``ObservationNorm`` has fixed numbers, or estimates them once, on the host.
    - Rows can be left out by ``valid_key``, and rows that are not finite never count.

    It is used in one of three places:

    - ``TransformedEnv(env, RunningNorm(...))``: each step's observations are normalised, after they were taken into the
      statistics; :meth:`freeze` it for an evaluation.
    - ``batch = norm(batch)`` on a batch ``[*]``: entries are normalised, those under "next" as well; :meth:`update`
      takes a batch into the statistics.
    - In a replay buffer: raw observations are stored, and samples normalised by the present statistics.

    Keys read: ``in_keys``, and ``valid_key`` where present. Written: ``out_keys``.

    Args:
        shapes: size O of each entry ``[*, O]`` by its key, such as ``{"observation": 4}``.
        out_keys: where normalised entries go, in the order of ``shapes``; in place by default.
        valid_key: bool ``[*]`` or ``[*, 1]``, the rows that count.
        eps: added to the variance.
        clip: greatest absolute value; None for no limit.
        device: of the statistics.

    Attributes:
        frozen: whether statistics are left as they are. Modes do not matter: ``TransformedEnv`` calls ``eval()``.

    Raises:
        ValueError: for no entry, a size below 1, other out_keys than entries, and an eps or clip that is not positive.
        KeyError: at a call, where a batch has none of the entries.

    Example:
        >>> env = TransformedEnv(CartPole(64), RunningNorm({"observation": 4}))
    """

    invertible = False

    def __init__(
        self,
        shapes: Mapping[NestedKey, int],
        *,
        out_keys: Sequence[NestedKey] | None = None,
        valid_key: NestedKey | None = None,
        eps: float = 1e-8,
        clip: float | None = 10.0,
        device: torch.device | str | None = None,
    ) -> None:
        keys = [unravel_key(key) for key in shapes]
        written = keys if out_keys is None else [unravel_key(key) for key in out_keys]
        if not keys or len(written) != len(keys):
            raise ValueError(
                f"shapes: expected at least one entry, and as many out_keys, received {keys} and {written}. Remedy: "
                "RunningNorm({'observation': size})."
            )
        super().__init__(in_keys=keys, out_keys=written)
        self.valid_key, self.clip, self.frozen = valid_key, clip, False
        self.statistics = nn.ModuleList(
            EmpiricalNormalization(size, in_keys=[key], eps=eps, clip=clip, device=device)
            for key, size in zip(keys, shapes.values(), strict=True)
        )

    def of(self, key: NestedKey) -> EmpiricalNormalization:
        """The statistics of an entry.

        Raises:
            KeyError: for another key.
        """
        found = dict(zip(self.in_keys, self.statistics, strict=True)).get(unravel_key(key))
        if found is None:
            raise KeyError(f"key: expected one of {self.in_keys}, received {key!r}. Remedy: one of these.")
        return cast("EmpiricalNormalization", found)

    def update(self, tensordict: TensorDictBase, valid: Tensor | None = None) -> None:
        """Takes the entries of a batch ``[*]`` into the statistics; those under "next" are not looked at.

        Args:
            tensordict: with entries ``[*, O]``, or ``[*, A, O]`` of agents; others may be missing.
            valid: bool ``[*]`` or ``[*, 1]``, the rows that count; by default those at ``valid_key``.
        """
        if self.frozen:
            return
        if valid is None and self.valid_key is not None:
            valid = tensordict.get(self.valid_key, None)
        for key, statistics in zip(self.in_keys, self.statistics, strict=True):
            value = tensordict.get(key, None)
            if value is not None:
                rows = None if valid is None else fitted_rows(valid, value.shape[:-1])
                cast("EmpiricalNormalization", statistics).update(value, rows)

    def freeze(self) -> None:
        """From now on statistics stay as they are."""
        self.frozen = True

    def unfreeze(self) -> None:
        """Undoes :meth:`freeze`."""
        self.frozen = False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes normalised entries into a batch, those under "next" as well, and returns it."""
        found = self._normalized(tensordict)
        following = tensordict.get("next", None)
        if following is not None:
            found |= self._normalized(cast("TensorDictBase", following))
        if not found:
            raise KeyError(
                f"in_keys: expected one of {self.in_keys} in the batch, received "
                f"{sorted(map(str, tensordict.keys(True, True)))}. Remedy: RunningNorm of keys that it has."
            )
        return tensordict

    def _normalized(self, tensordict: TensorDictBase) -> bool:
        found = False
        for key, out, statistics in zip(self.in_keys, self.out_keys, self.statistics, strict=True):
            value = tensordict.get(key, None)
            if value is not None:
                tensordict.set(out, statistics(value))
                found = True
        return found

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.update(next_tensordict)
        self._normalized(next_tensordict)
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        # of an env that resets some of its rows only these are new
        self.update(tensordict_reset, None if tensordict is None else tensordict.get("_reset", None))
        self._normalized(tensordict_reset)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """The spec with bounds of ``clip`` for what is normalised."""
        spec = cast("Composite", observation_spec)
        for key, out in zip(self.in_keys, self.out_keys, strict=True):
            leaf = spec[key]
            place: dict[str, Any] = {"shape": leaf.shape, "dtype": leaf.dtype, "device": leaf.device}
            spec[out] = Unbounded(**place) if self.clip is None else Bounded(-self.clip, self.clip, **place)
        return spec


class RunningRewardNorm(Transform):
    """Rewards divided by the deviation of the discounted return so far, and clipped.

    The counterpart of Gymnasium's ``NormalizeReward`` and of ``VecNormV2`` on "reward", which subtracts the mean. The
    statistics are :class:`~torchrl_perf.modules.DiscountedReturnNormalization`'s. It is used in one of two places:

    - ``TransformedEnv(env, RunningRewardNorm(...))``: each step's reward is normalised, after it was taken into the
      statistics; :meth:`freeze` it for an evaluation. A ``RewardSum`` before it sums up raw rewards.
    - ``batch = norm(batch)`` on a batch or a sample ``[*]``; :meth:`update` takes a batch ``[N, T]`` of a collector
      into the statistics. So raw rewards can be stored, and normalised when they are read.

    Keys read under "next": "reward" ``[*, 1]``, "done". Written under "next": "reward".

    Args:
        num_envs: N.
        gamma: discount of the return, that of the algorithm.
        clip: greatest absolute value of a normalised reward; None for no limit.
        eps: added to the variance.
        device: of the state.

    Attributes:
        statistics: of the return.
        frozen: whether they are left as they are.

    Raises:
        ValueError: for fewer than one env, a gamma outside of [0, 1], and a clip that is not positive.
    """

    invertible = False

    def __init__(
        self,
        num_envs: int,
        *,
        gamma: float,
        clip: float | None = 10.0,
        eps: float = 1e-8,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_keys=["reward"], out_keys=["reward"])
        if clip is not None and not clip > 0:
            raise ValueError(f"clip: expected a positive number or None, received {clip}. Remedy: clip=10.0.")
        self.clip, self.frozen = clip, False
        self.statistics = DiscountedReturnNormalization(num_envs, gamma=gamma, eps=eps, device=device)

    def update(self, tensordict: TensorDictBase) -> None:
        """Takes the rewards of a batch ``[N, T]`` into the statistics."""
        if not self.frozen:
            self.statistics.update(tensordict.get(("next", "reward")), tensordict.get(("next", "done")))

    def freeze(self) -> None:
        """From now on statistics stay as they are."""
        self.frozen = True

    def unfreeze(self) -> None:
        """Undoes :meth:`freeze`."""
        self.frozen = False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes normalised rewards into a batch or a sample, and returns it."""
        following = cast("TensorDictBase", tensordict.get("next"))
        following.set("reward", self._scaled(following.get("reward")))
        return tensordict

    def _scaled(self, reward: Tensor) -> Tensor:
        scaled = self.statistics(reward)
        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        reward = next_tensordict.get("reward")
        if not self.frozen:
            one_step = [next_tensordict.get(key).reshape(-1, 1, 1) for key in ("reward", "done")]
            self.statistics.update(*one_step)
        return next_tensordict.set("reward", self._scaled(reward))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset  # there is no reward without a step

    def transform_reward_spec(self, reward_spec: TensorSpec) -> TensorSpec:
        """The spec with bounds of ``clip``."""
        leaf = reward_spec["reward"] if isinstance(reward_spec, Composite) else reward_spec
        place: dict[str, Any] = {"shape": leaf.shape, "dtype": leaf.dtype, "device": leaf.device}
        spec = Unbounded(**place) if self.clip is None else Bounded(-self.clip, self.clip, **place)
        if not isinstance(reward_spec, Composite):
            return spec
        reward_spec["reward"] = spec
        return reward_spec
