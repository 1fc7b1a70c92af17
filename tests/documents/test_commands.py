"""Commands that the documents show can be given as they stand: programs, options, packages, targets and files exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import tomllib

from shoal.cli.__main__ import build_parser, main
from shoal.cli.plan.command import percent
from tests.documents.pages import PAGES, ROOT, Block, blocks_of, inline_commands, name_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FOREIGN = {"cd", "conda", "export", "git", "journalctl", "systemctl"}
"""Commands of the system, whose words are not ours."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
WITHOUT_TORCH = {re.split("[>=; ]", claim)[0] for claim in PROJECT["dependencies"]} - {"torch", "numpy"}
"""What is needed for ``shoal dht`` alone."""
TARGETS = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_each_block_says_what_it_is() -> None:
    """What is Python is run by ``test_code.py``, what is for a shell is checked here, and text is no code."""
    unknown = [block.place for block in BLOCKS if block.language not in ("python", "sh", "text")]
    assert not unknown, "begin them with ```python, ```sh or ```text"
    assert len(BLOCKS) > 60


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in BLOCKS if b.language == "sh"])
def test_commands_can_be_given(block: Block) -> None:
    shown = {each.title for each in BLOCKS if each.title.endswith(".py")} | {"train.py"}
    for line in block.code.splitlines():
        for command in re.split(r"&&|;", re.sub(r"(^| )#.*", "", line)):
            check(shlex.split(command), shown)


def check(words: list[str], shown: set[str]) -> None:
    while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    if not words:
        return
    program, *rest = words
    program = program.rpartition("/")[2]
    if program == "shoal":
        build_parser().parse_args(rest)
    elif program == "uv":
        assert rest == ["venv"] or rest[0] == "pip", rest
        check(rest if rest[0] == "pip" else [], shown)
    elif words[:4] == ["pip", "install", "torch", "--index-url"]:
        assert len(words) == 5, "PyTorch for the CPU, and nothing else from there"
    elif program == "pip":
        assert rest[0] == "install"
        if not any(word.startswith(("shoal", ".")) for word in rest[1:]):  # "." is the folder of the source
            assert set(rest[1:]) == WITHOUT_TORCH, "this list is complete"
            return
        for package in rest[1:]:
            if package == "--no-deps":
                continue
            name, _, extras = package.partition("[")
            assert name in ("shoal", "."), package
            assert set(filter(None, extras.rstrip("]").split(","))) <= EXTRAS.keys(), package
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS
    elif program in ("python", "python3", "torchrun"):
        assert rest[0] == "-m" or rest[0] in shown or (ROOT / rest[0]).is_file(), rest
    elif program in ("docker", "cp"):
        named = [word for word in rest if word.startswith("deploy/")]
        assert named
        assert all((ROOT / word).is_file() for word in named)
    else:
        assert program in FOREIGN, f"tell tests/documents what may be said with {program}"


PLANS = [(a, b) for a, b in pairwise(BLOCKS) if a.code.startswith("shoal plan ") and b.language == "text"]


@pytest.mark.parametrize(("command", "shown"), [pytest.param(a, b, id=a.place) for a, b in PLANS])
def test_plans_are_what_the_command_prints(command: Block, shown: Block, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command.code)[1:]) == 0
    assert capsys.readouterr().out.startswith(shown.code)


def test_table_of_plans_is_what_the_command_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/which-one.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+[MB]) \|(.*) \|$", text, re.MULTILINE)
    lines = re.findall(r"(\d+) Mbit/s \|", text[: text.index(f"\n| {rows[0][0]} |")].rpartition("\n| parameters")[2])
    assert len(rows) * len(lines) >= 12
    for parameters, cells in rows:
        for line, cell in zip(lines, cells.split("|"), strict=True):
            assert main(f"plan --parameters {parameters} --peers 20 --uplink {line} --memory 24 --json".split()) == 0
            told = json.loads(capsys.readouterr().out)
            share = next(each["share"] for each in told["ways"] if each["name"] == told["recommended"])
            assert cell.strip() == f"{told['recommended']}: {percent(share)}"


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES if inline_commands(page)])
def test_options_of_commands_within_sentences_exist(page: Path) -> None:
    for command in inline_commands(page):
        parser, words = build_parser(), command.split()[1:]
        while words and (choices := subcommands(parser)):
            assert words[0] in choices or not words[0].isalpha() or words[0].isupper(), command
            if words[0] not in choices:
                break
            parser, words = choices[words[0]], words[1:]
        known = {option for action in parser._actions for option in action.option_strings}
        named = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert named <= known, command


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0].choices if found else {}
