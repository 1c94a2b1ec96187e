"""The house rules that can be read from the source: sizes, docstrings, host waits, where the runtime may be touched."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchrl_perf"
STUDIES = ROOT / "studies"
EXAMPLES = ROOT / "examples"
DOCUMENTED = (ROOT / "docs", STUDIES, EXAMPLES, ROOT / ".github")

MAX_FILE_LINES = 600  # far above the habit (160): a tight cap splits files in the wrong place
MAX_EXAMPLE_LINES = 250
MAX_DOCUMENT_LINES = 400
MAX_README_LINES = 120
MAX_BODY_LINES = 60  # without the docstring
MAX_FUNCTION_LINES = 70  # with it
MAX_PARAMETERS = 9
TORCHRL_SIGNATURES = {"vtrace_advantage_estimate"}
MAX_NESTING = 4

HOT_FOLDERS = {"functional", "collectors", "replay", "modules", "objectives", "transforms"}
HOST_WAITS = {"item", "cpu", "tolist", "nonzero", "argwhere", "unique", "numpy", "masked_select"}
RUNTIME_FOLDERS = {"runtime", "bench"}
RUNTIME_NAMES = {"CUDAGraph", "Stream", "synchronize", "make_graphed_callables", "perf_counter", "perf_counter_ns"}
RUNTIME_DOTTED = {
    "torch.compile",
    "torch.cuda.graph",
    "torch.cuda.stream",
    "time.monotonic",
    "time.monotonic_ns",
}
# Paths of one machine, index hosts and unfinished work have no place in what is shipped.
FORBIDDEN_WORDS = re.compile(r"/root/|/home/|/tmp/|--(extra-)?index-url|\bTODO\b|\bFIXME\b|\bXXX\b")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: Path) -> list[Path]:
    """Every Python file under the folders, those that do not exist left out."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def where(path: Path, node: ast.AST) -> str:
    """``file:line`` as an editor opens it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Give back the memory of all syntax trees with the last rule."""
    yield
    parse.cache_clear()


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method of a tree, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def dotted(node: ast.AST) -> str:
    """``torch.cuda.graph`` for the attribute chain of that name, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def docstring_lines(node: Function) -> int:
    """Number of lines of a function's docstring, 0 without one."""
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def nesting(node: ast.AST) -> int:
    """Depth of compound statements in a body; ``elif`` adds none, a nested function is counted for itself."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            continue
        is_block = isinstance(child, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match | ast.AsyncWith)
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (1 if is_block and not is_elif else 0))
    return deepest


def parameters(node: Function) -> int:
    """Number of named parameters, ``self`` and ``cls`` left out."""
    named = [*node.args.posonlyargs, *node.args.args]
    bound = 1 if named and named[0].arg in {"self", "cls"} else 0
    return len(named) + len(node.args.kwonlyargs) - bound


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[ast.stmt, str]]:
    """The public classes, functions and methods of a body that have no docstring."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        derived = {dotted(mark).rpartition(".")[2] for mark in node.decorator_list} & {"overload", "setter", "deleter"}
        if not derived and ast.get_docstring(node) is None:
            yield node, prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{prefix}{node.name}.")


def runtime_uses(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Places that compile, capture, make a stream, synchronise or read a clock."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in RUNTIME_DOTTED or node.attr in RUNTIME_NAMES:
                yield node, name or node.attr
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in RUNTIME_NAMES or f"{node.module}.{alias.name}" in RUNTIME_DOTTED:
                    yield node, f"{node.module}.{alias.name}"


def has_dictated_signature(node: Function) -> bool:
    """Whether the parameters are not the author's to choose: a Triton kernel, a custom operator, TorchRL's function."""
    if node.name in TORCHRL_SIGNATURES:
        return True
    marks = {dotted(mark.func if isinstance(mark, ast.Call) else mark) for mark in node.decorator_list}
    return any(mark.endswith(("triton.jit", "gluon.jit", ".register_fake", ".register_kernel")) for mark in marks)


def explains_its_length(path: Path, node: Function) -> bool:
    """Whether the line of the definition says why it has so many parameters: ``# noqa: PLR0913  <reason>``."""
    line = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1]
    return re.search(r"# noqa: [A-Z0-9, ]*PLR0913\S*\s+\S+", line) is not None


