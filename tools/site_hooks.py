"""What MkDocs does not do by itself: files outside of docs/, tables of settings, formulas without a script.

``mkdocs.yml`` names this file. Nothing here imports the package: settings are read from its source.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from site_docstrings import without_roles

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
ELSEWHERE = "source"
"""Folder of the site for files that stand outside of docs/."""
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
SETTINGS = re.compile(r"<!-- settings ([\w.]+)(?: beyond ([\w.]+))? -->")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def place_of(path: str) -> str:
    """Where a file of the repository is on the site, as MkDocs counts sources."""
    inside = path.startswith(f"{DOCS}/")
    return path.removeprefix(f"{DOCS}/") if inside else f"{ELSEWHERE}/{path}"


def repository_path(page: str) -> str:
    """The file of the repository behind a page of the site."""
    return page.removeprefix(f"{ELSEWHERE}/") if page.startswith(f"{ELSEWHERE}/") else f"{DOCS}/{page}"


def target_of(page: str, link: str) -> str | None:
    """The file of the repository that a link of a page leads to; None for other hosts and what does not exist.

    Args:
        page: path of the page's source below the repository.
        link: as the page has it.
    """
    if "://" in link or link.startswith("mailto:"):
        return None
    path = normpath(f"{PurePosixPath(page).parent}/{link}")
    return path if (ROOT / path).exists() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file that pages link to and that stands outside of docs/, and what those link to."""
    waiting = [repository_path(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for _, link, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = target_of(page, link)
            if path is None or path in seen or path.startswith(f"{DOCS}/") or not (ROOT / path).is_file():
                continue
            seen.add(path)
            is_page = path.endswith(".md")
            file = File.generated(config, place_of(path), abs_src_path=str(ROOT / path))
            file.inclusion = InclusionLevel.NOT_IN_NAV if is_page else InclusionLevel.INCLUDED
            files.append(file)
            if is_page:
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links of the site, and write tables of settings."""
    here = page.file.src_uri

    def relinked(found: re.Match[str]) -> str:
        path = target_of(repository_path(here), found[2])
        if path is None or (ROOT / path).is_dir():
            return found[0]
        return f"{found[1]}{relpath(place_of(path), PurePosixPath(here).parent.as_posix())}{found[3]}"

    return SETTINGS.sub(lambda found: settings_table(found[1], found[2]), LINK.sub(relinked, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML, which browsers draw by themselves."""
    return FORMULA.sub(lambda found: convert(_plain(found[3]), display="block" if found[2] == "[" else "inline"), html)


def _plain(text: str) -> str:
    """A formula without the escapes of HTML."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


_package: list[Any] = []


def settings_table(name: str, beyond: str | None = None) -> str:
    """Markdown: the settings of a dataclass, inherited ones included, with their defaults and docstrings.

    Args:
        name: of the class, below ``torchrl_perf``.
        beyond: a class whose settings are left out where they have the same default.
    """
    rows = settings_of(name)
    common = settings_of(beyond) if beyond else {}
    lines = [
        f"| `--{field.replace('_', '-')}` | `{default}` | {about} |"
        for field, (default, about) in rows.items()
        if field not in common or common[field][0] != default
    ]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *lines])


def settings_of(name: str) -> dict[str, tuple[str, str]]:
    """Default and docstring of each field of a dataclass, in the order of the source, the base's first."""
    if not _package:
        _package.append(griffe.load("torchrl_perf", search_paths=[ROOT], allow_inspection=False))
    kind = _package[0][name]
    found: dict[str, tuple[str, str]] = {}
    for each in [*reversed(kind.mro()), kind]:
        for field, member in each.members.items():
            if member.is_attribute and member.docstring and "ClassVar" not in str(member.annotation):
                about = " ".join(without_roles(member.docstring.value).split()).replace("``", "`")
                found[field] = str(member.value), about.replace("|", "\\|")
    return found
