"""Signs such as "…" for outputs that have none but ASCII, such as ``LANG=C`` or a console of Windows.

Importing this module registers :data:`PLAIN` as a way to handle what an encoding lacks, beside Python's ``"replace"``.
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
    """A text in ASCII. Letters become question marks: a similar letter would make another name or path of it."""
    return "".join(sign if sign.isascii() else _PLAIN_SIGNS.get(sign, "?") for sign in text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _replace)


def as_far_as(encoding: str | None, text: str) -> str:
    """A text in which signs that an encoding lacks are plain; an unknown encoding is taken to have them all."""
    return text if encoding is None else text.encode(encoding, PLAIN).decode(encoding)


def make_output_plain() -> None:
    """From now on, the standard outputs of this process show plain signs where their encodings lack others."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
