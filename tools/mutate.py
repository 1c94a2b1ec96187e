"""Put small faults into the package, one at a time, and see whether its tests notice.

``python tools/mutate.py functional replay --count 8 --seed 0 --output mutants.json`` takes eight faults in each of the
two folders. The tests of the folder first run without a fault, which tells which tests call which function; then each
fault meets the tests that call its function, the quickest first, in a copy of the tree. A fault that survives is either
one that changes nothing, or an assertion that is missing: with that written, ``--again mutants.json`` tries those that
survived once more.
"""

import argparse
import ast
import dataclasses
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from forked_tests import PRELOADED, Only, Watch, preload, run_tests
from mutants import Mutant, mutants_of

__all__ = ["Outcome", "Settings", "main", "pick", "try_mutants"]

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "results", "dist", "runs")
RESULTS = ("caught", "survived", "timed out", "not reached")
SLOWER = 5.0  # how much longer they may take than without a fault: other work may have begun beside them

Picked = tuple[Path, Mutant]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        file: below the root.
        line: of the fault, from 1.
        operator: its kind.
        before: as it was.
        after: what stood there.
        result: ``"caught"``, ``"survived"``, ``"timed out"``, or ``"not reached"`` where no test calls the function.
        tests: how many were chosen.
        by: the test that failed, "" if none did.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    result: str
    tests: int
    by: str


@dataclass(frozen=True)
class Settings:
    """Of a session.

    Attributes:
        root: of the tree.
        package: name of the package.
        tests: files and folders below the root; by default the folders that have the names of those with faults.
        options: more arguments of pytest, such as ``-k``.
        slowest: seconds of a test, without a fault; what takes longer is left out.
        limit: seconds for the tests of a fault; more where they took more than a fifth of it without one.
    """

    root: Path
    package: str
    tests: Sequence[str]
    options: Sequence[str]
    slowest: float
    limit: float


def pick(folder: Path, count: int, seed: int) -> list[Picked]:
    """Mutants of the files of a folder, each file and then each kind of fault alike.

    Args:
        folder: with Python files, those of its folders included.
        count: how many, fewer where there are not as many.
        seed: of the choice.
    """
    generator = random.Random(seed)
    left: dict[Path, list[Mutant]] = {}
    for path in sorted(folder.rglob("*.py")):
        left[path] = mutants_of(path.read_text(encoding="utf-8"))
    picked: list[Picked] = []
    while len(picked) < count and any(left.values()):
        path = generator.choice([path for path, mutants in left.items() if mutants])
        kind = generator.choice(sorted({mutant.operator for mutant in left[path]}))
        mutant = generator.choice([mutant for mutant in left[path] if mutant.operator == kind])
        left[path].remove(mutant)
        picked.append((path, mutant))
    return picked


def pick_again(outcomes: Sequence[dict[str, Any]], root: Path) -> list[Picked]:
    """The mutants of an earlier session that were not caught, wherever they stand by now."""
    picked: list[Picked] = []
    for outcome in outcomes:
        if outcome["result"] in {"survived", "not reached"}:
            path = root / outcome["file"]
            same = [
                mutant
                for mutant in mutants_of(path.read_text(encoding="utf-8"))
                if all(outcome[name] == getattr(mutant, name) for name in ("operator", "before", "after"))
            ]
            picked += [(path, mutant) for mutant in sorted(same, key=lambda m: abs(m.line - outcome["line"]))[:1]]
    return picked


