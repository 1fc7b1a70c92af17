"""What the doctor finds, and how it is shown."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

WIDTH = 80
MAX_CHARACTERS = 1000
# Where texts begin, after the verdict and the name of the check.
INDENT = 23


class Verdict(str, Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    """What to do, if something is wrong."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was measured, for machines."""

    def lines(self) -> list[str]:
        """The finding as lines of a table."""
        head = f"  {self.verdict.value:<5} {self.check:<15}"
        texts = [*_wrap(self.text), *_wrap(self.fix and f"-> {self.fix}", hanging="   ")]
        return [f"{(head if not number else ''):<{INDENT}}{line}".rstrip() for number, line in enumerate(texts)]

    def as_dict(self) -> dict[str, Any]:
        """The finding for machines."""
        return {**asdict(self), "verdict": self.verdict.value.lower()}


def ok(check: str, text: str, **values: Any) -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, text, values=values)


def warn(check: str, text: str, fix: str, **values: Any) -> Finding:
    """It works, but not as it should."""
    return Finding(check, Verdict.WARN, text, fix, values)


def fail(check: str, text: str, fix: str, **values: Any) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAIL, text, fix, values)


def _wrap(text: str, hanging: str = "") -> list[str]:
    """Lines that fit; what other peers have told may hold anything, also codes that terminals obey."""
    lines: list[str] = []
    for paragraph in text[:MAX_CHARACTERS].split("\n"):
        paragraph = "".join(character if character.isprintable() else "?" for character in paragraph)
        lines += textwrap.wrap(
            paragraph, WIDTH - INDENT, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
        )
    return lines


def summary(findings: list[Finding]) -> str:
    """How it looks on the whole, in one line."""
    failures = sum(finding.verdict is Verdict.FAIL for finding in findings)
    warnings = sum(finding.verdict is Verdict.WARN for finding in findings)
    if not failures and not warnings:
        return "All is well."
    parts = [_count(failures, "problem")] * bool(failures) + [_count(warnings, "warning")] * bool(warnings)
    return f"{', '.join(parts)}: see the lines with an arrow."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
