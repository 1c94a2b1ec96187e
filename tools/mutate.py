"""Put small faults into the package, one at a time, and see whether its tests notice.

``python tools/mutate.py functional replay --count 8 --seed 0 --output mutants.json`` takes eight faults in each of the
two folders. For each it runs the tests of the folder that name something of the file, in a copy of the tree. A fault
that survives is either one that changes nothing, or an assertion that is missing.
"""

import argparse
import ast
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutants import Mutant, mutants_of

__all__ = ["Outcome", "main", "pick", "tests_of", "try_mutants"]

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "results", "dist", "runs")
RESULTS = ("caught", "survived", "timed out", "untested")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        file: below the root.
        line: of the fault, from 1.
        operator: its kind.
        before: as it was.
        after: what stood there.
        result: ``"caught"``, ``"survived"``, ``"timed out"``, or ``"untested"`` where no test names the file.
        tests: files that were run.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    result: str
    tests: list[str]


def pick(folder: Path, count: int, seed: int) -> list[tuple[Path, Mutant]]:
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
    picked: list[tuple[Path, Mutant]] = []
    while len(picked) < count and any(left.values()):
        path = generator.choice([path for path, mutants in left.items() if mutants])
        kind = generator.choice(sorted({mutant.operator for mutant in left[path]}))
        mutant = generator.choice([mutant for mutant in left[path] if mutant.operator == kind])
        left[path].remove(mutant)
        picked.append((path, mutant))
    return picked


def tests_of(path: Path, root: Path, package: str) -> list[str]:
    """Test files of the same folder that use a public name of a file, or share a word of their name with it.

    Args:
        path: of the package.
        root: above package and tests.
        package: name of the package.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.ClassDef
    public = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    named = re.compile(rf"\b({'|'.join([*public, path.stem])})\b")
    words = {word for word in path.stem.split("_") if len(word) > 2}
    folder = root / "tests" / path.relative_to(root / package).parts[0]
    found = [
        test
        for test in sorted(folder.rglob("test_*.py"))
        if words & set(test.stem.split("_")) or named.search(test.read_text(encoding="utf-8"))
    ]
    return [str(test.relative_to(root)) for test in found]


def run_tests(root: Path, tests: Sequence[str], limit: float) -> str:
    """Run test files in a tree until the first one fails; ``"caught"``, ``"survived"`` or ``"timed out"``.

    Args:
        root: of the tree.
        tests: files below it.
        limit: seconds.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # compiled files are told apart by size and second alone, which two mutants may share
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return "timed out"
    return "survived" if done.returncode == 0 else "caught"


def try_mutants(picked: Sequence[tuple[Path, Mutant]], root: Path, package: str, limit: float) -> list[Outcome]:
    """Run the tests of each mutant in a copy of the tree, which stays as it is.

    Args:
        picked: files and their mutants.
        root: of the tree.
        package: name of the package.
        limit: seconds for the tests of a mutant.

    Raises:
        RuntimeError: if the tests of a file do not pass without a fault, within twice the limit.
    """
    outcomes: list[Outcome] = []
    sound: set[tuple[str, ...]] = {()}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=NOT_COPIED)
        for path, mutant in picked:
            name, tests = path.relative_to(root), tests_of(path, root, package)
            if tuple(tests) not in sound and (result := run_tests(copy, tests, 2 * limit)) != "survived":
                raise RuntimeError(
                    f"{name}: expected its tests to pass without a fault, received {result!r} of {tests}. Remedy: "
                    "mend them, or a larger --limit."
                )
            sound.add(tuple(tests))
            (copy / name).write_text(mutant.source, encoding="utf-8")
            result = run_tests(copy, tests, limit) if tests else "untested"
            shutil.copyfile(path, copy / name)
            what = {key: value for key, value in dataclasses.asdict(mutant).items() if key != "source"}
            outcomes.append(Outcome(file=str(name), result=result, tests=tests, **what))
            print(_line(outcomes[-1]), flush=True)
    return outcomes


def _line(outcome: Outcome) -> str:
    """A row of the table."""
    change = f"{outcome.before} -> {outcome.after}"
    return f"| {outcome.result} | {outcome.file}:{outcome.line} | {outcome.operator} | `{' '.join(change.split())}` |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Choose mutants of each folder, try them, print a table and write the outcomes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders of the package, such as functional")
    parser.add_argument("--count", type=int, default=8, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of a mutant")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--root", type=Path, default=ROOT, help="tree that holds the package and tests/")
    parser.add_argument("--package", default="torchrl_perf", help="name of the package")
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    print("| result | place | kind | change |\n|---|---|---|---|")
    picked = [chosen for name in given.folders for chosen in pick(root / given.package / name, given.count, given.seed)]
    outcomes = try_mutants(picked, root, given.package, given.limit)
    counts = Counter(outcome.result for outcome in outcomes)
    print("\n" + ", ".join(f"{counts[name]} {name}" for name in RESULTS))
    if given.output is not None:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        given.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
