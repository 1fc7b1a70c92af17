"""What pyproject.toml claims is tested: its lower bounds are the versions that the Makefile installs for tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib

pytestmark = pytest.mark.oldest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IN_OTHER_FILES = {
    "lightning": "requirements-lightning-oldest.txt",
    "pytorch-lightning": "requirements-lightning-oldest.txt",
    "transformers": "requirements-transformers-oldest.txt",
}
"""For all but these extras: ``requirements-oldest.txt``."""
NOT_INSTALLED = ("wandb",)
"""Extras of which no version is installed for tests: they are large, and need a server to do anything."""


def pins(file: str) -> dict[str, str]:
    """Versions by package."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / file).read_text(), re.MULTILINE))


def claims() -> list[tuple[str, str]]:
    """Each requirement, with the file that has its lower bound."""
    found = [(claim, "requirements-oldest.txt") for claim in PROJECT["dependencies"]]
    for extra, wanted in PROJECT["optional-dependencies"].items():
        if extra in NOT_INSTALLED:
            continue
        found += [(claim, IN_OTHER_FILES.get(extra, "requirements-oldest.txt")) for claim in wanted]
    return found


@pytest.mark.parametrize(("claim", "file"), claims())
def test_the_lowest_version_is_tested(claim, file):
    bound = re.match(r"([\w.-]+)>=([\d.]+)", claim)
    assert bound is not None, "a requirement tells its lowest version first"
    name, version = bound.groups()
    assert pins(file)[name] == version


def test_tests_are_run_with_the_same_tools():
    oldest, newest = pins("requirements-oldest.txt"), pins("requirements-dev.txt")
    for tool in ("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "setuptools"):
        assert oldest[tool] == newest[tool]
