"""What a class or function makes: an env in tensors, or Gymnasium envs that step on the CPU."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import gymnasium
import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase, SerialEnv

from torchrl_perf.envs.auto_reset import AutoResetEnv
from torchrl_perf.near_names import nearest_word

__all__ = ["FrameStacks", "Made", "Where", "check_arguments", "made_by", "takes"]

Where = Callable[[], torch.device]
GIVEN = ("num_envs", "device", "batch_size")
LIMIT = "max_episode_steps"
KINDS = (
    "a DeviceEnv or another TorchRL env, a gymnasium.Env, a gymnasium.vector.VectorEnv, or a function that returns one"
)


class FrameStacks(NamedTuple):
    """A vector env whose observations are stacks of frames, black before the first of an episode."""

    envs: VectorEnv
    """Observations ``[N, frames, H, W]``."""
    frames: int
    """Frames of a stack, the newest last; a replay buffer stores that one alone."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated."""


class Made(NamedTuple):
    """An env, or what makes the envs of a run; one of the first three is given."""

    env: EnvBase | None = None
    """In tensors, ``[N]``."""
    single: Callable[[], gymnasium.Env] | None = None
    """Makes one Gymnasium env."""
    vector: Callable[[int], VectorEnv] | None = None
    """Makes a vector env of as many envs."""
    label: str = ""
    """Name of the class, for folders."""
    frames: int = 1
    """Frames of an observation that is a stack of them."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated, where the envs do not say it themselves."""


def made_by(maker: Any, num_envs: int, *, device: Where, arguments: Mapping[str, Any]) -> Made:
    """What a class or function makes.

    A TorchRL env without ``num_envs`` or ``batch_size`` is made N times, in a ``SerialEnv``.

    Args:
        maker: see :func:`~torchrl_perf.envs.registry.register`.
        num_envs: N.
        device: gives the device, and is called only for what takes one.
        arguments: further arguments of the maker; ``max_episode_steps`` works with every Gymnasium env.

    Raises:
        ValueError: for what makes no env, and arguments that it does not take.
    """
    if not callable(maker):
        raise ValueError(f"env: expected {KINDS}, received {maker!r}. Remedy: {_remedy(type(maker))}")
    limit = arguments.get(LIMIT) if inspect.isclass(maker) and issubclass(maker, gymnasium.Env) else None
    if limit is not None and not takes(maker, LIMIT):
        inner = partial(maker, **_checked(maker, {key: arguments[key] for key in arguments if key != LIMIT}))
        return Made(single=partial(_limited, inner, int(limit)), label=maker.__name__)
    arguments = _checked(maker, arguments)
    label = getattr(maker, "__name__", type(maker).__name__)
    if inspect.isclass(maker):
        if issubclass(maker, gymnasium.Env):
            return Made(single=partial(maker, **arguments), label=label)
        if issubclass(maker, VectorEnv):
            return Made(vector=_sized(maker, arguments), label=label)
        if not issubclass(maker, EnvBase):
            raise ValueError(f"env: expected {KINDS}, received the class {_place(maker)}. Remedy: {_remedy(maker)}")
    options = {**arguments, **_given(maker, num_envs, device)}
    return _told_by(maker(**options), partial(maker, **options), num_envs, maker)


def check_arguments(kind: Any, arguments: Mapping[str, Any], name: str) -> None:
    """Refuse arguments that a class or function does not take.

    Raises:
        ValueError: naming them, and the nearest that it takes.
    """
    parameters = _parameters(kind)
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    known = [each for each in parameters if each not in GIVEN]
    for argument in arguments:
        if argument not in known:
            near = nearest_word(argument, known)
            remedy = f"{near}, the nearest" if near else f"one of {', '.join(known)}" if known else "none"
            raise ValueError(
                f"env_args: expected arguments of {name}({', '.join(known)}), received {argument!r}. Remedy: {remedy}."
            )


