"""The site has every page and every public name, and no link leads nowhere.

`make docs` builds it, with packages that the tests do without.
"""

from __future__ import annotations

import importlib
import inspect
import re
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal
from tests.documents.pages import PAGES, ROOT, name_of
from tests.interface import find
from tests.test_inherited_api import NAMES

DOCS = ROOT / "docs"
FROM_OUTSIDE = {"benchmark-programs.md", "changelog.md", "contributing.md", "deploy.md"}
"""Pages that are made of documents outside docs/, by tools/docs_site.py."""
ROOMS = (
    "archive",
    "averaging",
    "compression",
    "data",
    "dht",
    "errors",
    "lightning",
    "moe",
    "optim",
    "p2p",
    "stages",
    "testing",
)
LINKING = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "tests").rglob("README.md"))]


def pages_in(navigation: Any) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    else:
        for each in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from pages_in(each)


def test_the_navigation_has_every_page_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_in(navigation)) == sorted(
        FROM_OUTSIDE | {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    )


def documented() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def test_the_reference_has_every_public_name_once() -> None:
    paths = documented()
    assert len(paths) == len(set(paths)) > 100
    there = [find(path) for path in paths]
    modules = [each.__name__ for each in there if inspect.ismodule(each)]
    missing = []
    for module in (shoal, *(importlib.import_module(f"shoal.{room}") for room in ROOMS)):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            home = getattr(value, "__module__", "")
            plain = not (inspect.isclass(value) or inspect.isroutine(value))  # constants, and names of types
            if not plain and home not in modules and not any(value is each for each in there):
                missing.append(f"{module.__name__}.{name}")
    assert not missing, "add them to a page under docs/api"


def test_all_top_level_hivemind_names_exist() -> None:
    table = (DOCS / "coming-from.md").read_text(encoding="utf-8").partition("### Names")[2].partition("## From Dist")[0]
    told = set(re.findall(r"`(\w+)`", table))
    rooms = {"averaging", "compression", "dht", "moe", "optim", "p2p", "utils", "__version__"}
    new = {"BFloat16Compression", "Blockwise4BitQuantization"}
    assert set(NAMES["shoal"].split()) - rooms - new <= told
    for name in told - rooms:
        assert any(name in names.split() for names in NAMES.values()) or name in ("StepControl",), name


def slug_of(heading: str) -> str:
    """The anchor of a heading."""
    text = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower())
    return re.sub(r"[\s-]+", "-", text)


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in LINKING])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            missing.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(slug_of, headings):
                missing.append(target)
    assert not missing


PICTURES = sorted((DOCS / "pictures").iterdir())


@pytest.mark.parametrize("picture", [pytest.param(picture, id=picture.name) for picture in PICTURES])
def test_pictures_are_small_used_and_follow_dark_mode(picture: Path) -> None:
    assert picture.stat().st_size < 150_000
    assert any(f"pictures/{picture.name})" in page.read_text(encoding="utf-8") for page in PAGES)
    if picture.suffix == ".svg":
        text = picture.read_text(encoding="utf-8")
        root = xml.etree.ElementTree.fromstring(text)
        assert root.find("{http://www.w3.org/2000/svg}title") is not None, "for people who do not see it"
        assert "prefers-color-scheme: dark" in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it must load nothing"
