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
from tests.drills import mostly_drills

README = Path(__file__).parents[2] / "README.md"
COMMANDS = ("demo", "plan", "dht", "doctor", "monitor", "archive", "revive", "server", "token")


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


PLAN = ["plan", "--parameters", "7e9", "--peers", "20", "--uplink", "50", "--memory", "16"]
ARCHIVE, WATCH = ["archive", "ADDRESS", "x", "--run", "r"], ["monitor", "ADDRESS", "--run", "r"]
VALUES = [
    ([*ARCHIVE, "--every"], {"90s": 90, "10m": 600, "2h": 7200, "1.5": 1.5, "1d": 86400}),
    ([*ARCHIVE, "--rate"], {"5M": 5e6}),
    (["dht", "--relay-rate"], {"5M": 5e6, "800k": 8e5, "1.5g": 1.5e9, "1000": 1000.0}),
    ([*PLAN, "--parameters"], {"7e9": 7e9, "7B": 7e9, "350m": 3.5e8, "1.5T": 1.5e12, "80k": 8e4}),
]
REFUSED = [
    ([*ARCHIVE, "--every"], "a time such as 90s, 10m or 2h", ["soon", "0s"]),
    ([*ARCHIVE, "--keep"], "a number from 1 on", ["0", "many"]),
    ([*ARCHIVE, "--rate"], "bytes per second, such as 5M or 800k", ["fast"]),
    (["dht", "--relay-rate"], "bytes per second, such as 5M or 800k", ["0", "-1", "inf", "nan", "M", "5 parsecs"]),
    (["dht", "--refresh-period"], "a positive number of seconds", ["0", "soon"]),
    (["token", "invite", "--days"], "a number of days up to 3650", ["0", "-1", "nan", "inf", "4000", "ten"]),
    (["monitor", "ADDRESS", "--run"], "the run_id of the optimizers, which has no dots", ["my.run"]),
    ([*WATCH, "--web"], "the number of a port, from 0 to 65535", ["x", "-1", "70000"]),
    ([*PLAN, "--parameters"], "a number of parameters, such as 7e9 or 350M", ["0", "-1", "nan", "1e15", "B", "many"]),
    ([*PLAN, "--peers"], "a number from 2 on", ["1", "0", "-3", "2.5", "all"]),
    ([*PLAN, "--uplink"], "megabits per second, such as 50", ["0", "-1", "inf", "nan", "fast"]),
    ([*PLAN, "--memory"], "gigabytes, such as 16", ["0", "inf", "16GB"]),
    ([*PLAN, "--activation-bits"], "32, 16, 8 or 4", ["2", "8.5", "many"]),
    ([*PLAN, "--round-trip"], "milliseconds, such as 60", ["-1", "inf", "far"]),
    ([*WATCH, "--goal-epochs"], "the number of an epoch, from 1", ["0", "-3", "ten"]),
]


def test_values_of_options() -> None:
    for words, values in VALUES:
        for text, expected in values.items():
            parsed = vars(build_parser().parse_args([*words, text]))
            assert parsed[words[-1].strip("-").replace("-", "_")] == expected


@pytest.mark.parametrize(("words", "what", "texts"), REFUSED, ids=[" ".join((w[0], w[-1])) for w, _, _ in REFUSED])
def test_unusable_values_are_refused(
    words: list[str], what: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for text in texts:
        with pytest.raises(SystemExit, match="2"):
            main([*words[:-1], f"{words[-1]}={text}"])
        assert f"must be {what}, got {text}\n" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", mostly_drills(["ascii:strict", "cp1252:strict"]))
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
        ("xyzzy", "usage: shoal [-h]", "there is no command 'xyzzy'. Commands: demo, plan, "),
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
