"""Stretches of lines that stand in more than one place of the package: a third copy is a function that is missing."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchrl_perf"
STRETCH = 6
"""Lines from which on equal stretches are told."""
MOST_COPIED = 16
"""Stretches that are left, each with a reason to be written out: a limit that may fall, and must not rise."""

NAME = re.compile(r'"\w+",')

Line = tuple[int, str]
Place = tuple[str, int]


def code_lines(text: str) -> list[Line]:
    """Number and normalised text of the lines that say something: no imports, blanks, comments, lone brackets.

    A name of a list on a line of its own is left out, too: two lists of the same names are no copied code.
    """
    found, within_import = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        bare = re.sub(r"\s+", " ", line.split("  #")[0].strip())
        starts_import = re.match(r"(from \S+ )?import ", bare) is not None
        if (starts_import and "(" in bare and ")" not in bare) or within_import:
            within_import = ")" not in bare
        elif not starts_import and not bare.startswith("#") and re.search(r"\w", bare) and not NAME.fullmatch(bare):
            found.append((number, bare))
    return found


def copied_stretches(texts: dict[str, str], stretch: int = STRETCH) -> list[tuple[int, Place, Place]]:
    """Equal stretches of different files, as long as they can be: lines, the first place and the second.

    Args:
        texts: source of each file, by name.
        stretch: least number of lines.
    """
    files = {name: code_lines(text) for name, text in texts.items()}
    seen: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in files.items():
        for start in range(len(lines) - stretch + 1):
            seen[tuple(line for _, line in lines[start : start + stretch])].append((name, start))
    found = []
    for places in seen.values():
        for i, (one, at) in enumerate(places):
            for other, begin in places[i + 1 :]:
                if one != other and not _goes_back(files, one, at, other, begin):
                    length = _length(files[one][at:], files[other][begin:])
                    found.append((length, (one, files[one][at][0]), (other, files[other][begin][0])))
    return sorted(found, reverse=True)


def _goes_back(files: dict[str, list[Line]], one: str, at: int, other: str, begin: int) -> bool:
    """Whether the lines before two places are equal as well, so that their stretch has been told."""
    return at > 0 and begin > 0 and files[one][at - 1][1] == files[other][begin - 1][1]


def _length(first: list[Line], second: list[Line]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a[1] != b[1]), min(len(first), len(second)))


def test_copied_stretches_do_not_grow_in_number():
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    found = copied_stretches(texts)
    told = [f"{length} lines: {a}:{at} and {b}:{begin}" for length, (a, at), (b, begin) in found]
    assert len(found) <= MOST_COPIED, "make one function of lines that are written twice:\n" + "\n".join(told)


def test_a_stretch_is_found_once_and_whole():
    body = [f"x{i} = {i}" for i in range(9)]
    texts = {"a": "\n".join(["import os", *body]), "b": "\n".join(["y = 1", "", "# why", *body[:8]]), "c": "z = 0"}
    assert copied_stretches(texts) == [(8, ("a", 2), ("b", 4))]


def test_layout_and_imports_are_no_copies():
    text = "from a import (\n    b,\n    c,\n    d,\n    e,\n    f,\n    g,\n)\n" + ")\n" * 8 + "\n" * 8
    assert copied_stretches({"a": text, "b": text}) == []


def test_comments_and_indentation_do_not_hide_a_copy():
    body = [f"x{i} = {i}" for i in range(6)]
    other = [f"    x{i}  =  {i}  # {i}" for i in range(6)]
    assert [length for length, *_ in copied_stretches({"a": "\n".join(body), "b": "\n".join(other)})] == [6]
