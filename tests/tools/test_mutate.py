"""The tool that puts faults into the package: which ones it makes of a toy file, and what becomes of them."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

TOY = '''"""A file that adds 1 to nothing here."""


def larger(a: int, b: int = 2) -> int:
    """The larger of two, and 1 more."""
    if a < 0:
        raise ValueError("expected 0 or more" + str(1 + 1))
    return max(a, b) + 1


class Toy:
    def __repr__(self):
        return "toy" * 2
'''


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("mutate")


def changes(tool, source):
    return [(mutant.operator, mutant.after) for mutant in tool.mutants_of(source)]


def test_mutants_of_a_toy(tool):
    assert sorted(changes(tool, TOY)) == sorted([
        *[("constant", "(3)"), ("constant", "(1)")],  # the default
        *[("comparison", "(a <= 0)"), ("constant", "(1)"), ("constant", "(-1)"), ("negation", "(not (a < 0))")],
        *[("arithmetic", "(max(a, b) - 1)"), ("extreme", "min(a, b)"), ("arguments", "max(b, a)")],
        *[("constant", "(2)"), ("constant", "(0)")],
    ])  # fmt: skip
    for mutant in tool.mutants_of(TOY):
        compile(mutant.source, "toy.py", "exec")
        assert mutant.source != TOY


@pytest.mark.parametrize(
    ("line", "kind", "after"),
    [
        ("y = x.detach()", "detach", "(x)"),
        ("y = torch.where(m, a, b)", "branch", "(a)"),
        ("x += y", "statement", "pass"),
        ("x.add_(y)", "statement", "pass"),
        ("y = x.sum(dim=-1)", "dim", "x.sum(dim=-1 - 1)"),
        ("y = a and b", "boolean", "(a or b)"),
        ("y = ~x", "negation", "(x)"),
        ("y = True", "constant", "(False)"),
        ("y = 'ü' + x.amax(-1)", "extreme", "x.amin(-1)"),
    ],
)
def test_every_kind_of_fault(tool, line, kind, after):
    assert (kind, after) in changes(tool, line)


SUMS = """CACHED = not None


def total(a, b):
    return a + b


def forgotten(a):
    return a - 1


def early():
    return not []
"""
TESTS = """import time

import pytest
from toys.small.sums import early, total

TWO = early()


@pytest.fixture(scope="module")
def three():
    return total(1, 2)


def test_total_is_a_number():
    assert isinstance(total(0, 0), int)
    assert TWO


def test_total(three):
    time.sleep(0.1)  # the other comes first
    assert three == 3
"""


@pytest.fixture
def toys(tmp_path):
    """A package of one file, its tests, and a test that fails and is no test of it."""
    (tmp_path / "toys" / "small").mkdir(parents=True)
    (tmp_path / "tests" / "small").mkdir(parents=True)
    (tmp_path / "toys" / "small" / "sums.py").write_text(SUMS)
    (tmp_path / "tests" / "small" / "test_adding.py").write_text(TESTS)
    (tmp_path / "tests" / "test_other.py").write_text("def test_other():\n    raise AssertionError\n")
    return tmp_path


def run_tool(root, *arguments):
    """The output of the tool in a process of its own, whose forks are no forks of this one, and what it wrote."""
    output = root / "found.json"
    given = ["--root", str(root), "--package", "toys", "--preload", "--output", str(output), *arguments]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it is the start of pytest that takes time
    command = [sys.executable, "-W", "ignore", str(TOOLS / "mutate.py"), *given]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done, json.loads(output.read_text()) if output.is_file() else []


def test_faults_meet_the_tests_that_call_their_function(toys):
    done, rows = run_tool(toys, "small")
    assert done.returncode == 0, done.stderr
    by_place = {(row["line"], row["operator"]): row for row in rows}
    assert {place: row["result"] for place, row in by_place.items()} == {
        (1, "negation"): "survived",
        (5, "arithmetic"): "caught",
        (9, "arithmetic"): "not reached",
        (9, "constant"): "not reached",
        (13, "negation"): "caught",
    }
    caught = by_place[5, "arithmetic"]
    assert (caught["file"], caught["tests"]) == ("toys/small/sums.py", 2)
    assert caught["by"] == "tests/small/test_adding.py::test_total"
    assert "2 caught, 1 survived, 0 timed out, 3 not reached" in done.stdout
    assert (toys / "toys" / "small" / "sums.py").read_text() == SUMS


def test_those_not_caught_are_tried_again(toys):
    _, rows = run_tool(toys, "small")
    earlier = toys / "earlier.json"
    earlier.write_text(json.dumps(rows))
    test = "from toys.small.sums import forgotten\n\n\ndef test_forgotten():\n    assert forgotten(3) == 2\n"
    (toys / "tests" / "small" / "test_forgotten.py").write_text(test)
    (toys / "toys" / "small" / "sums.py").write_text("\n" + SUMS)  # the lines have moved
    done, rows = run_tool(toys, "--again", str(earlier), "--tests", "tests/small/test_forgotten.py")
    assert done.returncode == 0, done.stderr
    results = sorted((row["line"], row["result"]) for row in rows)
    assert results == [(2, "survived"), (10, "caught"), (10, "caught"), (10, "caught")]


def test_a_fault_that_never_ends_is_ended(toys):
    (toys / "toys" / "small" / "sums.py").write_text("def ends():\n    while []:\n        pass\n")
    test = "from toys.small.sums import ends\n\n\ndef test_ends():\n    ends()\n"
    (toys / "tests" / "small" / "test_adding.py").write_text(test)
    done, rows = run_tool(toys, "small", "--limit", "4")
    assert [row["result"] for row in rows] == ["timed out"], done.stderr


def test_tests_that_fail_without_a_fault_are_left_out(toys):
    wrong = "from toys.small.sums import total\n\n\ndef test_wrong():\n    assert total(1, 1) == 3\n"
    (toys / "tests" / "small" / "test_adding.py").write_text(wrong)
    (toys / "tests" / "small" / "test_right.py").write_text(wrong.replace("wrong", "right").replace("3", "2"))
    done, rows = run_tool(toys, "small", "--tests", "tests/small")
    assert "1 tests; left out: [] are slow, ['tests/small/test_adding.py::test_wrong'] fail" in done.stdout
    assert {row["line"]: row["by"] for row in rows}[5] == "tests/small/test_right.py::test_right"
    done, rows = run_tool(toys, "small", "--tests", "tests/small/test_adding.py", "--output", str(toys / "none.json"))
    assert "RuntimeError: expected tests that pass without a fault, received none" in done.stderr
    assert "test_wrong" in done.stderr
    assert not (toys / "none.json").exists()


NESTED = """a = 1
class A:
    b = 2
    @staticmethod
    def c():
        def d():
            pass

def e(): pass
"""


@pytest.mark.parametrize(
    ("line", "lines"),
    [(1, None), (3, None), (4, (4, 7)), (6, (4, 7)), (7, (4, 7)), (9, (9, 9))],
)
def test_the_function_around_a_line(tool, line, lines):
    assert tool.outermost(NESTED, line) == lines
