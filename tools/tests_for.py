"""Which tests hold a file of the source, by the tables at the top of the test folders.

``python tools/tests_for.py src/shoal/net/tcp/transport.py`` prints them; ``make test-for FILE=...`` runs them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "shoal", ROOT / "tests"
_ROW = re.compile(r"^\| `(?P<test>test_\w+\.py)` \|.*\|(?P<files>[^|]*)\|$", re.MULTILINE)


def read_tables() -> dict[str, set[str]]:
    """The files that each test is for, by its path: the former below ``src/shoal``, the latter below the root."""
    found: dict[str, set[str]] = {}
    for table in sorted(TESTS.rglob("README.md")):
        for row in _ROW.finditer(table.read_text(encoding="utf-8")):
            test = (table.parent / row["test"]).relative_to(ROOT).as_posix()
            found[test] = set(re.findall(r"`([\w/]+\.py)`", row["files"]))
    return found


def find_tests(path: Path) -> list[str]:
    """Tests of a file of the source, or of all files in a folder.

    Raises:
        ValueError: there is no such file, or no table names it.
    """
    wanted = path.resolve()
    if not wanted.is_relative_to(SOURCE) or not wanted.exists():
        raise ValueError(f"{path} is no file under src/shoal: say for example FILE=src/shoal/net/tcp/transport.py")
    tests = [
        test
        for test, files in read_tables().items()
        if any((SOURCE / file) == wanted or (SOURCE / file).is_relative_to(wanted) for file in files)
    ]
    if not tests:
        raise ValueError(f"no table of tests names {path}: whatever imports it is tested by `make test`")
    return tests


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("say which file: make test-for FILE=src/shoal/net/tcp/transport.py")
    try:
        print(*find_tests(Path(sys.argv[1])))
    except ValueError as e:
        sys.exit(str(e))
