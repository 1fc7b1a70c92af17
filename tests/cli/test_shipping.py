"""What a release consists of: packages, release notes, the image and the unit."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml
from tools.release_notes import notes_of

from shoal.cli.__main__ import main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, built from what git knows of this checkout."""
    folder = tmp_path_factory.mktemp("packages")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("this source is not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    # The backend itself: what `python -m build --no-isolation` calls, which is not installed with the tests.
    for what in ("build_sdist", "build_wheel"):
        code = f"from setuptools import build_meta; build_meta.{what}({str(folder)!r})"
        subprocess.run(
            [sys.executable, "-c", code], cwd=folder / "source", check=True, capture_output=True, timeout=200
        )
    return folder


@pytest.mark.timeout(300)
def test_wheel_has_exactly_the_source(packages: Path) -> None:
    [wheel] = packages.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [about] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")]
    source = packages / "source/src"
    assert names == {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()} - {
        path.relative_to(source).as_posix() for path in source.glob("*.egg-info/*")
    }
    assert f"Version: {PROJECT['version']}" in about
    assert "# shoal" in about, "the README is the description"


@pytest.mark.timeout(300)
def test_source_package_has_what_its_readme_links(packages: Path) -> None:
    [source] = packages.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    links = set(re.findall(r"\]\(([\w./-]+\.(?:md|py))\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {link for link in links if link.startswith(("docs/", "examples/"))} <= names
    assert not {name for name in names if name.startswith("tests")}


def test_each_dependency_has_its_reason() -> None:
    table = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    wanted = {re.split(r"[^\w.-]", claim, maxsplit=1)[0] for claim in PROJECT["dependencies"]}
    assert len(wanted) <= 10
    assert wanted == set(re.findall(r"^\| `([\w-]+)` \|", table.partition("Extras add")[0], re.MULTILINE))
    extras = table.partition("Extras add")[2]
    for extra, claims in PROJECT["optional-dependencies"].items():
        assert f"`{extra}`" in extras, f"docs/dependencies.md does not say what the extra {extra} is for"
        for claim in claims:
            name = re.split(r"[^\w.-]", claim, maxsplit=1)[0]
            assert f"`{name}`" in extras, f"docs/dependencies.md does not say what {name} is for"


def test_release_notes_are_those_of_one_version() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n- c\n\n## 0.2.0 (2030-01-02)\n\n### Added\n\n- b\n\n## 0.1.0\n\n- a\n"
    assert notes_of("0.2.0", changelog) == "### Added\n\n- b\n"
    assert notes_of("0.1.0", changelog) == "- a\n"
    with pytest.raises(ValueError, match=r"nothing about version 0\.3\.0, only about: Unreleased, 0\.2\.0"):
        notes_of("0.3.0", changelog)


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def commands() -> list[list[str]]:
    """What the image and the unit start, without the program itself."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    found = [[re.sub(r"\$\{\w+:-\}", "", word) for word in service["command"]] for service in services.values()]
    unit = (DEPLOY / "shoal-dht.service").read_text(encoding="utf-8")
    start = re.search(r"^ExecStart=\S+/shoal (.*)$", unit, re.MULTILINE)
    assert start is not None
    return [*found, [word for word in start[1].split() if not word.startswith("$")]]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_deployed_commands_exist(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command[0], "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(word in told for word in command if word.startswith("--"))


def test_containers_have_no_rights() -> None:
    assert re.search(r"^USER (?!0$|root$)\w+$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for service in yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"]
        assert not service.get("privileged")
