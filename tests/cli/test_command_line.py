"""The command line as a whole: its help, its words, outputs that lack signs, and completion."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.__main__ import build_parser, main

README = Path(__file__).parents[2] / "README.md"
COMMANDS = ("demo", "dht", "doctor", "monitor", "archive", "revive", "token")


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def output_of(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "shoal", *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60, check=False)


def test_help_lists_commands_in_the_readme_s_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(COMMANDS)
    rows = [row for row in README.read_text(encoding="utf-8").splitlines() if row.startswith("| `shoal ")]
    assert re.findall(r"`shoal (\w+)", " ".join(row.split("|")[1] for row in rows)) == list(COMMANDS)


def test_addresses_have_one_name() -> None:
    words = set[str]()
    for parser in parsers(build_parser()):
        for action in parser._actions:
            if action.dest in ("addresses", "initial_peers", "host_maddrs", "announce_maddrs", "via"):
                words.add(str(action.metavar))
            elif action.metavar is not None:
                assert "ADDR" not in str(action.metavar), action
    assert words == {"ADDRESS"}


@pytest.mark.parametrize("command", ["dht", "doctor", "revive"])
def test_optional_arguments_are_shown_as_optional(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    if command == "revive":
        with pytest.raises(SystemExit):
            parser.parse_args(["revive"])
        assert capsys.readouterr().err.endswith("the following arguments are required: DIR\n")
        assert parser.parse_args(["revive", "archives"]).addresses == []
    else:
        assert parser.parse_args([command]).addresses == []


def test_monitor_asks_for_a_missing_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--run", "digits"]) == 1
    assert "give the address of at least one peer" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii:strict", "cp1252:strict"])
def test_help_where_the_output_lacks_signs(encoding: str) -> None:
    """In a process of its own: the encoding of an output is chosen when Python starts."""
    for command in ((), *((each,) for each in COMMANDS), ("token", "invite")):
        done = output_of(*command, "--help", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, b""), command
        assert done.stdout.decode(encoding.partition(":")[0])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locale")
def test_a_locale_without_any_signs() -> None:
    """As ``LANG=C`` was before Python chose UTF-8 for it, and is where that is turned off."""
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = output_of("doctor", "--help", **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"cuda:1, ...:" in done.stdout
    done = output_of("token", "show", "Schl\N{SNOWMAN}ssel", **environment)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_the_package_is_a_command(capfd: pytest.CaptureFixture[str]) -> None:
    done = output_of("--version")
    assert done.stdout.startswith(b"shoal ")
    assert output_of().returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="shells of Unix")
@pytest.mark.parametrize(("line", "expected"), [("shoal do", ["doctor"]), ("shoal token sh", ["show"])])
def test_a_shell_completes_words(line: str, expected: list[str], tmp_path: Path) -> None:
    """What ``register-python-argcomplete`` makes a shell do."""
    answer = tmp_path / "answer"
    answer.touch()
    output_of(
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_STDOUT_FILENAME=str(answer),
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
        _ARGCOMPLETE_IFS="\n",
    )
    assert [word.strip() for word in answer.read_text(encoding="utf-8").split("\n")] == expected


@pytest.mark.parametrize(
    ("line", "usage", "told"),
    [
        ("dht --intial-peers x", "usage: shoal dht", "--intial-peers. Did you mean --initial-peers?"),
        ("dht --intial-peers=x", "usage: shoal dht", "Did you mean --initial-peers?"),
        ("token new run --ouput x", "usage: shoal token new", "Did you mean --output?"),
        ("--verison", "usage: shoal [-h]", "Did you mean --version?"),
        ("dht --xyz", "usage: shoal dht", "unrecognized arguments: --xyz\n"),
        ("mointor", "usage: shoal [-h]", "there is no command 'mointor'. Did you mean monitor?"),
        ("token nwe", "usage: shoal token [-h]", "there is no command 'nwe'. Did you mean new?"),
        ("xyzzy", "usage: shoal [-h]", "there is no command 'xyzzy'. There are: demo, dht, "),
    ],
)
def test_mistyped_words_show_their_command_s_usage(
    line: str, usage: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(usage)
    assert told in text
