"""Checks of settings that find every problem at once, with the nearest valid name where one is unknown."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchrl_perf.near_names import nearest_word
from torchrl_perf.trainers.setting_names import nearest_setting

__all__ = [
    "Checks",
    "ConfigError",
    "UnknownSettingError",
    "as_tuple",
    "idle_problems",
    "is_count",
    "is_positive",
    "is_share",
    "settings_from",
]

LARGEST = 2**63 - 1  # of the integers that tensors hold
LONGEST_VALUE = 120  # characters of a value that a sentence repeats


class ConfigError(ValueError):
    """Settings that cannot be run.

    Args:
        problems: one sentence or two each, beginning with the name of the setting.
        source: where the settings come from, such as a file.

    Attributes:
        problems: as given.
    """

    def __init__(self, problems: Iterable[str], source: str = "") -> None:
        self.problems, self.source = tuple(problems), source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        start = f"{self.source}: " if self.source else ""
        if len(self.problems) == 1:
            return start + self.problems[0]
        return "\n  ".join([f"{start}{len(self.problems)} problems:", *self.problems])


class UnknownSettingError(ConfigError, TypeError):
    """Settings some of which do not exist; a TypeError as well, which is what a call with an unknown name raises."""


class Checks:
    """The problems of one set of settings, each field reported once.

    A value of a type that its field does not have is a problem by itself; :meth:`each` and :meth:`sound` leave it
    alone, so that conditions only see values that they can judge.

    Args:
        config: instance of a dataclass with annotated fields.
        bad: names of fields that are known to be wrong already; nothing is said of them.
    """

    def __init__(self, config: Any, bad: Iterable[str] = ()) -> None:
        self._config = config
        self._hints = _hints(type(config))
        self._defaults = _defaults_of(type(config), getattr(config, "env", None))
        self._misfits = {name for name, hint in self._hints.items() if not _fits(getattr(config, name), hint)}
        self._problems: dict[str, str] = dict.fromkeys(bad, "")

    def each(self, names: Iterable[str], is_met: Callable[[Any], bool], expected: str) -> None:
        """Ask the same of some fields; None passes where a field allows it.

        Args:
            names: the fields.
            is_met: condition on a value of the field's type, None left out.
            expected: what it asks for, in words.
        """
        for name in names:
            value, fits = getattr(self._config, name), name not in self._misfits
            if not fits or not (value is None or is_met(value)):
                words = f"None or {expected}" if type(None) in _options(self._hints[name]) else expected
                remedy = self._remedy(name, is_met)
                self.add(name, _expected_received(name, words, value, show_type=not fits, remedy=remedy))

    def sound(self, *names: str) -> bool:
        """Whether no problem of these fields has been found, so that they can be judged together."""
        return not any(name in self._misfits or name in self._problems for name in names)

    def add(self, name: str, problem: str) -> None:
        """Note a problem of a field that has none yet; the sentence begins with the field's name."""
        self._problems.setdefault(name, problem)

    def usual(self, name: str) -> Any:
        """What a field is with the config's task if it is left out."""
        return self._defaults[name]

    def idle(self, names: Iterable[str], switch: str, is_off: Callable[[Any], bool] = lambda value: not value) -> None:
        """Refuse settings that nothing reads with some values of another one, see :func:`idle_problems`.

        Args:
            names: fields that are read beside other values of the switch alone.
            switch: the field that decides.
            is_off: whether nothing reads them with a value of it; by default False and None.
        """
        value = getattr(self._config, switch)
        if self.sound(switch) and is_off(value):
            names = [name for name in names if self.sound(name)]
            for name, problem in idle_problems(
                self._config, names, f"with {switch}={value!r}, where nothing reads it", f"another {switch}"
            ).items():
                self.add(name, problem)

    def problems(self) -> list[str]:
        """All problems, in the order of the fields."""
        for name in self._misfits:
            self.add(name, _misfit(name, getattr(self._config, name), self._hints[name], self._remedy(name)))
        return [self._problems[name] for name in self._hints if self._problems.get(name)]

    def _remedy(self, name: str, is_met: Callable[[Any], bool] = lambda value: True) -> str:
        """A value that works: what was meant, where that can be told, or else the default."""
        value, default = getattr(self._config, name), self._defaults[name]
        for option in _options(self._hints[name]):
            meant = _meant(value, option)
            if meant is not None and _fits(meant, option) and is_met(meant):
                return f"{name}={_shown(meant)}"
        if default is dataclasses.MISSING or not (default is None or is_met(default)):
            return ""
        return f"{name}={default!r}, the default"


def idle_problems(config: Any, names: Iterable[str], where: str, remedy: str) -> dict[str, str]:
    """Settings that nothing reads and that differ from what they are if left out, as problems by field.

    Args:
        config: of the run.
        names: settings that nothing reads.
        where: the case in which nothing does.
        remedy: what makes them count.
    """
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    of_task = _defaults_of(type(config), getattr(config, "env", None))
    return {
        name: f"{name}: expected {of_task[name]!r} {where}, received {value!r}. Remedy: {remedy}, or leave it out."
        for name in names
        if (value := getattr(config, name)) not in (usual[name], of_task[name])
    }


def is_count(value: int) -> bool:
    """Whether a setting is at least 1."""
    return value >= 1


def is_share(value: float) -> bool:
    """Whether a setting lies in [0, 1]."""
    return 0.0 <= value <= 1.0


def is_positive(value: float) -> bool:
    """Whether a setting is above 0."""
    return value > 0


