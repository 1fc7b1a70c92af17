"""Log lines: printed for programs that ask for them, and for nobody else."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest

from shoal.logs import MOST_LINES_OF_A_KIND, HandlerMode, Seldom, counted, one_line, quoted, use_hivemind_log_handler
from shoal.testing import run

LINE = re.compile(r"[A-Z][a-z]{2} \d\d \d\d:\d\d:\d\d\.\d{3} (.*)")

SPEAK = """
import logging
for name in ("shoal.dht", "mine"):
    logging.getLogger(name).debug("a debug line of %s", name)
    logging.getLogger(name).info("an info line of %s", name)
    logging.getLogger(name).warning("a warning line of %s", name)
"""


def output_of(script: str, **environment: str) -> list[str]:
    """What a program prints on its error output."""
    cleared = {key: value for key, value in os.environ.items() if not key.startswith(("SHOAL_", "HIVEMIND_"))}
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        env={**cleared, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def without_time(lines: list[str]) -> list[str]:
    found = [LINE.fullmatch(line) for line in lines]
    assert None not in found, lines
    return [re.sub(r":\d+\]", ":LINE]", match.group(1)) for match in found if match]


def test_importing_and_using_shoal_prints_nothing_by_itself() -> None:
    lines = output_of("import shoal\nshoal.PeerID, shoal.MSGPackSerializer" + SPEAK)
    assert lines == ["a warning line of shoal.dht", "a warning line of mine"]  # Python's own last resort


def test_the_first_logger_turns_the_lines_of_shoal_on() -> None:
    lines = output_of("from shoal import get_logger\nget_logger()\nget_logger('mine')" + SPEAK)
    assert lines.pop() == "a warning line of mine"
    assert without_time(lines) == [
        "[INFO] an info line of shoal.dht",
        "[WARN] [shoal.dht.<module>:LINE] a warning line of shoal.dht",
    ]


def test_the_whole_program_may_have_lines_of_this_form() -> None:
    lines = output_of("import shoal\nshoal.use_hivemind_log_handler('in_root_logger')" + SPEAK)
    assert without_time(lines) == [
        "[INFO] an info line of shoal.dht",
        "[WARN] [shoal.dht.<module>:LINE] a warning line of shoal.dht",
        "[INFO] an info line of mine",
        "[WARN] [mine.<module>:LINE] a warning line of mine",
    ]


def test_nowhere_leaves_it_to_the_program() -> None:
    script = """
        import logging, sys, shoal
        logging.basicConfig(format="own format: %(message)s", level=logging.INFO)
        shoal.get_logger()
        shoal.use_hivemind_log_handler("nowhere")
        shoal.get_logger("shoal.dht").info("hello")
    """
    assert output_of(script) == ["own format: hello"]


@pytest.mark.parametrize("prefix", ["SHOAL", "HIVEMIND"])
def test_the_environment_decides_on_details(prefix: str) -> None:
    environment = {f"{prefix}_LOGLEVEL": "debug", f"{prefix}_ALWAYS_LOG_CALLER": "true", f"{prefix}_COLORS": "true"}
    lines = output_of("import shoal\nshoal.get_logger()" + SPEAK.replace("warning", "error"), **environment)
    debug, info, error, _ = lines
    for line, level, color in ((debug, "DEBUG", "\033[35m"), (info, "INFO", "\033[34m"), (error, "ERROR", "\033[31m")):
        assert f"[{color}{level}\033[0m]" in line
        assert "shoal.dht.<module>:" in line
    for name in ("LOGLEVEL", "COLORS"):
        with pytest.raises(subprocess.CalledProcessError):
            output_of("import shoal\nshoal.get_logger()", **{f"{prefix}_{name}": "nonsense"})


def test_a_traceback_follows_its_line() -> None:
    script = """
        import shoal
        try:
            1 / 0
        except ZeroDivisionError:
            shoal.get_logger("shoal.test").exception("it failed")
    """
    lines = output_of(script)
    assert without_time(lines[:1]) == ["[ERROR] [shoal.test.<module>:LINE] it failed"]
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_changing_ones_mind_leaves_everything_as_it_was() -> None:
    root, package = logging.getLogger(), logging.getLogger("shoal")

    def state() -> list[object]:
        return [(x.level, x.propagate, list(x.handlers)) for x in (root, package)]

    before = state()
    for mode in ("in_hivemind", HandlerMode.IN_ROOT_LOGGER, "IN_HIVEMIND", "in_hivemind"):
        use_hivemind_log_handler(mode)
        assert state() != before
        assert len(root.handlers) + len(package.handlers) == sum(len(handlers) for *_, handlers in before) + 1
    use_hivemind_log_handler("nowhere")
    assert state() == before
    with pytest.raises(ValueError, match="everywhere"):
        use_hivemind_log_handler("everywhere")


def test_numbers_of_things() -> None:
    assert [counted(number, "peer") for number in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]


def test_quoted_values_are_short_whatever_strangers_send():
    assert quoted("short") == "'short'"
    assert quoted(None) == "None"
    assert quoted("x" * 10**6).endswith("... (1000000 long)")
    for value in ("x" * 10**6, b"x" * 10**6, ["x" * 10**6] * 1000, {i: "x" for i in range(10**4)}, 10**400 * 10**100):
        assert len(quoted(value)) < 600


def test_what_another_peer_says_stays_in_its_line():
    assert one_line("a\nb\x1b[31mc") == "a b [31mc"
    assert len(one_line("x" * 10**6)) < 1000


def test_lines_of_one_kind_are_seldom(monkeypatch):
    now, lines = 1000.0, []
    monkeypatch.setattr("shoal.logs.time.monotonic", lambda: now)
    seldom = Seldom(lambda text, *values: lines.append(text % values), seconds=60.0)
    for number in range(5):
        seldom("peer %d is odd", number)
    seldom("another kind")
    assert lines == ["peer 0 is odd", "another kind"]
    now += 60.0
    seldom("peer %d is odd", 7)
    seldom("peer %d is odd", 8)
    assert lines[2:] == ["peer 7 is odd (and 4 more like this before)"]


def test_a_line_about_one_peer_does_not_hide_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = 1000.0, []
    monkeypatch.setattr("shoal.logs.time.monotonic", lambda: now)
    seldom = Seldom(lambda text, *values: lines.append(text % values), seconds=60.0)
    for peer in "aabb":
        seldom("peer %s is odd", peer, about=peer)
    assert lines == ["peer a is odd", "peer b is odd (and 1 more like this before)"]
    for number in range(10_000):
        seldom("peer %s is odd", number, about=number)
    assert len(lines) == MOST_LINES_OF_A_KIND, "a crowd does not fill the log"
    assert len(seldom.told["peer %s is odd"]) == MOST_LINES_OF_A_KIND
    now += 60.0
    seldom("peer %s is odd", "a", about="a")
    assert lines[-1] == f"peer a is odd (and {10_000 - 3} more like this before)"


def test_in_a_simulation_its_own_time_counts() -> None:
    lines: list[str] = []
    seldom = Seldom(lambda text, *values: lines.append(text % values), seconds=60.0)

    async def be_odd(seconds: int) -> None:
        for second in range(seconds):
            seldom("odd at %d", second)
            await asyncio.sleep(1.0)

    run(be_odd(600))
    assert len(lines) == 10
    run(be_odd(10))
    assert lines[10:] == ["odd at 0 (and 59 more like this before)"]
    run(be_odd(10))
    assert lines[11:] == ["odd at 0 (and 9 more like this before)"], "each simulation begins at the same time"
