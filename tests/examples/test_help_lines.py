"""Every setting of every example has its help line below it."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_setting_has_a_help_line(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for config in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config"):
        body = [*config.body, None]
        fields = [(one, below) for one, below in pairwise(body) if isinstance(one, ast.AnnAssign)]
        assert fields
        for field, below in fields:
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            assert is_text and str(below.value.value).strip(), f"{ast.unparse(field.target)} has no help line"
