"""The documents, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "deploy/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^ *```$', re.M | re.S
)
_INLINE = re.compile(r"(?<!`)`(?P<command>shoal [a-z][^`]*)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of code as a page shows it."""

    page: str
    """The page's path below the root."""
    line: int
    language: str
    title: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=name_of(page),
            line=text.count("\n", 0, match.start()) + 1,
            language=match["language"],
            title=match["title"] or "",
            code=re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
        )
        for match in _BLOCK.finditer(text)
    ]


def inline_commands(page: Path) -> list[str]:
    """Commands of shoal that stand within sentences."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(match["command"].split()) for match in _INLINE.finditer(text)]
