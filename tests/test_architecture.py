"""docs/architecture.md is true: imports go down the rows of its picture, and the paths that documents name exist."""

import importlib.util
import re

import pytest
from test_house_rules import PACKAGE, ROOT
from test_layers import LAYERS, all_imports

DRAWING = ROOT / "docs" / "pictures" / "architecture.py"
FILES = {path.stem for path in PACKAGE.glob("*.py")}

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "examples" / "README.md"]
PAGES += [ROOT / ".github" / "CONTRIBUTING.md", ROOT / "studies" / "README.md"]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`([\w./-]+)`")
MODULE = re.compile(r"torchrl_perf((?:\.[a-z_]\w*)+)")


def load_drawing():
    spec = importlib.util.spec_from_file_location("architecture_picture", DRAWING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = {folder: number for number, (_, folders) in enumerate(load_drawing().LAYERS) for folder in folders}


def test_every_folder_is_in_the_picture():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert set(ROWS) == folders, f"{DRAWING.relative_to(ROOT)}: a row for {sorted(folders ^ set(ROWS))}"
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    unnamed = [folder for folder in sorted(folders) if f"| `{folder}/` |" not in page]
    assert not unnamed, f"docs/architecture.md: a line in the table for {unnamed}"


def test_the_picture_has_the_layers_that_imports_keep_to():
    drawn = [set(folders) for _, folders in load_drawing().LAYERS]
    assert drawn[::-1] == [set(layer) for layer in LAYERS], f"{DRAWING.relative_to(ROOT)}, or LAYERS in test_layers.py"


def test_no_system_imports_another():
    systems = [each for each in all_imports() if each.importer.startswith("torchrl_perf.systems.")]
    found = [
        str(each)
        for each in systems
        if each.imported.startswith("torchrl_perf.systems.")
        and each.importer.split(".")[2] != each.imported.split(".")[2]
    ]
    assert systems
    assert not found, f"what two systems need belongs to the library: {found}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_of_a_document_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    roots = (ROOT, PACKAGE, page.parent, ROOT / "examples", ROOT / "docs")
    for name in CODE.findall(text):
        is_path = re.search(r"\.(py|md|png|json|csv)$", name) or (name.endswith("/") and "/" in name[:-1])
        if "/" in name and is_path and "NAME" not in name and not any((root / name).exists() for root in roots):
            missing.append(name)
    missing += [f"torchrl_perf{name}" for name in MODULE.findall(text) if not exists(name[1:].split("."))]
    assert not missing, f"expected paths that exist, received {missing}. Remedy: where they are now"


def exists(parts: list[str]) -> bool:
    """Whether a dotted name begins with a module of the package, and ends with it or with a name in its source."""
    place = PACKAGE
    for number, part in enumerate(parts):
        if (place / part).is_dir():
            place = place / part
            continue
        if (place / f"{part}.py").is_file():
            source, rest = (place / f"{part}.py"), parts[number + 1 :]
        else:
            source, rest = place / "__init__.py", parts[number:]
        words = source.read_text(encoding="utf-8")
        return all(re.search(rf"\b{name}\b", words) for name in rest)
    return True
