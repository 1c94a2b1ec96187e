"""What the wheel holds, and what ``bench claims`` says where the package alone is installed."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_house_rules import PACKAGE, ROOT

from torchrl_perf.cli import main


def run(folder: Path, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m torchrl_perf`` with the package of one folder, run in another."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "torchrl_perf", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without a network."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_package_and_no_study(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == ours
    studies = [name for name in names if Path(name).parts[0] in {"studies", "tests", "examples", "docs"}]
    assert not studies


def test_an_installed_package_says_where_the_claims_are(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    found = run(tmp_path, site, "bench", "claims", "--quick")
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr == (
        f"bench claims: expected the folder studies/ beside the package, received none in {site}. Remedy: the "
        "studies are not part of the wheel; clone the repository, `pip install -e .` there and run it again.\n"
    )


def test_a_checkout_finds_its_claims_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "claims", "--help"])
    assert "--quick" in capsys.readouterr().out
