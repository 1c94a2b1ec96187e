"""The documentation's site: it builds without a warning, has a page for each algorithm, and asks no other host."""

import dataclasses
import importlib
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_perf.bench.readme_agents import PAPER
from torchrl_perf.registry import ALGORITHMS
from torchrl_perf.trainers.config import RunConfig
from torchrl_perf.trainers.off_policy.config import OffPolicyConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SECONDS = 90
ASSET = re.compile(r"<(?:script|link|img|iframe|source|video)\b[^>]*?(?:src|href)=\"((?:https?:)?//[^\"]+)")
PACKAGES = sorted(page.stem for page in (DOCS / "reference").glob("*.md") if page.stem != "systems")


def page_of(algorithm: str) -> Path:
    return DOCS / "algorithms" / f"{algorithm.replace('-', '_')}.md"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_has_a_page_with_its_papers_and_its_own_settings(name):
    text, kind = page_of(name).read_text(encoding="utf-8"), ALGORITHMS[name].load("config")
    assert f"torchrl-perf train {name} --env {next(iter(ALGORITHMS[name].load('presets')))}" in text
    for paper in PAPER.findall(kind.__doc__ or ""):
        assert f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" in text
    base = OffPolicyConfig if issubclass(kind, OffPolicyConfig) else RunConfig
    places = [each.__module__.removeprefix("torchrl_perf.") + f".{each.__name__}" for each in (kind, base)]
    assert f"<!-- settings {places[0]} beyond {places[1]} -->" in text
    assert text.count("$$") >= 2
    assert "## Where it works\n\n| " in text


def test_no_page_is_left_without_an_algorithm():
    pages = {page.stem for page in (DOCS / "algorithms").glob("*.md")}
    assert pages == {page_of(name).stem for name in ALGORITHMS} | {"index", "settings"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_is_whole(tmp_path):
    """``mkdocs build --strict``: a lost page, link or anchor, and a docstring that cannot be read, is an error."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nRemedy: pip install -e '.[docs]', mkdocs build --strict"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < SECONDS
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    assert len(pages) > 50
    assert {name: found for name, html in pages.items() if (found := ASSET.findall(html))} == {}
    check_reference(pages)
    check_settings(pages)
    check_formulas(pages["algorithms/ppo.html"])
    assert (tmp_path / "source" / "examples" / "ppo.py").is_file()
    assert "source/examples/index.html" in pages


def check_reference(pages):
    """Every public name is there; a function whose module has the same name stands under both."""
    for package in PACKAGES:
        ids = set(re.findall(rf'id="torchrl_perf\.{package}\.([\w.]+)"', pages[f"reference/{package}.html"]))
        names = importlib.import_module(f"torchrl_perf.{package}").__all__
        assert [name for name in names if not ids & {name, f"{name}.{name}"}] == []


def check_settings(pages):
    """Every setting of an algorithm is on its page, or on that of the shared ones."""
    for name, entry in ALGORITHMS.items():
        html = pages[f"algorithms/{page_of(name).stem}.html"] + pages["algorithms/settings.html"]
        fields = [field.name.replace("_", "-") for field in dataclasses.fields(entry.load("config"))]
        assert [field for field in fields if f"<code>--{field}</code>" not in html] == [], name


def check_formulas(html):
    """They are MathML, which needs no script."""
    assert html.count("<math") >= 2
    assert "$$" not in html
    assert "arithmatex" not in html
