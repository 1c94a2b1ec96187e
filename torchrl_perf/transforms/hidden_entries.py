"""Entries of an observation that a policy does not get to see."""

from collections.abc import Sequence

import torch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.envs import ObservationTransform

__all__ = ["HiddenEntries"]


class HiddenEntries(ObservationTransform):
    """Leaves entries out of an observation.

    ``TransformedEnv(env, HiddenEntries([1, 3]))`` makes any env partly observed. The other entries keep their order.
    Nothing waits for the host.

    Keys rewritten, at the root and under "next": ``key``, ``[*, O]`` to ``[*, O - len(entries)]``.

    Args:
        entries: places in the last dim of the observation, from 0 on, or from -1 backwards.
        key: of the observation.

    Raises:
        ValueError: for no entries or one twice; with an env, for places that its observation does not have, or for all.
    """

    def __init__(self, entries: Sequence[int], key: NestedKey = "observation") -> None:
        entries = list(entries)
        if not entries or any(isinstance(i, bool) or not isinstance(i, int) for i in entries):
            raise ValueError(f"entries: expected whole numbers, received {entries}. Remedy: such as [1, 3].")
        super().__init__(in_keys=[unravel_key(key)], out_keys=[unravel_key(key)])
        self.entries = entries

    def kept(self, size: int) -> list[int]:
        """Places that are left of an observation of O entries."""
        hidden = {i + size if i < 0 else i for i in self.entries}
        if len(hidden) != len(self.entries) or not all(0 <= i < size for i in hidden) or len(hidden) == size:
            raise ValueError(
                f"entries: expected different places in {self.in_keys[0]!r}, which has {size} entries, and not all of "
                f"them, received {self.entries}. Remedy: places from 0 to {size - 1}."
            )
        return [i for i in range(size) if i not in hidden]

    def _apply_transform(self, obs: Tensor) -> Tensor:
        # a stack of views: an index would be a tensor that is made on the host at each step
        return torch.stack([obs[..., i] for i in self.kept(obs.shape[-1])], -1)

    def _reset(self, tensordict, tensordict_reset):  # noqa: ANN001, ANN202  TorchRL's hook
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """The spec without the entries."""
        if not isinstance(observation_spec, Composite):
            raise ValueError(
                f"expected a Composite observation spec, received {type(observation_spec).__name__}. Remedy: "
                "Composite(observation=spec)."
            )
        key = self.in_keys[0]
        if key not in observation_spec.keys(True, True):
            raise ValueError(
                f"key: expected one of {sorted(map(str, observation_spec.keys(True, True)))}, received {key!r}. "
                "Remedy: one of these."
            )
        spec = observation_spec[key]
        observation_spec[key] = spec[..., self.kept(spec.shape[-1])]
        return observation_spec
