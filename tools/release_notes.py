"""Prints what the changelog says of one version: the text of its release.

python tools/release_notes.py            # of the version in pyproject.toml
python tools/release_notes.py 0.2.0
"""

import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]


def notes_of(version: str, changelog: str) -> str:
    """The lines below the heading of a version.

    Raises:
        ValueError: the changelog has nothing about this version.
    """
    sections = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)
    for heading, text in zip(sections[1::2], sections[2::2], strict=True):
        if heading.split()[0].strip("[]") == version:
            return text.strip() + "\n"
    known = ", ".join(heading for heading in sections[1::2])
    raise ValueError(f"CHANGELOG.md has nothing about version {version}, only about: {known}")


if __name__ == "__main__":
    chosen = sys.argv[1:] or [
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    ]
    try:
        print(notes_of(chosen[0], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")
    except ValueError as e:
        sys.exit(f"{e}. Give its section the heading: ## {chosen[0]}")
