"""Envs by name: the package's tasks, registered ones, Gymnasium's, Atari games, VMAS scenarios, classes of users."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrl.envs import EnvBase

from torchrl_perf.envs.from_name import named_module, named_object
from torchrl_perf.near_names import nearest_word, plain_word
from torchrl_perf.registry import ROBOTS, TASKS

if TYPE_CHECKING:  # importing gymnasium changes the warning filters of the process: it is imported at its first use
    import gymnasium

    from torchrl_perf.envs.from_callable import Made, Where

__all__ = ["ENTRY_POINTS", "EnvEntry", "find", "is_known", "make", "names", "register", "registered"]

ENTRY_POINTS = "torchrl_perf.envs"
"""Group of entry points by which other packages offer envs: ``name = "module:class or function"``."""
VERSIONED = re.compile(r"^[\w./:-]+-v\d+$")
STACKED = 4  # frames of an observation of an Atari game
FRAMES = ("frameskip", "max_num_frames_per_episode")
INSTALL = {
    "mujoco": "pip install 'torchrl_perf[mujoco]'",
    "mujoco_warp": "pip install 'torchrl_perf[mujoco-warp]'",
    "ale_py": "pip install 'torchrl_perf[atari]'",
    "vmas": "pip install 'torchrl_perf[marl]'",
    "Box2D": "pip install swig && pip install 'gymnasium[box2d]'",
    "jax": "pip install 'gymnasium[jax]'",
}
"""What installs the packages that some envs need, by the name that they are imported by."""
NEEDS = {"mujoco": "mujoco", "box2d": "Box2D", "ale_py": "ale_py", "phys2d": "jax", "tabular": "jax"}
"""Those packages by a part of the module that an env's class is in."""


class EnvEntry(NamedTuple):
    """An env that a command line can name."""

    name: str
    """As in ``--env``."""
    maker: Callable[..., Any]
    """A class or function, see :func:`register`."""
    about: str = ""
    """The task in one line."""
    needs: str = ""
    """What installs the packages that it needs; empty for nothing."""
    settings: Mapping[str, Mapping[str, Any]] = {}
    """Settings of the algorithms that are known to work, by the name of the algorithm."""


_REGISTERED: dict[str, EnvEntry] = {}


def register(
    name: str,
    maker: Callable[..., Any],
    *,
    about: str = "",
    needs: str = "",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> EnvEntry:
    """Lets trainers and ``torchrl-perf train ALGORITHM --env NAME`` make an env by a name.

    A package offers its envs without being imported by an entry point of the group ``torchrl_perf.envs``, whose object
    is such a class or function.

    Args:
        name: letters, digits, ``/``, ``_``, ``-``; none of the package's tasks.
        maker: a :class:`DeviceEnv` or any other TorchRL env class, a ``gymnasium.Env`` or
            ``gymnasium.vector.VectorEnv`` class, or a function that returns an env of one of these kinds. It is called
            with those of ``num_envs`` and ``device`` that it has as parameters, and with the arguments of
            ``--env-args``. What has no ``num_envs`` is made as often as there are envs.
        about: the task in one line, for ``torchrl-perf envs``.
        needs: what installs the packages that it needs.
        settings: by the name of an algorithm, settings in place of its defaults.

    Returns:
        The entry; registering the same name again replaces it.

    Raises:
        ValueError: for a name of another form, and one that is hard to tell from a task of the package.
        TypeError: for a maker that cannot be called.
    """
    near = nearest_word(name, (*TASKS, *ROBOTS))
    taken = near is not None and plain_word(near) == plain_word(name) and not VERSIONED.match(name)
    if taken or not re.fullmatch(r"\w[\w./-]*", name):
        raise ValueError(
            f"name: expected letters, digits, '/', '_' and '-', and none of the tasks {', '.join((*TASKS, *ROBOTS))}, "
            f"received {name!r}. Remedy: another name."
        )
    if not callable(maker):
        raise TypeError(
            f"maker: expected a class or function that makes an env, received {type(maker).__name__}. Remedy: "
            "lambda num_envs, device: env."
        )
    _REGISTERED[name] = EnvEntry(name, maker, about, needs, dict(settings or {}))
    return _REGISTERED[name]


def registered() -> dict[str, EnvEntry]:
    """What :func:`register` was called with in this process, by name."""
    return dict(_REGISTERED)


def offered() -> dict[str, metadata.EntryPoint]:
    """Envs that other packages offer by entry points, by name; none of them is imported."""
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}


