"""Specs of actions as TorchRL's collectors and losses ask policies for them."""

from typing import Any, cast

from tensordict.utils import NestedKey
from torchrl.data import Composite, TensorSpec


def composite_of(spec: TensorSpec, key: NestedKey) -> Composite:
    """A Composite that holds the spec at a key; a Composite as it is. Its shape is that of the batch, ``[*]``."""
    return spec if isinstance(spec, Composite) else Composite({key: spec}, shape=spec.shape[:-1])


def leaf_of(spec: Any, key: NestedKey) -> Any:
    """The spec at a key of a Composite, None where there is none; any other spec as it is."""
    if not isinstance(spec, Composite):
        return spec
    return cast("Any", spec)[key] if key in spec.keys(True, True) else None
