"""Where the time of CI went: ``python tools/durations.py .ci/kept .ci/kept-before``, which ``.ci/run`` runs this last.

The folders hold what ``tools/again.py`` kept of this run and of the one before. It prints the sum over the tests of
each stage and of each file. The stages themselves take less time, because tests run side by side.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

MOST_SHOWN = 25


def read(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each stage, and of each file of a stage."""
    stages: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for path in folder.glob("*.xml"):
        for case in ElementTree.parse(path).iter("testcase"):
            seconds = float(case.attrib["time"])
            stages[path.stem] += seconds
            files[f"{path.stem}: {_file_of(case.attrib['classname'])}"] += seconds
    return stages, files


def _file_of(name: str) -> str:
    """``tests.dht.test_dht`` or ``tests.dht.test_dht.TestClass`` is in ``tests/dht/test_dht.py``."""
    folders, _, rest = name.partition(".test_")
    return f"{folders}.test_{rest.partition('.')[0]}".replace(".", "/") + ".py" if rest else name


def table(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """The slowest, each with its seconds, and in parentheses how many more these are than before."""
    lines = []
    for name in sorted(now, key=now.__getitem__, reverse=True)[:MOST_SHOWN]:
        change = f"({now[name] - before[name]:+.1f})" if name in before else ""
        lines.append(f"{now[name]:8.1f} s {change:>9} {name}")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("say which folders: python tools/durations.py .ci/kept .ci/kept-before")
    for now, before in zip(*(read(Path(folder)) for folder in sys.argv[1:]), strict=True):
        print(*table(now, before), "", sep="\n")
