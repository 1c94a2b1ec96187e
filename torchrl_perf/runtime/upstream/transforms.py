"""TorchRL's transforms: what holds one, of which ``container`` tells envs alone and no replay buffer."""

from typing import Any

from torchrl.envs import EnvBase, Transform


def holder_of(transform: Transform) -> Transform | EnvBase | None:
    """The chain or env that a transform was put into last, None where nothing holds it."""
    reference: Any = vars(transform)["_container"]
    return None if reference is None else reference()
