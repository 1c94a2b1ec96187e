"""examples/README.md lists every example once, with the command that runs it."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROW = re.compile(r"^\| \[`(\w+\.py)`\]\((\w+\.py)\) \| (.+) \| `(.+)` \|$", re.MULTILINE)


def test_every_example_is_listed_once_with_its_command():
    rows = ROW.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
    listed = [name for name, *_ in rows]
    there = sorted(path.name for path in EXAMPLES.glob("*.py"))
    missing = sorted(set(there) - set(listed))
    assert sorted(listed) == there, f"examples/README.md: expected a row for each example; missing {missing}"
    for name, link, about, command in rows:
        assert link == name
        assert about.strip()
        assert command.split()[:2] == ["python", f"examples/{name}"]


def test_options_of_the_commands_exist():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name, _, _, command in ROW.findall(text):
        source = (EXAMPLES / name).read_text(encoding="utf-8")
        for option in re.findall(r"--(\w[\w-]*)", command):
            field = option.replace("-", "_")
            assert re.search(rf"^    {field}: ", source, re.MULTILINE), f"{name} has no setting {field}"


SHORT = re.compile(r"^\| `python examples/(\w+\.py)(.*?)` \| (.+) \|$", re.MULTILINE)


def test_every_example_has_a_short_command_for_a_cpu():
    found = SHORT.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(name for name, *_ in found) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    for name, options, last in found:
        source = (EXAMPLES / name).read_text(encoding="utf-8")
        for option in re.findall(r"--(?:no-)?(\w[\w-]*)", options):
            field = option.replace("-", "_")
            assert re.search(rf"\b{field}: ", source), f"{name} has no setting {field}"
        assert last.strip()
