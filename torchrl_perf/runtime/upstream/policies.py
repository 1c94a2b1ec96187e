"""TorchRL's transforms that carry the state of a recurrent policy, which its collectors add to an env."""

from typing import Any

from torchrl.envs import EnvBase


def with_transforms_of(env: EnvBase, policy: Any) -> EnvBase:
    """``env`` with the transforms that the modules of a policy ask for."""
    from torchrl.modules.utils.utils import _maybe_append_env_transforms_from_module

    return _maybe_append_env_transforms_from_module(env, policy)
