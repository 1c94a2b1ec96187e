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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and the processor's seconds that it took."""
    folder = tmp_path_factory.mktemp("site")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nRemedy: mkdocs build --strict, of the extra docs"
    return folder, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


@pytest.mark.slow
class TestBuilt:
    """``mkdocs build --strict``: a lost page, link or anchor, and a docstring that cannot be read, is an error."""

    def test_it_takes_less_than_90_s(self, site):
        assert site[1] < SECONDS

    def test_nothing_comes_from_another_host(self, site):
        pages = sorted(site[0].rglob("*.html"))
        assert len(pages) > 50
        assert {page.name: found for page in pages if (found := ASSET.findall(page.read_text(encoding="utf-8")))} == {}

    @pytest.mark.parametrize("package", PACKAGES)
    def test_every_public_name_is_in_the_reference(self, site, package):
        module = importlib.import_module(f"torchrl_perf.{package}")
        html = (site[0] / "reference" / f"{package}.html").read_text(encoding="utf-8")
        ids = set(re.findall(rf'id="torchrl_perf\.{package}\.([\w.]+)"', html))
        # a function whose module has the same name stands under both
        assert [name for name in module.__all__ if not ids & {name, f"{name}.{name}"}] == []

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_every_setting_of_an_algorithm_is_on_its_page_or_the_shared_one(self, site, name):
        page, kind = page_of(name), ALGORITHMS[name].load("config")
        pages = [site[0] / "algorithms" / f"{stem}.html" for stem in (page.stem, "settings")]
        html = "".join(each.read_text(encoding="utf-8") for each in pages)
        fields = [field.name for field in dataclasses.fields(kind)]
        assert [field for field in fields if f"<code>--{field.replace('_', '-')}</code>" not in html] == []

    def test_formulas_need_no_script(self, site):
        html = (site[0] / "algorithms" / "ppo.html").read_text(encoding="utf-8")
        assert html.count("<math") >= 2
        assert "$$" not in html
        assert "arithmatex" not in html

    def test_files_beside_the_documentation_are_there(self, site):
        assert (site[0] / "source" / "examples" / "ppo.py").is_file()
        assert (site[0] / "source" / "examples" / "index.html").is_file()
