"""Actions within their bounds, for envs that do not see to it."""

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data import Bounded, TensorSpec
from torchrl.envs import EnvBase, Transform

__all__ = ["ActionBounds", "bounds_of"]


class ActionBounds(Transform):
    """Moves actions that lie outside of their bounds to the nearest one, on their way to the env alone.

    ``TransformedEnv(env, ActionBounds(env))`` is for policies whose distribution knows no bounds, such as a normal one.
    What is collected has the action that was drawn, which its log-probability belongs to. TorchRL's ``ClipTransform``
    takes one pair of numbers for all entries. Nothing waits for the host.

    Keys read: those of the env's actions that are floating-point and ``Bounded``; others pass as they are.

    Args:
        env: whose bounds they are; its envs may not differ in them.
    """

    def __init__(self, env: EnvBase) -> None:
        super().__init__(in_keys_inv=[])
        self.keys = []
        for place, (key, bounds) in enumerate(bounds_of(env).items()):
            self.keys.append(key)
            for side, bound in zip(("low", "high"), bounds, strict=True):
                self.register_buffer(f"{side}_{place}", bound.clone(), persistent=False)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for place, key in enumerate(self.keys):
            low, high = getattr(self, f"low_{place}"), getattr(self, f"high_{place}")
            tensordict.set(key, tensordict.get(key).clamp(low, high))
        return tensordict


def bounds_of(env: EnvBase) -> dict[NestedKey, tuple[Tensor, Tensor]]:
    """The least and the greatest value of each floating-point action of an env that has bounds, by key."""
    specs: Mapping[NestedKey, TensorSpec] = dict(env.full_action_spec.items(True, True))
    found: dict[NestedKey, tuple[Tensor, Tensor]] = {}
    for key, spec in specs.items():
        if isinstance(spec, Bounded) and spec.dtype.is_floating_point:
            space: Any = spec.space
            found[unravel_key(key)] = space.low, space.high
    return found