def settings_from(kind: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Take the fields of a dataclass from plain values, such as those that a file holds.

    A whole float becomes an integer where one is expected, and text such as ``1e-3``, which YAML does not take for a
    number, becomes a float. ``algorithm`` may be among them; settings of another algorithm are one problem, whatever
    else they hold.

    Args:
        kind: the dataclass; where it has an attribute ``algorithm``, that is what it is for.
        values: name to value.

    Returns:
        The values of known fields that have the right type; and for each of the others, name to problem.
    """
    hints = _hints(kind)
    defaults = _defaults_of(kind, values.get("env"))
    good: dict[str, Any] = {}
    problems: dict[str, str] = {}
    own = getattr(kind, "algorithm", None)
    if (made_for := values.get("algorithm", own)) != own:
        problem = f"algorithm: expected settings of {own}, received those of {made_for}."
        return {}, {"algorithm": f"{problem} Remedy: torchrl-perf train {made_for}, or settings of {own}."}
    for name, value in values.items():
        if name == "algorithm" and own is not None:
            continue
        if name not in hints:
            problems[str(name)] = unknown_setting(str(name), value, list(hints))
            continue
        for option in _options(hints[name]):
            taken = _converted(value, option)
            if _fits(taken, option):
                good[name] = taken
                break
        else:
            remedy = "" if defaults[name] is dataclasses.MISSING else f"{name}={defaults[name]!r}, the default"
            for option in _options(hints[name]):
                if (meant := _meant(value, option)) is not None and _fits(meant, option):
                    remedy = f"{name}={_shown(meant)}"
                    break
            problems[name] = _misfit(name, value, hints[name], remedy)
    return good, problems


def as_tuple(kind: type, name: str, value: list[Any]) -> Any:
    """A list, as JSON has a tuple, as the tuple that a field of a dataclass asks for; as it is for any other field."""
    wants = any(typing.get_origin(option) is tuple for option in _options(_hints(kind)[name]))
    return tuple(value) if wants else value


def _defaults_of(kind: Any, env: Any) -> dict[str, Any]:
    """What settings that are not given become, which may depend on the task."""
    if hasattr(kind, "defaults"):
        return kind.defaults(env)
    return {field.name: field.default for field in dataclasses.fields(kind)}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that a field may have, one by one."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has one of the types of a field; infinity and NaN are no numbers here."""
    for option in _options(hint):
        if typing.get_origin(option) is typing.Literal:
            fits = value in typing.get_args(option)
        elif typing.get_origin(option) is tuple:  # of any length, of one type
            fits = isinstance(value, tuple) and all(_fits(each, typing.get_args(option)[0]) for each in value)
        elif option is float:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        elif option is int:
            fits = isinstance(value, int) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
        else:
            fits = isinstance(value, option)
        if fits:
            return True
    return False


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _converted(value: Any, option: Any) -> Any:
    """``value`` as the type of a field where nothing is lost by it, or as it is."""
    if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
        return tuple(_converted(each, typing.get_args(option)[0]) for each in value)
    try:
        if option is float and isinstance(value, int | str) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, float) and value.is_integer():
            return int(value)
    except (ValueError, OverflowError):
        pass
    return value


def _meant(value: Any, option: Any) -> Any:
    """What a value of another type stands for, such as the 128 of "128"; None where that cannot be told."""
    if typing.get_origin(option) is tuple and isinstance(value, int | str) and not isinstance(value, bool):
        one = typing.get_args(option)[0]  # one number or text in place of several
        return (_converted(value, one) if _fits(value, one) else _meant(value, one),)
    if option not in (int, float) or not isinstance(value, str):
        return None if value is None else _converted(value, option)
    try:
        return _converted(float(value), option) if option is int else float(value)
    except (ValueError, OverflowError):
        return None


def _in_words(hint: Any, value: Any) -> str:
    whole = "an integer"
    if isinstance(value, int) and not isinstance(value, bool) and not -LARGEST <= value <= LARGEST:
        whole = f"an integer of 64 bits, at most {LARGEST}"
    plain: dict[Any, str] = {int: whole, float: "a finite number", bool: "True or False", str: "text"}
    plain |= {type(None): "None", tuple[int, ...]: "a tuple of integers", tuple[str, ...]: "a tuple of texts"}
    plain |= {tuple[float, ...]: "a tuple of finite numbers"}
    options = sorted(_options(hint), key=lambda option: option is not type(None))
    return " or ".join(
        f"one of {typing.get_args(option)}" if typing.get_origin(option) is typing.Literal else plain[option]
        for option in options
    )


def _misfit(name: str, value: Any, hint: Any, remedy: str = "") -> str:
    """The problem of a value that has none of the types of its field."""
    literals = [option for option in _options(hint) if typing.get_origin(option) is typing.Literal]
    words = [word for option in literals for word in typing.get_args(option)]
    if not words or not isinstance(value, str):
        return _expected_received(name, _in_words(hint, value), value, show_type=True, remedy=remedy)
    near = nearest_word(value, words)
    remedy = f"change {name}; the nearest is {near!r}" if near else remedy
    return _expected_received(name, _in_words(hint, value), value, show_type=False, remedy=remedy)


def _expected_received(name: str, expected: str, value: Any, *, show_type: bool, remedy: str) -> str:
    kind = f" ({type(value).__name__})" if show_type else ""
    return f"{name}: expected {expected}, received {_shown(value)}{kind}. Remedy: {remedy or 'leave ' + name + ' out'}."


def _shown(value: Any) -> str:
    """A value as text, not longer than a line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of thousands of digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def unknown_setting(name: str, value: Any, known: list[str]) -> str:
    """The problem of a setting that does not exist, with the nearest that does."""
    near = nearest_setting(name, known)
    hint = f"the nearest is {' or '.join(near)}" if near else f"those there are: {', '.join(known)}"
    return f"{name}: unknown setting, received with the value {_shown(value)} ({type(value).__name__}); {hint}."
