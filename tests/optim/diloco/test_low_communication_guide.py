"""docs/low-communication.md is true: it has every option, and shoal does log what it explains."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import shoal

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "low-communication.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_option_is_explained():
    explained = re.findall(r"^\| `(\w+)` \|", section("Options of `shoal.DiLoCo`"), re.MULTILINE)
    options = [name for name in inspect.signature(shoal.DiLoCo.__init__).parameters if name != "self"]
    assert sorted(explained) == sorted(options)


def test_all_lines_are_logged_and_all_warnings_explained():
    explained = re.findall(r"^\| `([^`]+)` \|", section("What the log lines mean"), re.MULTILINE)
    assert len(explained) > 12
    files = (ROOT / "src" / "shoal" / "optim" / "diloco").glob("*.py")
    source = re.sub(r"\"\s+f?\"", "", "".join(path.read_text(encoding="utf-8") for path in files))
    for line in explained:
        parts = [re.escape(part) for part in re.split("…", line) if part.strip()]
        assert re.search(".{0,30}?".join(parts), source), line
    logged = re.findall(r"(?:logger\.warning|_warn_seldom)\(\s*\"([^\"%]{12,})", source)
    assert logged
    for line in logged:
        assert line.partition("(")[0].strip()[:40] in GUIDE.replace("…", "%d"), line