def method_calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Every call of an attribute, with the attribute's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func.attr


def is_false(node: ast.expr) -> bool:
    """Whether an expression is the literal False."""
    return isinstance(node, ast.Constant) and node.value is False


def report(rule: str, found: list[str]) -> None:
    """Fail with the rule and every place that breaks it."""
    assert not found, f"{rule}\n  " + "\n  ".join(found)


def test_file_length():
    limits = [(path, MAX_FILE_LINES) for path in python_files(PACKAGE, STUDIES, ROOT / "tests")]
    limits += [(path, MAX_EXAMPLE_LINES) for path in python_files(EXAMPLES)]
    limits += [(ROOT / "README.md", MAX_README_LINES)] if (ROOT / "README.md").exists() else []
    limits += [(path, MAX_DOCUMENT_LINES) for folder in DOCUMENTED for path in sorted(folder.rglob("*.md"))]
    found = []
    for path, limit in limits:
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > limit:
            found.append(f"{path.relative_to(ROOT)}: {count} lines, at most {limit}")
    report("a file is read in one sitting: split it", found)


def test_function_size():
    found = []
    for path in python_files(PACKAGE, STUDIES, EXAMPLES, ROOT / "tests"):
        for node in functions(parse(path)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            body = lines - docstring_lines(node)
            if body > MAX_BODY_LINES or lines > MAX_FUNCTION_LINES:
                found.append(f"{where(path, node)} {node.name}: {body} lines, {lines} with the docstring")
    report(f"a function has at most {MAX_BODY_LINES} lines, {MAX_FUNCTION_LINES} with its docstring", found)


def test_parameters_and_nesting():
    found = []
    for path in python_files(PACKAGE, STUDIES, EXAMPLES):
        for node in functions(parse(path)):
            count, depth = parameters(node), nesting(node)
            if count > MAX_PARAMETERS and not has_dictated_signature(node) and not explains_its_length(path, node):
                found.append(f"{where(path, node)} {node.name}: {count} parameters")
            if depth > MAX_NESTING:
                found.append(f"{where(path, node)} {node.name}: nested {depth} deep")
    report(
        f"at most {MAX_PARAMETERS} parameters (more with a reason beside them) and {MAX_NESTING} levels of nesting",
        found,
    )


def test_public_names_have_docstrings():
    found = []
    for path in python_files(PACKAGE, STUDIES, EXAMPLES):
        tree = parse(path)
        if tree.body and ast.get_docstring(tree) is None:
            found.append(f"{path.relative_to(ROOT)}: module")
        found += [f"{where(path, node)} {name}" for node, name in undocumented(tree.body)]
    report("every module and every public class, function and method has a docstring", found)


def test_no_host_wait_in_hot_folders():
    found = []
    for path in python_files(*(PACKAGE / folder for folder in sorted(HOT_FOLDERS))):
        found += [
            f"{where(path, call)} .{method}()" for call, method in method_calls(parse(path)) if method in HOST_WAITS
        ]
    report("a hot path never waits for the host: keep the value in a tensor, use masks and torch.where", found)


def test_runtime_is_the_only_home_of_graphs_streams_and_clocks():
    found = []
    for path in python_files(PACKAGE):
        if path.relative_to(PACKAGE).parts[0] not in RUNTIME_FOLDERS:
            found += [f"{where(path, node)} {name}" for node, name in runtime_uses(parse(path))]
    report("torch.compile, CUDA graphs, streams, synchronisation and clocks live in runtime/ and bench/", found)


def test_asynchronous_copies_are_made_in_runtime():
    found = []
    for path in python_files(PACKAGE):
        if path.relative_to(PACKAGE).parts[0] != "runtime":
            flags = (node for node in ast.walk(parse(path)) if isinstance(node, ast.keyword))
            found += [where(path, flag) for flag in flags if flag.arg == "non_blocking" and not is_false(flag.value)]
    report("an asynchronous copy needs an event that someone waits for: make it in runtime/", found)


FOLDERS = sorted({path.parent for path in python_files(PACKAGE)} - {PACKAGE})
SUBPACKAGES = [".".join(folder.relative_to(ROOT).parts) for folder in FOLDERS]


def test_every_folder_is_a_package():
    found = [str(folder.relative_to(ROOT)) for folder in FOLDERS if not (folder / "__init__.py").is_file()]
    report("a folder of modules has an __init__.py that lists its public names", found)


def test_modules_of_tests_have_names_of_their_own():
    """The folders of tests are no packages: of two modules of one name pytest imports one, and stops at the other."""
    seen: dict[str, list[str]] = {}
    for path in python_files(ROOT / "tests"):
        seen.setdefault(path.name, []).append(path.relative_to(ROOT).as_posix())
    report(
        "one module of each name below tests",
        [" and ".join(paths) for name, paths in seen.items() if len(paths) > 1 and name != "conftest.py"],
    )


@pytest.mark.parametrize("name", ["torchrl_perf", *SUBPACKAGES])
def test_all_is_true(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    assert exported is not None, f"{name} has no __all__: list its public names"
    assert len(exported) == len(set(exported)), f"{name}.__all__ lists a name twice: {sorted(exported)}"
    missing = [entry for entry in exported if not hasattr(module, entry)]
    assert not missing, f"{name}.__all__ lists {missing}, which the module does not have"

    imports = [node for node in parse(Path(module.__file__)).body if isinstance(node, ast.ImportFrom)]
    own = {
        alias.asname or alias.name
        for node in imports
        if node.level or (node.module or "").startswith("torchrl_perf")
        for alias in node.names
    }
    unlisted = sorted(entry for entry in own - set(exported) if not entry.startswith("_"))
    assert not unlisted, f"{name} imports {unlisted} without listing them in __all__"


def test_no_forbidden_words():
    paths = [*PACKAGE.rglob("*"), *EXAMPLES.rglob("*"), *(ROOT / "tests").rglob("*"), *(ROOT / ".github").rglob("*")]
    paths += [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    found = []
    for path in paths:
        if path.suffix not in TEXT_SUFFIXES or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            match = FORBIDDEN_WORDS.search(line)
            if match:
                found.append(f"{path.relative_to(ROOT)}:{number} {match.group()}")
    report("no path of one machine, no index host, no unfinished work", found)


PUBLIC_UNDERSCORES = {"_asdict", "_replace", "_fields", "_make", "_version"}  # of named tuples; writes into a tensor
TORCH = re.compile(r"torch\._foreach_\w+|torch\._C|torch\._dynamo|torch\._inductor|torch\._fused_adamw?_|sys\._\w+")
UPSTREAM = "runtime/upstream/"
"""The one folder that reads what TorchRL, tensordict, torch, VMAS and W&B give no public way to."""


def private(name: object) -> bool:
    """Whether a name, or the value of a constant, is a private one."""
    return isinstance(name, str) and bool(re.match(r"_[a-z]", name)) and name not in PUBLIC_UNDERSCORES


def reaches(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Private attributes of anything but ``self``, ``cls`` and ``super()``, and private names of other packages."""
    for node in ast.walk(tree):
        owner, names = None, []
        if isinstance(node, ast.Attribute):
            owner, names = node.value, [node.attr]
        elif isinstance(node, ast.Call) and dotted(node.func) in {"getattr", "hasattr", "setattr", "delattr"}:
            owner, names = node.args[0], [getattr(node.args[1], "value", None)]
        elif isinstance(node, ast.Subscript) and dotted(node.value).endswith(".__dict__"):
            owner, names = node.value.value, [getattr(node.slice, "value", None)]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torchrl_perf"):
            names = [alias.name for alias in node.names]
        whose = dotted(owner.func if isinstance(owner, ast.Call) else owner) if owner is not None else ""
        for name in filter(private, names):
            if whose not in {"self", "cls", "super"} and not TORCH.match(f"{whose}.{name}"):
                yield node, name


def test_no_file_reaches_into_anothers_privates():
    found = []
    for path in python_files(PACKAGE):
        if not path.relative_to(PACKAGE).as_posix().startswith(UPSTREAM):
            found += [f"{where(path, node)} .{attribute}" for node, attribute in reaches(parse(path))]
    report(
        f"give the class the method it lacks; where upstream lacks it, a function in {UPSTREAM} with a test in "
        "tests/runtime/test_upstream.py",
        found,
    )


def test_what_reads_upstreams_privates_is_tested():
    files = sorted((ROOT / "tests/runtime").glob("test_upstream*.py"))
    tested = "".join(path.read_text(encoding="utf-8") for path in files)
    found = []
    for path in python_files(PACKAGE / UPSTREAM):
        names = [node.name for node in parse(path).body if isinstance(node, Function)]
        found += [f"{path.stem}.{name}" for name in names if f"{path.stem}.{name}(" not in tested]
    report("call it in tests/runtime/test_upstream*.py: a release that changes what it reads has to fail there", found)


MAIN_WORDS = ("expected", "received", "Remedy:")  # of an error: what was right, what came instead, the way out
PASSED_ON = {
    # an error that repeats another's words, which have all of these, or that Python words
    "cli/resume.py": 1,
    "collectors/__init__.py": 1,
    "moved.py": 1,
    "runtime/waits/audit.py": 1,
    "trainers/algorithm_attributes.py": 1,
    "trainers/run/checkpoint.py": 1,
    "trainers/run/loop.py": 1,
    "trainers/run/state.py": 3,
}
"""Errors without the three words, by file; shorten it, and leave it as short."""


def text(node: ast.expr) -> str:
    """The literal parts of a string expression, "" for anything else; what is filled in is left out."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "Remedy:" if dotted(node.value) == "REMEDY" else ""  # a sentence that several errors end with
    return text(node.left) + text(node.right) if isinstance(node, ast.BinOp) else ""


def short_errors(tree: ast.Module) -> Iterator[tuple[ast.Raise, str]]:
    """Errors raised with a literal message that lacks one of the three words."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
            continue
        words = text(node.exc.args[0])
        lacking = [word for word in MAIN_WORDS if word.lower() not in words.lower()]
        completes = dotted(node.exc.func).startswith("self.")  # a method that makes the error of the word it is given
        if words and lacking and not completes:
            yield node, ", ".join(lacking)


def test_errors_say_expected_received_and_remedy():
    found, kept = [], {}
    for path in python_files(PACKAGE, EXAMPLES):
        errors = list(short_errors(parse(path)))
        name = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
        if len(errors) <= PASSED_ON.get(name, 0):
            kept |= {name: len(errors)} if errors else {}
        else:
            found += [f"{where(path, node)} lacks {words}" for node, words in errors]
    report('an error reads "<name>: expected ..., received .... Remedy: ..."', found)
    assert kept == PASSED_ON, "shorten PASSED_ON: a file there has fewer such errors"


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every docstring of a tree, private ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            words = ast.get_docstring(node)
            if words is not None:
                yield node, words


TYPED_ARGUMENT = re.compile(r"^ {4}\*{0,2}[a-z]\w* \([^)]*\): ", re.MULTILINE)
ONE_BACKTICK = re.compile(r"(?<![`:\w])`(?!`)[^`\n]+`(?!`)")
ONLY_A_REFERENCE = re.compile(r"(See|As|Like|Same as) [^.;,]+\.?")


def test_docstrings_say_something_in_one_dialect():
    found = []
    for path in python_files(PACKAGE, STUDIES, EXAMPLES, ROOT / "tests"):
        for node, words in docstrings(parse(path)):
            found += [f"{where(path, node)} {typed.strip()}" for typed in TYPED_ARGUMENT.findall(words)]
            found += [f"{where(path, node)} {code}" for code in ONE_BACKTICK.findall(words)]
            if ONLY_A_REFERENCE.fullmatch(" ".join(words.split())):
                found.append(f"{where(path, node)} {words!r}")
    report("no types in Args (annotations have them), double backticks, more than a cross-reference", found)


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_ruff():
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", "."]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command[2:])}:\n{result.stdout}{result.stderr}"


class TestTheRulesThemselves:
    """The checks above find what they are meant to find."""

    def test_nesting_counts_blocks_but_not_elif(self):
        code = "def f(x):\n    if x:\n        pass\n    elif not x:\n        for _ in x:\n            pass\n"
        assert nesting(ast.parse(code).body[0]) == 2

    def test_parameters_leave_self_out(self):
        assert parameters(ast.parse("def f(self, a, /, b, *args, c, **kw): ...").body[0]) == 3

    def test_runtime_uses_see_calls_and_imports(self):
        code = "from time import perf_counter\ntorch.compile(f)\nre.compile('x')\ntorch.cuda.graph(g)\n"
        names = sorted(name for _, name in runtime_uses(ast.parse(code)))
        assert names == ["time.perf_counter", "torch.compile", "torch.cuda.graph"]

    def test_undocumented_looks_into_public_classes_only(self):
        code = "class A:\n    '''.'''\n    def f(self): ...\n    def _g(self): ...\nclass _B:\n    def h(self): ...\n"
        assert [name for _, name in undocumented(ast.parse(code).body)] == ["A.f"]

    def test_reaches_leave_out_ones_own_and_torchs(self):
        code = "self._a\nself.b._c\nsuper()._d\nenv()._e\ntorch._C._f\nrow._asdict()\nx.__dict__\n"
        assert [name for _, name in reaches(ast.parse(code))] == ["_c", "_e"]

    def test_short_errors_are_those_that_lack_a_word(self):
        code = (
            "raise ValueError(f'{a}: expected 1, received {b}. Remedy: 1.')\n"
            "raise ValueError('Expected 1, ' 'received 2')\nraise KeyError('no ' + name)\n"
            "raise error\nraise make(1)\nraise self._late('step')\n"
        )
        assert [words for _, words in short_errors(ast.parse(code))] == ["Remedy:", "expected, received, Remedy:"]

    def test_the_patterns_of_docstrings(self):
        args = "One.\n\nArgs:\n    size (int, optional): cells.\n    shape: ``[N, T]`` (time last): cells.\n"
        assert [typed.strip() for typed in TYPED_ARGUMENT.findall(args)] == ["size (int, optional):"]
        assert ONE_BACKTICK.findall("``a``, :class:`B` and `c`") == ["`c`"]
        assert ONLY_A_REFERENCE.fullmatch("See :func:`f`.")
        assert not ONLY_A_REFERENCE.fullmatch("See :func:`f`; ``out`` is ``[B]``.")

    def test_reaches_see_names_in_quotes_and_in_imports(self):
        code = "getattr(x, '_a')\nhasattr(self, '_b')\nx.__dict__['_c']\nself.__dict__['_d']\nfrom torchrl import _e\n"
        code += "from torchrl_perf import _f\nx['_g']\n"
        assert {name for _, name in reaches(ast.parse(code))} == {"_a", "_c", "_e"}

    def test_docstring_is_not_counted_as_body(self):
        node = ast.parse("def f():\n    '''One.\n\n    Two.\n    '''\n    return 1\n").body[0]
        assert docstring_lines(node) == 4