def find(name: str) -> EnvEntry:
    """The env of a name.

    ``CartPole`` is a task of the package, ``HalfCheetah`` one of them on MuJoCo Warp; then come registered names and
    those of entry points; ``gym:ID`` and any other id of Gymnasium's, Atari games (``ALE/Pong-v5``) among them;
    ``vmas:SCENARIO``; ``module.path:Class`` and ``file.py:function``, or a name that such a module registers.

    Args:
        name: of ``--env``.

    Raises:
        ValueError: for an unknown name, with the nearest that is known, and for a module or file that cannot be used.
        ImportError: for an env whose package is absent, with what installs it.
    """
    if name in TASKS or name in ROBOTS:
        return _own(name)
    if name in _REGISTERED:
        return _REGISTERED[name]
    if point := offered().get(name):
        return EnvEntry(name, _offered_maker(point), about=point.value)
    kind, colon, rest = name.partition(":")
    if rest.startswith("ALE/") or name.startswith("ALE/"):
        module_of("ale_py", INSTALL["ale_py"])  # enters its games into Gymnasium's registry
    if kind == "gym" and colon:
        return _gymnasium(name, rest)
    if kind == "vmas" and colon:
        return _vmas(name, rest)
    if colon and rest.isidentifier():
        return _of_a_user(name, rest)
    if VERSIONED.match(name) or name in gymnasium_ids():
        return _gymnasium(name, name)
    if colon:
        return EnvEntry(name, named_object(name))  # says what is wrong with it
    raise ValueError(unknown_env(name))


def _of_a_user(name: str, attribute: str) -> EnvEntry:
    """A class or function of a module or file, or what it registers under such a name."""
    try:
        return EnvEntry(name, named_object(name))
    except ValueError:
        if attribute in _REGISTERED:
            return _REGISTERED[attribute]
        raise


def make(name: str, num_envs: int, *, device: Where, arguments: Mapping[str, Any]) -> Made:
    """An env by its name.

    Args:
        name: see :func:`find`.
        num_envs: N.
        device: gives the device, and is called only for an env that lives on one.
        arguments: further arguments of the env.

    Returns:
        A TorchRL env ``[N]``, or what makes Gymnasium envs that step on the CPU.

    Raises:
        ValueError: as :func:`find`; for arguments that the env does not take, and what is no env.
        ImportError: for an env whose package is absent, with what installs it.
    """
    from torchrl_perf.envs.from_callable import made_by

    entry = find(name)
    try:
        made = made_by(entry.maker, num_envs, device=device, arguments=arguments)
    except ImportError as error:
        raise ImportError(_absent(name, error, entry.needs)) from error
    # an entry of the registry has a name of its own, a class its own
    return made if ":" in name and not name.startswith(("gym:", "vmas:")) else made._replace(label=_label(name))