def outermost(source: str, line: int) -> tuple[int, int] | None:
    """First and last line of the function or method around a line, its decorators included; None outside of one."""
    bodies = [ast.parse(source).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef):
                bodies.append(node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
                if first <= line <= (node.end_lineno or first):
                    return first, node.end_lineno or first
    return None


def callers(name: str, source: str, line: int, tests: dict[str, Any]) -> list[str]:
    """The tests that call the function around a line, those that call any of the file for a line outside; quick first.

    Args:
        name: of the file, below the package.
        source: its text.
        line: from 1.
        tests: by name, seconds and the places of the functions called.
    """
    first, last = outermost(source, line) or (1, sys.maxsize)
    chosen = {
        test: seconds
        for test, (seconds, places) in tests.items()
        if any(file == name and first <= place <= last for file, place in places)
    }
    return sorted(chosen, key=lambda test: (chosen[test], test))


def try_mutants(picked: Sequence[Picked], settings: Settings) -> list[Outcome]:
    """Run the tests of each mutant in a copy of the tree, which stays as it is.

    Args:
        picked: files and their mutants.
        settings: of the session.

    Raises:
        RuntimeError: if no test passes without a fault.
    """
    root, package = settings.root, settings.root / settings.package
    folders = sorted({f"tests/{path.relative_to(package).parts[0]}" for path, _ in picked})
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        copy, found = Path(folder).resolve() / "tree", Path(folder) / "found.json"
        shutil.copytree(root, copy, ignore=NOT_COPIED)
        arguments = [*(settings.tests or folders), *settings.options]
        watch = Watch(copy / settings.package, settings.slowest)
        _, watched = run_tests(copy, arguments, watch, float("inf"), found)
        if not watched.get("tests"):
            raise RuntimeError(
                f"expected tests that pass without a fault, received none of {arguments}. Remedy: mend them.\n"
                f"{found.with_suffix('.log').read_text(encoding='utf-8')}"
            )
        print(f"{len(watched['tests'])} tests; left out: {watched['slow']} are slow, {watched['failed']} fail\n")
        print("| result | place | kind | change |\n|---|---|---|---|", flush=True)
        for path, mutant in picked:
            below = path.relative_to(root)
            source = path.read_text(encoding="utf-8")
            tests = callers(str(path.relative_to(package)), source, mutant.line, watched["tests"])
            limit = max(settings.limit, SLOWER * sum(watched["tests"][test][0] for test in tests))
            (copy / below).write_text(mutant.source, encoding="utf-8")
            result, by = _result(copy, tests, settings.options, limit, found)
            (copy / below).write_text(source, encoding="utf-8")
            what = {key: value for key, value in dataclasses.asdict(mutant).items() if key != "source"}
            outcomes.append(Outcome(file=str(below), result=result, tests=len(tests), by=by, **what))
            print(_line(outcomes[-1]), flush=True)
    return outcomes


def _result(copy: Path, tests: Sequence[str], options: Sequence[str], limit: float, found: Path) -> tuple[str, str]:
    """What became of the mutant in the copy, and the test that failed."""
    if not tests:
        return "not reached", ""
    files = sorted({test.partition("::")[0] for test in tests})
    code, noted = run_tests(copy, ["-x", *files, *options], Only(tests), limit, found)
    if code is None:
        return "timed out", ""
    return ("survived" if code == 0 else "caught"), next(iter(noted.get("failed", [])), "")


def _line(outcome: Outcome) -> str:
    """A row of the table."""
    change = f"{outcome.before} -> {outcome.after}"
    return f"| {outcome.result} | {outcome.file}:{outcome.line} | {outcome.operator} | `{' '.join(change.split())}` |"


def _picked(given: argparse.Namespace, root: Path) -> Iterable[Picked]:
    if given.again is not None:
        yield from pick_again(json.loads(given.again.read_text(encoding="utf-8")), root)
    for name in given.folders:
        yield from pick(root / given.package / name, given.count, given.seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Choose mutants of each folder, try them, print a table and write the outcomes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help="folders of the package, such as functional")
    parser.add_argument("--count", type=int, default=8, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--again", type=Path, help="JSON file of an earlier session: those that were not caught")
    parser.add_argument("--tests", nargs="+", default=(), help="files and folders, instead of tests/ and the folder")
    parser.add_argument("--keyword", default="", help="of the tests, as pytest's -k; 'not compiled' is much quicker")
    parser.add_argument("--slowest", type=float, default=10.0, help="seconds of a test; slower ones are left out")
    parser.add_argument("--limit", type=float, default=30.0, help="least seconds for the tests of a mutant")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--root", type=Path, default=ROOT, help="tree that holds the package and tests/")
    parser.add_argument("--package", default="torchrl_perf", help="name of the package")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="modules to import once")
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    options = ["-k", given.keyword] if given.keyword else []
    preload(given.preload)
    settings = Settings(root, given.package, given.tests, options, given.slowest, given.limit)
    outcomes = try_mutants(list(_picked(given, root)), settings)
    counts = Counter(outcome.result for outcome in outcomes)
    print("\n" + ", ".join(f"{counts[name]} {name}" for name in RESULTS))
    if given.output is not None:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        given.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
