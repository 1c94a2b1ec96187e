"""The table of faults names tests that exist."""

import re
from pathlib import Path

import pytest

TABLE = Path(__file__).parent.parent / "docs" / "faults.md"


@pytest.mark.skipif(not TABLE.is_file(), reason="no docs beside the tests")
def test_every_test_that_the_table_names_exists():
    named = set(re.findall(r"`((?:test_|Test)\w+|\w+\.py)`", TABLE.read_text()))
    files = list(Path(__file__).parent.rglob("*.py"))
    there = {file.name for file in files}
    for file in files:
        there |= set(re.findall(r"^\s*(?:def|class) ((?:test_|Test)\w+)", file.read_text(), re.MULTILINE))
    assert len(named) > 30
    assert sorted(named - there) == []
