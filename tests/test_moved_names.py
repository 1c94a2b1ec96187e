"""Names that moved to another package are found where they were, with a warning that says the new place."""

import importlib
import subprocess
import sys

import pytest

from torchrl_perf import moved

NAMES = [
    (package, name, home) for package, homes in moved._NAMES.items() for home, names in homes.items() for name in names
]
MODULES = [(package, name, home) for package, modules in moved._MODULES.items() for name, home in modules.items()]


@pytest.mark.parametrize(("package", "name", "home"), NAMES)
def test_old_name(package, name, home):
    new = getattr(importlib.import_module(f"torchrl_perf.{home}"), name)
    with pytest.warns(DeprecationWarning, match=f"has moved. Remedy: from torchrl_perf.{home} import {name}"):
        assert getattr(importlib.import_module(f"torchrl_perf.{package}"), name) is new


@pytest.mark.parametrize(
    ("package", "name", "home", "now"),
    [(package, name, *new) for package, names in moved._RENAMED.items() for name, new in names.items()],
)
def test_old_name_of_what_is_called_otherwise_now(package, name, home, now):
    new = getattr(importlib.import_module(f"torchrl_perf.{home}"), now)
    with pytest.warns(DeprecationWarning, match=f"{name} has moved. Remedy: from torchrl_perf.{home} import {now}"):
        assert getattr(importlib.import_module(f"torchrl_perf.{package}"), name) is new


@pytest.mark.parametrize(("package", "name", "home"), MODULES)
def test_old_module(package, name, home):
    new = importlib.import_module(f"torchrl_perf.{home}")
    with pytest.warns(DeprecationWarning, match=f"has moved. Remedy: import torchrl_perf.{home}"):
        assert getattr(importlib.import_module(f"torchrl_perf.{package}"), name) is new


@pytest.mark.parametrize("package", moved._NAMES)
def test_unknown_name(package):
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = importlib.import_module(f"torchrl_perf.{package}").nothing


def test_no_system_is_imported_by_the_library():
    code = (
        "import sys\n"
        "import torchrl_perf.cli.train, torchrl_perf.collectors, torchrl_perf.metrics, torchrl_perf.modules\n"
        "import torchrl_perf.objectives, torchrl_perf.replay, torchrl_perf.trainers, torchrl_perf.transforms\n"
        "print([name for name in sys.modules if name.startswith('torchrl_perf.systems')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
