"""Log lines that a user sees fit into two lines of a terminal, with typical values: nothing is cut.

What decoders say of foreign bytes is made harmless.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shoal
from shoal.base.logs import MOST_LINES, _in_few_lines

SOURCE = Path(shoal.__file__).parent
# What logs warnings and errors, and what keeps them seldom.
LOGGING = re.compile(r"(logger\.(warning|error|exception)|_warn_seldom|\bwarn_seldom|_warn_once|_tell_once|^warn)$")
# What stands for a value: a name as people give them and the end of an id, or a word of this length.
PEER, WORD, NUMBER = "gpu-4711 (…Cxkk9fQp)", "a dozen, or so", "12.5"
# Errors of what reads the bytes and texts of others, and what makes their words harmless.
DECODERS = re.compile(r"\b(msgspec|msgpack|UnicodeDecodeError|JSONDecodeError|UpnpActionError|UpnpError)\b")
HARMLESS = {"one_line", "quoted", "words_of", "harmless"}
PLACE = re.compile(r"%[-+.0-9]*[a-z]")


def typical(text: str) -> str:
    """A log line with typical values."""
    text = re.sub(r"\b(peer|donor|leader|newcomer) %s", rf"\1 {PEER}", text)
    return PLACE.sub(lambda found: WORD if found[0] in ("%s", "%r") else NUMBER, text)


def messages() -> Iterator[tuple[str, str]]:
    """Where a warning or an error is logged, and its text with places for values."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and LOGGING.search(ast.unparse(node.func)):
                # The text comes first, or after the peer that it is about.
                for argument in node.args[:2]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield f"{path.relative_to(SOURCE).as_posix()}:{argument.lineno}", argument.value
                        break


def repeated_words(handler: ast.ExceptHandler) -> Iterator[int]:
    """Lines where the text of a caught error becomes a part of another text as it is."""
    made_harmless = {
        id(inside)
        for node in ast.walk(handler)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in HARMLESS
        for inside in ast.walk(node)
    }
    for node in ast.walk(handler):
        is_text = isinstance(node, ast.FormattedValue) or (
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr")
        )
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == handler.name]
        if is_text and any(id(each) not in made_harmless for each in names) and "type(" not in ast.unparse(node):
            yield node.lineno


def test_what_decoders_say_is_made_harmless() -> None:
    """Their errors may repeat what a stranger has sent."""
    found, raw = 0, []
    for path in sorted(SOURCE.rglob("*.py")):
        for handler in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(handler, ast.ExceptHandler) and handler.type and DECODERS.search(ast.unparse(handler.type)):
                found += 1
                raw += [f"{path.relative_to(SOURCE).as_posix()}:{line}" for line in repeated_words(handler)]
    assert found > 10
    assert not raw, "use one_line(str(error)) or words_of(error)"


def test_there_are_many() -> None:
    assert len(dict(messages())) > 100


def test_warnings_fit_into_two_lines() -> None:
    cut = []
    for where, text in messages():
        lines = _in_few_lines(f"15:14:08 WARNING shoal: {typical(text)}")
        shown = " ".join(line.strip() for line in lines).replace(PEER, "").replace("base='…'", "")
        if len(lines) > MOST_LINES or "…" in shown:
            cut.append(f"{where}: {text}")
    assert cut == []


def test_whole_sentences_are_left_out_from_the_end() -> None:
    first, second, third = (f"{word} {'x' * 10} {'y' * 60}" for word in ("one", "two", "three"))
    assert " ".join(_in_few_lines(f"{first}. {second}")).replace("  ", "") == f"{first}. {second}"
    shown = " ".join(line.strip() for line in _in_few_lines(f"{first}. {second}. {third}. {third}"))
    assert shown == f"{first}. {second}. …"
    [*_, last] = lines = _in_few_lines("x " * 500 + ". What to do")
    assert len(lines) == MOST_LINES
    assert last.endswith(" …")
