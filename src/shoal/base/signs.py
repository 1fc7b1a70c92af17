"""Replacements for characters such as "…" on outputs that lack them, as with ``LANG=C`` or on a Windows console.

Importing this module registers :data:`PLAIN` as an error handler for encoding, beside Python's ``"replace"``.
"""

from __future__ import annotations

import codecs
import sys
from io import TextIOWrapper

PLAIN = "shoal.plain"

_PLAIN_SIGNS = {
    **{"…": "...", "–": "-", "—": "-", "‑": "-", "·": "-", "•": "*", "×": "x", "±": "+-", "≤": "<=", "≥": ">="},
    **{"→": "->", "←": "<-", "►": ">", "◄": "<", "▲": "^", "▼": "v", "“": '"', "”": '"', "„": '"', "’": "'"},
    **dict.fromkeys("─━╌═", "-"),
    **dict.fromkeys("│┃║", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰╷╵╶╴╸╺┏┓┗┛┡┩╇╈", "+"),
}


def plain(text: str) -> str:
    """A text in ASCII. Letters become question marks: a similar letter would turn it into another name or path."""
    return "".join(sign if sign.isascii() else _PLAIN_SIGNS.get(sign, "?") for sign in text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _replace)


def as_far_as(encoding: str | None, text: str) -> str:
    """A text without the characters that an encoding lacks; an unknown encoding is assumed to have all."""
    return text if encoding is None else text.encode(encoding, PLAIN).decode(encoding)


def make_output_plain() -> None:
    """From now on, show plain characters on the standard outputs of this process where their encodings lack others."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
