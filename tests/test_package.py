"""Installing and importing the package: a light import, types, one version, one test command."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from test_house_rules import PACKAGE, ROOT, SUBPACKAGES

import torchrl_perf
from torchrl_perf.runtime.doctor import software

# Imported where they are used: none of them may load with the package or any of its folders.
LAZY = ("wandb", "tyro", "triton", "matplotlib")
HEAVY = ("torch", "torchrl", "tensordict", "gymnasium", "numpy")

# What torch and TorchRL load by themselves (triton, beside a CUDA build) comes first, and is not this package's doing.
PROBE = """
import importlib, json, multiprocessing, random, sys, traceback, warnings
import torch, torch._dynamo, torchrl, torchrl.trainers

def state():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "warning filters": len(warnings.filters),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "Python random state": hash(random.getstate()),
        "torch random state": torch.get_rng_state().sum().item(),
    }

report = {}
for name in sys.argv[1:]:
    modules, before, error = set(sys.modules), state(), None
    try:
        importlib.import_module(name)
    except Exception:
        error = traceback.format_exc()
    after = state()
    report[name] = {
        "error": error,
        "loaded": sorted({module.partition(".")[0] for module in set(sys.modules) - modules}),
        "changed": [key for key in before if before[key] != after[key]],
    }
print(json.dumps(report))
"""


def run_python(code: str, *arguments: str) -> str:
    """Last line that a fresh interpreter prints, run from the root of the checkout."""
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def imports() -> dict[str, dict[str, Any]]:
    """For each subpackage, what importing it loads and which process-wide settings it changes (one interpreter)."""
    return json.loads(run_python(PROBE, *SUBPACKAGES))


def test_import_is_light():
    code = "import json, sys; old = set(sys.modules); import torchrl_perf; print(json.dumps([*set(sys.modules) - old]))"
    loaded = json.loads(run_python(code))
    assert not {name.partition(".")[0] for name in loaded} & {*LAZY, *HEAVY}
    assert [name for name in loaded if name.startswith("torchrl_perf.")] == ["torchrl_perf.moved"]


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_subpackages_import_without_side_effect(name, imports):
    found = imports[name]
    assert found["error"] is None, found["error"]
    loaded = sorted(set(found["loaded"]) & set(LAZY))
    assert not loaded, f"importing {name} loads {loaded}: import them where they are used"
    assert not found["changed"], f"importing {name} changes {found['changed']} of the whole process"


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()
    assert (Path(torchrl_perf.__file__).parent / "py.typed").is_file()


def test_version_is_the_top_entry_of_the_changelog():
    entries = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert entries[0] == torchrl_perf.__version__
    assert entries == sorted(entries, key=lambda entry: tuple(map(int, entry.split("."))), reverse=True)


def test_readme_holds_the_test_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- test-command -->\n```\w*\n(.+?)```\n<!-- /test-command -->", readme, re.DOTALL)
    assert block is not None, "README.md: fence the test command between <!-- test-command --> and its closing marker"
    commands = [part.strip() for part in block.group(1).split("&&")]
    assert commands == ["pip install -e '.[test]'", "pytest -q -n auto", "pytest -q -n auto -m slow"]


def test_the_first_command_leaves_to_the_second_what_is_slow():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert "-m 'not long and not slow'" in settings["addopts"]
    assert ".ci/run" in (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")


def test_each_minor_of_torch_that_the_package_takes_is_tested():
    """What one minor's compiler cannot trace is seen with that minor alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {needed.name: needed.specifier for needed in map(Requirement, project["dependencies"])}
    assert {name: str(bounds[name]) for name in software.RANGES} == {
        name: str(Requirement(name + text).specifier) for name, text in software.RANGES.items()
    }
    taken = [f"2.{minor}" for minor in range(100) if bounds["torch"].contains(f"2.{minor}.0")]
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["cpu"]["strategy"]["matrix"]
    runs = [*matrix["torch-version"], *(run["torch-version"] for run in matrix["include"])]
    assert sorted(run.removesuffix(".*") for run in runs) == taken
    assert f"PyTorch {taken[0]} to {taken[-1]}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_wheel_holds_the_package_alone():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["torchrl_perf"]}
    studied = [path for path in PACKAGE.rglob("*.py") if re.search(r"^(from|import) studies", path.read_text(), re.M)]
    assert not studied, "the package must not import the studies, which its wheel does not hold"