def fitting_rows(name: str, rows: int, arguments: Mapping[str, Any]) -> int:
    """The least number of rows, from ``rows`` on, that an env can have: a row is an agent where there are several.

    Args:
        name: see :func:`find`.
        rows: how many are wanted.
        arguments: of the env.
    """
    maker = find(name).maker
    return -(-rows // (agents := maker.agents(**arguments))) * agents if isinstance(maker, _VmasScenario) else rows


def takes_render_mode(name: str) -> bool:
    """Whether an env can be asked for pictures as Gymnasium's are.

    Args:
        name: see :func:`find`.
    """
    from torchrl_perf.envs.from_callable import takes

    maker = find(name).maker
    return isinstance(maker, _GymnasiumId) or takes(maker, "render_mode")


def is_known(name: str) -> bool:
    """Whether a name has the form of an env's, or is one; no module is imported for it."""
    return ":" in name or VERSIONED.match(name) is not None or name in names()


def names() -> list[str]:
    """Every name that :func:`find` knows without a colon: tasks, registered ones, entry points, Gymnasium's ids."""
    return [*TASKS, *ROBOTS, *_REGISTERED, *offered(), *gymnasium_ids()]


def unknown_env(name: str) -> str:
    """What is wrong with a name that is no env, with the nearest that is one."""
    near = nearest_word(name, (*TASKS, *ROBOTS)) or nearest_word(name, names())
    remedy = f"--env {near}, the nearest; torchrl-perf envs lists all" if near else "torchrl-perf envs lists all"
    return (
        f"env: expected one of {', '.join((*TASKS, *ROBOTS))}, a registered name, an id of Gymnasium's, "
        f"module.path:Class or file.py:function, received {name!r}. Remedy: {remedy}; or a trainer made with env= or "
        "collector=."
    )


def _label(name: str) -> str:
    """A name as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", name.removeprefix("gym:"))


def _own(name: str) -> EnvEntry:
    """A task of the package."""
    if name in TASKS:
        return EnvEntry(name, getattr(importlib.import_module("torchrl_perf.envs"), name))
    return EnvEntry(
        name, getattr(importlib.import_module("torchrl_perf.envs.mujoco"), name), needs=needs("mujoco_warp")
    )


def _offered_maker(point: metadata.EntryPoint) -> Callable[..., Any]:
    try:
        return point.load()
    except Exception as error:
        raise ValueError(
            f"env: expected the entry point {point.name} = {point.value} to load, received {type(error).__name__}: "
            f"{error}. Remedy: mend or reinstall the package that offers it."
        ) from error


def _absent(name: str, error: ImportError, needs: str) -> str:
    # an env that says what installs its package says so once
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    remedy = needs or f"install {cause.name or 'it'}"
    return f"env: expected the packages that {name} needs, received: {cause}. Remedy: {remedy}."


# -- Gymnasium ------------------------------------------------------------------------------------------------------


def gymnasium_ids() -> Mapping[str, Any]:
    """Gymnasium's registry: specs by id. The games of ale-py are there once it is imported."""
    import gymnasium

    return gymnasium.registry


def needs(package: str) -> str:
    """What installs an optional package; empty where it is there."""
    return "" if importlib.util.find_spec(package) is not None else INSTALL[package]


def needs_of(spec: Any) -> str:
    """What installs the absent packages that a spec of Gymnasium's registry needs; empty for nothing."""
    place = str(spec.entry_point)
    return next((needs(package) for part, package in NEEDS.items() if part in place), "")


def _gymnasium(name: str, env_id: str) -> EnvEntry:
    import gymnasium
    from gymnasium.error import Error

    module, colon, rest = env_id.rpartition(":")
    if colon:  # Gymnasium's own form: a module that registers the id
        named_module(module, name)
        env_id = rest
    try:
        spec = gymnasium.spec(env_id)
    except (Error, ImportError) as error:
        near = nearest_word(env_id, gymnasium.registry)
        remedy = f"--env {near}, the nearest" if near else "one of those that torchrl-perf envs lists"
        raise ValueError(
            f"env: expected an id of Gymnasium's, received {env_id!r}: {error}. Remedy: {remedy}."
        ) from None
    if "ale_py" in str(spec.entry_point):
        return EnvEntry(name, _Atari(spec), "Atari game", INSTALL["ale_py"])
    return EnvEntry(name, _GymnasiumId(env_id), needs=needs_of(spec))


class _GymnasiumId:
    """``gymnasium.make`` of one id, whose arguments are those of the env."""

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id

    def __call__(self, **arguments: Any) -> gymnasium.Env:
        import gymnasium
        from gymnasium.error import DependencyNotInstalled

        try:
            return gymnasium.make(self.env_id, **arguments)
        except DependencyNotInstalled as error:
            raise ImportError(str(error).rstrip(".")) from error
        except TypeError as error:
            if not arguments:
                raise
            raise ValueError(
                f"env_args: expected arguments of {self.env_id}, received {dict(arguments)}: {error}. Remedy: those of "
                "its page in Gymnasium's documentation."
            ) from error


class _Atari:
    """All games of one kind in one vector env, with the preprocessing of the DQN of 2015 (doi:10.1038/nature14236).

    Grey images of 84 x 84, maximum of two frames, four frames a step and four in an observation, up to 30 idle steps
    at the start, rewards clipped to their sign. Sticky actions are as the id has them.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __call__(self, num_envs: int, **arguments: Any) -> Any:
        from ale_py.vector_env import AtariVectorEnv
        from gymnasium.vector import AutoresetMode

        from torchrl_perf.envs.from_callable import FrameStacks, check_arguments

        known = self.spec.kwargs
        usual = {"stack_num": STACKED, "repeat_action_probability": known.get("repeat_action_probability", 0.0)}
        chosen = {**usual, "full_action_space": known.get("full_action_space", False), **arguments}
        check_arguments(AtariVectorEnv, arguments, self.spec.id)
        envs = AtariVectorEnv(known["game"], num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **chosen)
        frames, limit = (inspect.signature(AtariVectorEnv).parameters[name].default for name in FRAMES)
        limit = int(chosen.get("max_num_frames_per_episode", limit)) // int(chosen.get("frameskip", frames))
        return FrameStacks(envs, frames=int(chosen["stack_num"]), max_episode_steps=limit)


def module_of(name: str, install: str) -> Any:
    """An optional package.

    Raises:
        ImportError: with what installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"env: expected the package {name}, received: {error}. Remedy: {install}.") from error


