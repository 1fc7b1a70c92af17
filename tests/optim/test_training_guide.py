"""docs/training.md is true: it has every option, and shoal does log what it explains."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from shoal.optim import Optimizer

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "training.md").read_text()


def section(title: str) -> str:
    return GUIDE.split(f"## {title}\n")[1].split("\n## ")[0]


def logged() -> Iterator[str]:
    """Every text in the source that could be the message of a log line."""
    for path in (ROOT / "src" / "shoal").rglob("*.py"):
        yield from texts_in(compile(path.read_text(encoding="utf-8"), path, "exec"))


def texts_in(constant: object) -> Iterator[str]:
    """Of a constant of compiled code, at any depth."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType):
        constant = constant.co_consts
    if isinstance(constant, (tuple, frozenset)):
        for each in constant:
            yield from texts_in(each)


LINES = re.findall(r"^\| `(.+?)` \|", section("What the log says"), re.MULTILINE)


def test_there_are_lines():
    assert len(LINES) > 15


@pytest.fixture(scope="module")
def messages() -> set[str]:
    return set(logged())


@pytest.mark.parametrize("line", LINES)
def test_lines_are_logged(line, messages):
    parts = line.replace(" % ", " %% ").split("…")
    pattern = re.compile(r"%[+.\d]*\w".join(map(re.escape, parts)))
    assert any(pattern.match(message) for message in messages), f"no such log line: {line}"


def test_every_option_is_explained():
    explained = re.findall(r"^\| `(\w+)` \|", section("Options of `shoal.Optimizer`"), re.MULTILINE)
    options = [name for name in inspect.signature(Optimizer.__init__).parameters if name != "self"]
    assert sorted(explained) == sorted(options)