def _told_by(result: Any, again: Callable[[], Any], num_envs: int, maker: Any) -> Made:
    """What the first result of a maker says of it."""
    label = getattr(maker, "__name__", type(maker).__name__)
    if isinstance(result, FrameStacks):
        result.envs.close()
        told = {"frames": result.frames, "max_episode_steps": result.max_episode_steps}
        return Made(vector=_resized(lambda **size: again(**size).envs, maker), label=label, **told)
    if isinstance(result, VectorEnv):
        result.close()
        return Made(vector=_resized(again, maker), label=_class_of(result, label))
    if isinstance(result, gymnasium.Env):
        label = type(result.unwrapped).__name__
        result.close()
        return Made(single=again, label=label)
    if not isinstance(result, EnvBase):
        raise ValueError(
            f"env: expected {KINDS}, received {label}, which returned {_place(type(result))}. Remedy: "
            f"{_remedy(type(result))}"
        )
    label = type(result).__name__
    if result.batch_size:
        return Made(env=result, label=label)
    device = result.device
    result.close(raise_if_closed=False)
    several = SerialEnv(num_envs, again, device=device)
    several.start()  # before that any attribute that it lacks is looked for without end
    return Made(env=several, label=label)


def _resized(again: Callable[..., Any], maker: Any) -> Callable[[int], VectorEnv]:
    """Makes vector envs of a number of envs; of one without ``num_envs`` always the same number."""
    return (lambda number: again(num_envs=number)) if takes(maker, "num_envs") else lambda number: again()


def _sized(maker: Any, arguments: Mapping[str, Any]) -> Callable[[int], VectorEnv]:
    return _resized(partial(maker, **arguments), maker)


def _limited(maker: Callable[[], gymnasium.Env], steps: int) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(maker(), steps)


def _given(maker: Any, num_envs: int, device: Where) -> dict[str, Any]:
    """Those of the number of envs and the device that a maker takes."""
    parameters = _parameters(maker)
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    own = inspect.isclass(maker) and issubclass(maker, AutoResetEnv)
    found: dict[str, Any] = {}
    if "num_envs" in parameters or (passes_on and own):
        found["num_envs"] = num_envs
    elif "batch_size" in parameters:
        found["batch_size"] = [num_envs]
    if "device" in parameters or (passes_on and inspect.isclass(maker) and issubclass(maker, EnvBase)):
        found["device"] = device()
    return found


def takes(maker: Any, argument: str) -> bool:
    """Whether a class or function has a parameter of this name."""
    return argument in _parameters(maker)


E = TypeVar("E", bound=Mapping[str, Any])


def _checked(maker: Any, arguments: E) -> E:
    """The arguments of an env that takes them, and lacks none."""
    name = getattr(maker, "__name__", type(maker).__name__)
    check_arguments(maker, arguments, name)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for key, each in _parameters(maker).items():
        if each.default is each.empty and each.kind not in several and key not in (*GIVEN, *arguments):
            raise ValueError(
                f"env_args: expected {key}, which {name} needs, received {dict(arguments)}. Remedy: --env-args "
                f"{key}=value, in Python env_args=('{key}=value',)."
            )
    return arguments


def _parameters(maker: Any) -> Mapping[str, inspect.Parameter]:
    # of a class its constructor's: TorchRL's metaclass hides that of an env behind (*args, **kwargs)
    try:
        found = inspect.signature(maker.__init__ if inspect.isclass(maker) else maker).parameters
    except (TypeError, ValueError):  # a class that is built in
        return {}
    return {name: each for name, each in found.items() if name != "self"}


def _class_of(envs: VectorEnv, label: str) -> str:
    """The class of the envs in a vector env that steps them here."""
    inner = getattr(envs, "envs", None)
    return type(inner[0].unwrapped).__name__ if inner else label


def _place(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _remedy(kind: type) -> str:
    if any(base.__module__.partition(".")[0] == "gym" for base in kind.__mro__):
        return "import gymnasium in place of gym, whose step and reset return other values."
    return "the name of a class or function that makes an env."
