"""The order of the layers: a folder imports those below it, and no two modules import each other."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torchrl_perf"

LAYERS = (
    ("functional", "kernels", "runtime"),
    ("metrics", "modules", "parallel", "replay"),
    ("envs", "objectives", "transforms"),
    ("collectors",),
    ("trainers",),
    ("systems",),
    ("cli", "bench"),
)
"""Folders from the lowest up. A folder imports lower ones; those of one layer leave each other alone."""

MOST_LEVELS = 2
"""Classes of the package above one of ``trainers`` and ``systems``, one over the other."""
MOST_LEVELS_OF_SETTINGS = 5
"""The same above a config: a limit that may fall, and must not rise."""

LOWEST = f"{PACKAGE}.runtime.upstream"
"""What others keep to themselves: it imports nothing of the package but itself, and every folder imports it."""
TOGETHER = {"functional", "kernels"}  # a kernel is the other form of a function
ENTRY = {"__main__"}  # starts the command line; the other files at the top are imported from everywhere


class Import(NamedTuple):
    """One import of a module of the package, wherever in the file it stands."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package below a folder, by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, code: str, known: set[str]) -> Iterator[Import]:
    """The imports of a module in functions, under TYPE_CHECKING and at its top."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(name, full if full in known else str(node.module), node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield Import(name, alias.name, node.lineno)


def all_imports(root: Path = ROOT) -> list[Import]:
    """Those of the whole package."""
    known = modules(root)
    return [each for name, path in known.items() for each in imports(name, path.read_text("utf-8"), set(known))]


def violations(found: list[Import], folders: set[str]) -> list[str]:
    """Imports of a folder that is not below the importer's, in words."""
    level = {folder: number for number, layer in enumerate(LAYERS) for folder in layer}
    wrong = []
    for each in found:
        importer, imported = (name.startswith(f"{LOWEST}.") for name in each[:2])
        if imported or importer:
            wrong += [] if imported else [str(each)]
            continue
        one, other = ((*name.split("."), "")[1] for name in each[:2])
        if other not in folders or one == other or {one, other} <= TOGETHER or one in ENTRY:
            continue
        # a file at the top of the package lies below every folder
        if level[other] >= level.get(one, -1):
            wrong.append(str(each))
    return wrong


def cycles(found: list[Import]) -> list[str]:
    """Modules that import each other, in words: one shortest circle for each import that closes one."""
    following: dict[str, set[str]] = {}
    for each in found:
        if each.importer != each.imported:
            following.setdefault(each.importer, set()).add(each.imported)
    circles = set()
    for start in following:
        ways = {start: [start]}
        queue = [start]
        for name in queue:
            for after in sorted(following.get(name, ())):
                if after == start:
                    way = ways[name]
                    first = way.index(min(way))
                    circles.add(" -> ".join([*way[first:], *way[:first], way[first]]))
                elif after not in ways:
                    ways[after] = [*ways[name], after]
                    queue.append(after)
    return sorted(circles)


def folders_of(root: Path = ROOT) -> set[str]:
    """Folders of the package."""
    return {path.parent.name for path in (root / PACKAGE).glob("*/__init__.py")}


def test_every_folder_has_a_layer():
    assert folders_of() == {folder for layer in LAYERS for folder in layer}, "add a new folder to LAYERS here"


def test_a_folder_imports_only_those_below_it():
    wrong = violations(all_imports(), folders_of())
    assert not wrong, "the lower folder lends, the upper one borrows: move what is shared down\n  " + "\n  ".join(wrong)


def test_no_two_modules_import_each_other():
    found = cycles(all_imports())
    assert not found, "what both need belongs in a third module\n  " + "\n  ".join(found)


def own_depth(kind: type) -> int:
    """How many classes of the package stand one above the other over a class: 0 below TorchRL's or torch's alone."""
    bases = [base for base in kind.__bases__ if base.__module__.startswith(PACKAGE)]
    return 1 + max(map(own_depth, bases)) if bases else 0


def classes_of(folders: tuple[str, ...]) -> list[type]:
    """The classes that the modules below some folders define."""
    names = [
        name for name in modules(ROOT) if f"{name}.".startswith(tuple(f"{PACKAGE}.{folder}." for folder in folders))
    ]
    found = {kind for name in names for kind in vars(importlib.import_module(name)).values() if inspect.isclass(kind)}
    return sorted((kind for kind in found if kind.__module__ in names), key=lambda kind: kind.__qualname__)


def test_inheritance_is_at_most_two_levels_deep():
    kinds = classes_of(("trainers", "systems"))
    assert {"SACTrainer", "DurotaxisTrainer", "MarineACIQNTrainer"} <= {kind.__name__ for kind in kinds}
    deep = {kind.__name__: own_depth(kind) for kind in kinds if own_depth(kind) > MOST_LEVELS}
    too_deep = [f"{name}: {depth}" for name, depth in deep.items() if not name.endswith("Config")]
    assert not too_deep, f"at most {MOST_LEVELS} levels; what they share is a part, and given\n  " + "\n  ".join(
        too_deep
    )
    # their fields are one block below another, and no method of one hides another's but ``_check``, which adds up
    assert max(deep.values(), default=0) <= MOST_LEVELS_OF_SETTINGS


class TestTheRulesThemselves:
    """The checks above find what they are meant to find."""

    def found(self, **codes):
        known = {f"{PACKAGE}.{name.replace('__', '.')}": code for name, code in codes.items()}
        return [each for name, code in known.items() for each in imports(name, code, set(known))]

    def test_an_import_upwards_in_a_function(self):
        code = "def f():\n    from torchrl_perf.trainers.run import train\n"
        found = self.found(metrics__a=code, trainers__run="import torchrl_perf.metrics.a\n")
        assert violations(found, folders_of()) == ["torchrl_perf.metrics.a:2 imports torchrl_perf.trainers.run"]

    def test_one_layer_and_the_top(self):
        found = self.found(
            modules__a="from torchrl_perf.replay import b\n",
            kernels__b="from torchrl_perf.functional import c\n",
            registry="from torchrl_perf.functional import c\n",
            cli__d="from torchrl_perf import registry\n",
        )
        assert violations(found, folders_of()) == [
            "torchrl_perf.modules.a:1 imports torchrl_perf.replay",
            "torchrl_perf.registry:1 imports torchrl_perf.functional",
        ]

    def test_the_lowest_is_for_all_and_imports_none(self):
        found = [
            Import(f"{PACKAGE}.functional.a", f"{LOWEST}.tensors", 1),
            Import(f"{PACKAGE}.runtime.b", f"{LOWEST}.tensors", 2),
            Import(f"{LOWEST}.tensors", f"{LOWEST}.modules", 3),
            Import(f"{LOWEST}.tensors", f"{PACKAGE}.runtime.b", 4),
        ]
        assert violations(found, folders_of()) == [f"{LOWEST}.tensors:4 imports {PACKAGE}.runtime.b"]

    def test_a_circle_of_three_is_told_once_and_type_checking_counts(self):
        found = self.found(
            envs__a="from torchrl_perf.envs import b\n",
            envs__b="from torchrl_perf.envs.c import x\n",
            envs__c="if TYPE_CHECKING:\n    from torchrl_perf.envs.a import x\n",
        )
        a, b, c = (f"{PACKAGE}.envs.{name}" for name in "abc")
        assert cycles(found) == [f"{a} -> {b} -> {c} -> {a}"]
