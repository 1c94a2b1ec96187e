"""Names that moved to another package are found where they were, with a warning that says the new place."""

import importlib
import subprocess
import sys

import pytest

from torchrl_perf import moved

NAMES = [
    (package, name, home) for package, homes in moved._NAMES.items() for home, names in homes.items() for name in names
]


@pytest.mark.parametrize(("package", "name", "home"), NAMES)
def test_old_name(package, name, home):
    new = getattr(importlib.import_module(f"torchrl_perf.{home}"), name)
    with pytest.warns(DeprecationWarning, match=f"has moved. Remedy: from torchrl_perf.{home} import {name}"):
        assert getattr(importlib.import_module(f"torchrl_perf.{package}"), name) is new


def test_old_modules():
    """In a process of its own: nothing but the table has imported them."""
    code = (
        "import importlib, sys, warnings\n"
        "import torchrl_perf\n"
        "from torchrl_perf import moved\n"
        "for old, new in moved._MODULES.items():\n"
        "    expected = importlib.import_module(f'torchrl_perf.{new}')\n"
        "    with warnings.catch_warnings(record=True) as seen:\n"
        "        warnings.simplefilter('always')\n"
        "        found = importlib.import_module(f'torchrl_perf.{old}')\n"
        "    assert found is expected, (old, found)\n"
        "    assert expected.__spec__.name == expected.__name__ == f'torchrl_perf.{new}'\n"
        "    remedies = [str(each.message) for each in seen if each.category is DeprecationWarning]\n"
        "    assert f'torchrl_perf.{old} has moved. Remedy: import torchrl_perf.{new}.' in remedies, (old, remedies)\n"
        "from torchrl_perf.runtime.audit import no_host_sync\n"
        "from torchrl_perf.trainers import marine\n"
        "assert marine.__name__ == 'torchrl_perf.systems.marine.trainer'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("old", moved._MODULES)
def test_an_old_module_takes_the_place_of_no_name(old):
    """Importing a module sets it as an attribute of its package, whatever was there."""
    package, _, name = old.rpartition(".")
    assert name not in importlib.import_module(f"torchrl_perf.{package}").__all__


def test_a_module_that_never_was():
    with pytest.raises(ModuleNotFoundError, match=r"torchrl_perf\.trainers\.nothing"):
        importlib.import_module("torchrl_perf.trainers.nothing")


@pytest.mark.parametrize(
    ("package", "name", "home", "now"),
    [(package, name, *new) for package, names in moved._RENAMED.items() for name, new in names.items()],
)
def test_old_name_of_what_is_called_otherwise_now(package, name, home, now):
    new = getattr(importlib.import_module(f"torchrl_perf.{home}"), now)
    with pytest.warns(DeprecationWarning, match=f"{name} has moved. Remedy: from torchrl_perf.{home} import {now}"):
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
