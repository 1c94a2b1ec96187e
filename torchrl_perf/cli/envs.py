"""``torchrl-perf envs``: the envs that ``train ALGORITHM --env NAME`` knows, and what each needs."""

import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torchrl_perf.cli.command_parser import CommandParser
from torchrl_perf.near_names import nearest_word

__all__ = ["Row", "main", "rows"]

FORMS = """
An env of your own needs no registration:
  --env module.path:Class         a DeviceEnv, another TorchRL env, a gymnasium.Env or gymnasium.vector.VectorEnv
  --env file.py:function          a function that returns one
  --env-args name=value ...       its arguments
A name for it: torchrl_perf.envs.register("Name", Class), or an entry point of the group "torchrl_perf.envs".
"""


class Row(NamedTuple):
    """An env with a name."""

    name: str
    """As in ``--env``."""
    group: str
    """Where it comes from."""
    about: str
    """The task, or an empty text."""
    needs: str
    """What installs the packages that it needs and that are absent; empty for nothing."""


def main(argv: Sequence[str]) -> int:
    """Print the envs whose name or task has a word in it, or all of them.

    Args:
        argv: arguments behind ``envs``.

    Returns:
        Exit code: 0; 1 for a word that no env has.
    """
    parser = CommandParser("torchrl-perf envs", description="List the envs that have a name.")
    parser.add_argument("word", nargs="?", default="", help="list those whose name, task or group has this in it")
    parser.add_argument("--all", action="store_true", help="older versions and every Atari game, too")
    options = parser.parse_args(list(argv))
    every = list(rows(old=bool(options.all or options.word)))
    word = options.word.lower()
    found = [row for row in every if word in f"{row.name} {row.about} {row.group}".lower()]
    if not found:
        near = nearest_word(options.word, [row.name for row in every])
        remedy = f"torchrl-perf envs {near}" if near else "torchrl-perf envs, which lists all"
        print(f"envs: expected a word of an env's name or task, received {options.word!r}. Remedy: {remedy}.")
        return 1
    for line in _lines(found):
        print(line)
    print(FORMS, end="")
    return 0


def rows(*, old: bool = False) -> Iterator[Row]:
    """Every env with a name, group by group.

    Args:
        old: with the versions of a Gymnasium env before the last, and all Atari games.
    """
    from torchrl_perf.envs import registry

    for name in registry.TASKS:
        about = inspect.getdoc(registry.find(name).maker) or ""
        yield Row(name, "tasks of the package, in tensors", _first_sentence(about), "")
    for name in registry.ROBOTS:
        entry = registry.find(name)
        about = _first_sentence(inspect.getdoc(entry.maker) or "")
        yield Row(name, "robots on MuJoCo Warp, in tensors", about, entry.needs)
    for entry in registry.registered().values():
        yield Row(entry.name, "registered", entry.about, entry.needs)
    for name, point in registry.offered().items():
        yield Row(name, "entry points of other packages", point.value, "")
    yield from _gymnasium_rows(old)
    needs = registry.needs("vmas")
    scenarios = _vmas_scenarios()
    for name in scenarios or ["SCENARIO"]:
        yield Row(f"vmas:{name}", "VMAS, in tensors, a row for each agent", "", needs)


def _gymnasium_rows(old: bool) -> Iterator[Row]:
    from torchrl_perf.envs import registry

    needs = registry.needs("ale_py")
    if not needs:
        importlib.import_module("ale_py")  # enters its games into the registry
    specs = [spec for spec in registry.gymnasium_ids().values() if isinstance(spec.entry_point, str)]
    specs.sort(key=_family)
    newest = {(spec.namespace, spec.name): spec for spec in sorted(specs, key=lambda spec: spec.version or 0)}
    games = 0
    for spec in specs if old else newest.values():
        family = _family(spec)
        if family == "ale_py" and not (old and spec.namespace == "ALE"):
            games += spec.namespace == "ALE"
            continue
        yield Row(spec.id, f"Gymnasium, {family}, on the CPU", "", registry.needs_of(spec))
    if not old:
        about = f"such as ALE/Pong-v5; {games} games, of which torchrl-perf envs ALE lists all" if games else ""
        yield Row("ALE/GAME-v5", "Gymnasium, ale_py, on the CPU", about, needs)


def _vmas_scenarios() -> list[str]:
    if importlib.util.find_spec("vmas") is None:
        return []
    vmas: Any = importlib.import_module("vmas")
    return sorted([*vmas.scenarios, *vmas.mpe_scenarios])


def _family(spec: Any) -> str:
    """The part of the module of a spec's class that tells its family: ``mujoco``, ``ale_py``."""
    parts = str(spec.entry_point).partition(":")[0].split(".")
    return parts[2] if parts[:2] == ["gymnasium", "envs"] and len(parts) > 2 else parts[0]


def _first_sentence(text: str) -> str:
    """The first sentence of a docstring without its marks."""
    sentence = re.split(r"(?<=[.])\s", " ".join(text.split()), maxsplit=1)[0]
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", sentence).replace("``", "")


def _lines(found: Sequence[Row]) -> Iterator[str]:
    width = max(len(row.name) for row in found)
    group = ""
    for row in found:
        if row.group != group:
            group = row.group
            yield f"\n{group}"
        needs = f"needs {row.needs}" if row.needs else ""
        yield f"  {row.name:{width}}  {'; '.join(part for part in (row.about, needs) if part)}".rstrip()
