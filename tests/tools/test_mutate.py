"""The tool that puts faults into the package: which ones it makes of a toy file, and what becomes of them."""

import importlib
import json
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


def test_one_is_caught_and_one_survives(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it is the start of pytest that takes time
    (tmp_path / "toys" / "small").mkdir(parents=True)
    (tmp_path / "tests" / "small").mkdir(parents=True)
    (tmp_path / "toys" / "small" / "sums.py").write_text("def total(a, b):\n    return a + b\n\n\nunused = not None\n")
    test = "from toys.small.sums import total\n\n\ndef test_total():\n    assert total(1, 2) == 3\n"
    (tmp_path / "tests" / "small" / "test_adding.py").write_text(test)
    (tmp_path / "tests" / "small" / "test_other.py").write_text("def test_other():\n    raise AssertionError\n")
    output = tmp_path / "found.json"
    tool.main(["small", "--root", str(tmp_path), "--package", "toys", "--output", str(output)])
    rows = {row["operator"]: row for row in json.loads(output.read_text())}
    assert {kind: row["result"] for kind, row in rows.items()} == {"arithmetic": "caught", "negation": "survived"}
    assert rows["arithmetic"]["tests"] == ["tests/small/test_adding.py"]
    assert (rows["arithmetic"]["file"], rows["arithmetic"]["line"]) == ("toys/small/sums.py", 2)
    assert "1 caught, 1 survived, 0 timed out, 0 untested" in capsys.readouterr().out
