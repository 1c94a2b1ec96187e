"""docs/architecture.md is true: imports go down the rows of its picture, and the paths that documents name exist."""

import ast
import importlib.util
import re
from collections.abc import Iterator

import pytest
from test_house_rules import PACKAGE, ROOT, parse, python_files

DRAWING = ROOT / "docs" / "pictures" / "architecture.py"
# (who imports, what): each is one name, and docs/architecture.md says which
UPWARD = {("modules/icem.py", "transforms"), ("runtime/doctor_host.py", "metrics")}
SISTERS = {"functional", "kernels"}
FILES = {path.stem for path in PACKAGE.glob("*.py")}

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "examples" / "README.md"]
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


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Parts of the package that a file imports, anywhere in it, as ``folder.module``, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "torchrl_perf":
            names = [f"torchrl_perf.{alias.name}" for alias in node.names]
        else:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.startswith("torchrl_perf."):
                yield name.removeprefix("torchrl_perf."), node.lineno


def climbs(own: str, other: str) -> bool:
    """Whether a folder that imports another one looks up or beside itself."""
    if own == other or other in FILES or other == "__version__" or {own, other} == SISTERS:
        return False
    return ROWS[other] <= ROWS[own]


def test_every_folder_is_in_the_picture():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert set(ROWS) == folders, f"{DRAWING.relative_to(ROOT)}: a row for {sorted(folders ^ set(ROWS))}"
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    unnamed = [folder for folder in sorted(folders) if f"| `{folder}/` |" not in page]
    assert not unnamed, f"docs/architecture.md: a line in the table for {unnamed}"


def test_imports_go_down():
    found = []
    for path in python_files(PACKAGE):
        place = path.relative_to(PACKAGE)
        if len(place.parts) == 1:
            continue
        for module, line in imported(parse(path)):
            other = module.partition(".")[0]
            if climbs(place.parts[0], other) and (place.as_posix(), other) not in UPWARD:
                found.append(f"{place}:{line} imports {other}")
    assert not found, "a folder imports from lower rows of docs/pictures/architecture.png alone:\n" + "\n".join(found)


def test_no_system_imports_another():
    found = []
    for path in python_files(PACKAGE / "systems"):
        place = path.relative_to(PACKAGE / "systems")
        for module, line in imported(parse(path)):
            folder, _, rest = module.partition(".")
            if folder == "systems" and len(place.parts) > 1 and rest.partition(".")[0] != place.parts[0]:
                found.append(f"{place}:{line} imports {module}")
    assert not found, f"what two systems need belongs to the library: {found}"


def test_climbing_is_seen():
    assert climbs("metrics", "envs") and climbs("trainers", "systems") and climbs("modules", "replay")
    assert not climbs("systems", "trainers") and not climbs("functional", "kernels") and not climbs("bench", "registry")
    tree = ast.parse("def f():\n    from torchrl_perf import envs\n    import torchrl_perf.systems.marine\n")
    assert list(imported(tree)) == [("envs", 2), ("systems.marine", 3)]


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