# -- VMAS -----------------------------------------------------------------------------------------------------------


def _vmas(name: str, scenario: str) -> EnvEntry:
    vmas = module_of("vmas", INSTALL["vmas"])
    known = sorted([*vmas.scenarios, *vmas.mpe_scenarios])
    if scenario not in known:
        near = nearest_word(scenario, known)
        remedy = f"--env vmas:{near}, the nearest" if near else f"one of {', '.join(known)}"
        raise ValueError(f"env: expected a scenario of VMAS, received {scenario!r}. Remedy: {remedy}.")
    return EnvEntry(name, _VmasScenario(scenario), "VMAS scenario, a row for each agent", INSTALL["vmas"])


class _VmasScenario:
    """The agents of a scenario as rows of one batch, which one policy acts for."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario

    def agents(self, **arguments: Any) -> int:
        """How many agents a world has."""
        return self._streams(1, "cpu", **arguments).batch_size[0]

    def __call__(self, num_envs: int, device: Any, **arguments: Any) -> EnvBase:
        agents = self.agents(**arguments)
        worlds, rest = divmod(num_envs, agents)
        if rest or not worlds:
            raise ValueError(
                f"num_envs: expected a multiple of the {agents} agents of vmas:{self.scenario}, each of which is a "
                f"row, received {num_envs}. Remedy: num_envs={max(worlds, 1) * agents}."
            )
        return self._streams(worlds, device, **arguments)

    def _streams(self, worlds: int, device: Any, **arguments: Any) -> EnvBase:
        from torchrl_perf.envs.agent_streams import AgentStreams
        from torchrl_perf.envs.vmas import DeviceVmasEnv

        options = {"max_steps": 100, **arguments}
        return AgentStreams(DeviceVmasEnv(self.scenario, worlds, device=device, **options))
