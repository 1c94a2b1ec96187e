"""TorchRL's envs: a step and a reset without what surrounds them, and methods replaced on one object.

``EnvBase.reset`` asks the host whether a fresh row is done and ``EnvBase.step`` copies the TensorDict, once for every
call; a loop that never waits and is captured needs what is inside. TorchRL's transforms call the same methods.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs.transforms import FrameSkipTransform

FRAME_SKIP_CODE = FrameSkipTransform._step.__code__
"""What runs while a frame skip repeats steps; it passes the same TensorDict each time and says nothing of its own."""


def inner_reset(env: EnvBase, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
    """The reset of an env, through its transforms, without the checks of ``reset``, which read done flags on the host.

    Args:
        env: any env.
        tensordict: with the mask under ``"_reset"``, ``[*batch, 1]``; None for all rows.
        kwargs: for the reset.

    Returns:
        The root entries.
    """
    return env._reset(cast("TensorDictBase", tensordict), **kwargs)


def inner_step_of(env: EnvBase) -> Callable[[TensorDictBase], TensorDictBase]:
    """The step that the transforms of an env call: it returns the entries of "next", not completed and not checked."""
    return env._step


def complete_done(env: EnvBase, following: TensorDictBase) -> None:
    """Add the done flags that an env's own step left out, as ``step`` does; ``following`` is what the step returned."""
    env._complete_done(env.full_done_spec, following)


def hide_observations_of_ends(env: EnvBase, stepped: TensorDictBase) -> dict[Any, Tensor]:
    """Overwrite by NaN what an env that resets itself has under "next" where an episode ended, which is no end of it.

    An env that knows its final observations overrides this method of TorchRL's, and keeps them.

    Returns:
        The observations as they were: those of the next root.
    """
    return dict(env._native_autoreset_set_invalid_next_observation(stepped))


def may_be_done_after_reset(env: EnvBase) -> bool:
    """The ``allow_done_after_reset`` that an env was made with."""
    return env._allow_done_after_reset


def has_dynamic_specs(env: EnvBase) -> bool:
    """Whether shapes vary: a dim of -1, or a batch of envs without buffers."""
    return env._has_dynamic_specs


def members_of(env: EnvBase) -> list[EnvBase]:
    """The envs of a ``SerialEnv`` in its order, none of any other env; they exist from the first reset on."""
    return list(env._envs) if isinstance(env, SerialEnv) else []


@contextmanager
def replaced(target: object, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside the context one object, not its class, calls these in place of its methods of the same names.

    Not reentrant. Python looks an attribute of the object up before a method of its class, and so do the calls inside
    TorchRL's own code: a wrapper around the object would not see those.

    Args:
        target: an env or a transform.
        methods: functions without ``self``, by name.
    """
    own = vars(target)
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del own[name]
