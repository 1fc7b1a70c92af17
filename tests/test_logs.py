"""Log lines: short ones by default, others for programs that ask for them, and none beside a program's own."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest

from shoal.base.bounded import MOST
from shoal.base.logs import (
    MAX_NAME_CHARACTERS,
    MOST_LINES_OF_A_KIND,
    WIDTH,
    HandlerMode,
    Seldom,
    ShortFormatter,
    counted,
    name_and_id,
    note_name,
    one_line,
    quoted,
    size,
    use_hivemind_log_handler,
    with_names,
    words_of,
)
from shoal.testing import run

pytestmark = pytest.mark.oldest

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


START = """
import logging, shoal
with shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], name="me"):
    pass
"""
"""Makes the first object of a program."""


def test_the_first_object_makes_warnings_readable() -> None:
    lines = output_of(START + SPEAK)
    assert len(lines) == 2
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING shoal: a warning line of shoal.dht", lines[0])
    assert lines[1] == "a warning line of mine"


CONFIGURED = {
    "basicConfig": 'logging.basicConfig(format="own: %(message)s")',
    "dictConfig of the root": """
logging.config.dictConfig({
    "version": 1, "disable_existing_loggers": False, "root": {"handlers": ["own"]},
    "formatters": {"own": {"format": "own: %(message)s"}},
    "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own"}},
})""",
    "dictConfig of shoal": """
logging.config.dictConfig({
    "version": 1, "disable_existing_loggers": False,
    "loggers": {"shoal": {"handlers": ["own"], "propagate": False}, "mine": {"handlers": ["own"]}},
    "formatters": {"own": {"format": "own: %(message)s"}},
    "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own"}},
})""",
    "a handler of one logger": """
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("own: %(message)s"))
for name in ("shoal.dht", "mine"):
    logging.getLogger(name).addHandler(handler)
""",
}


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("configured", CONFIGURED)
def test_the_handlers_of_the_program_replace_those_lines(configured: str, is_first: bool) -> None:
    parts = [CONFIGURED[configured], START] if is_first else [START, CONFIGURED[configured]]
    lines = output_of("import logging.config\n" + "\n".join(parts) + SPEAK)
    assert lines == ["own: a warning line of shoal.dht", "own: a warning line of mine"]


def test_one_line_of_code_or_a_variable_shows_more() -> None:
    for script, environment in (
        ("\nlogging.getLogger('shoal').setLevel('INFO')", {}),
        ("", {"SHOAL_LOGLEVEL": "info"}),
    ):
        lines = output_of(START + script + SPEAK, **environment)
        assert [line.split(" ", 1)[1] for line in lines if "info line" in line] == [
            "INFO shoal: an info line of shoal.dht"
        ]


def test_those_lines_can_be_turned_off() -> None:
    assert output_of(START + "\nlogging.getLogger('shoal').addHandler(logging.NullHandler())" + SPEAK) == [
        "a warning line of mine"
    ]


def test_a_terminal_without_utf_8_gets_plain_signs() -> None:
    script = START + "\nlogging.getLogger('shoal').warning('of peer …x, 3 × 4 → 12')"
    (line,) = output_of(script, PYTHONIOENCODING="ascii:strict")
    assert line.endswith("shoal: of peer ...x, 3 x 4 -> 12")


def short(text: str) -> list[str]:
    record = logging.LogRecord("shoal.dht", logging.WARNING, __file__, 1, text, (), None)
    return ShortFormatter().format(record).split("\n")


def test_a_line_takes_at_most_two_rows_and_loses_whole_sentences_from_its_end() -> None:
    peer, advice = "12D3KooW" + "A" * 44, "Turn on NTP there, or leave that peer out"
    for count in (1, 10, 18, 19, 20, 21, 22, 24, 26, 28):
        first = f"peer {peer}: {'word ' * count}is wrong"
        rows = short(f"{first}. {advice}")
        assert len(rows) <= 2
        assert all(len(row) <= WIDTH for row in rows)
        shown = " ".join(row.strip() for row in rows)
        assert shown.endswith((f"is wrong. {advice}", "is wrong. …")), "no word is cut from the middle"
        assert shown.count("word") == count
    assert short("first. second. third")[0].endswith("first. second. third")
    for text in ("x" * 10_000, "word " * 10_000, ". ".join(["y" * 200] * 3), "two\nlines"):
        rows = short(text)
        assert len(rows) <= 2
        assert all(len(row) <= WIDTH for row in rows)


def test_peers_have_short_names_in_lines_and_whole_ids_in_records() -> None:
    peer, address = "12D3KooW" + "B" * 44, "/ip4/1.2.3.4/tcp/5/p2p/12D3KooW" + "B" * 44
    assert with_names(f"peer {peer}, at {address}") == f"peer …BBBBBBBB, at {address}"
    note_name(peer, "laptop")
    try:
        assert with_names(f"{peer}: gone") == "laptop (…BBBBBBBB): gone"
        record = logging.LogRecord("shoal.dht", logging.WARNING, __file__, 1, "peer %s", (peer,), None)
        assert ShortFormatter().format(record).endswith("shoal: peer laptop (…BBBBBBBB)")
        assert record.getMessage() == f"peer {peer}"
    finally:
        note_name(peer, "")
    assert name_and_id(peer) == "…BBBBBBBB"


def test_a_name_of_another_peer_is_short_and_harmless() -> None:
    peers = [f"12D3KooW{number:044d}" for number in range(MOST + 10)]
    try:
        note_name(peers[0], "\x1b[31mroot\x07\n\u202egnp " + "x" * 10**6)
        shown = name_and_id(peers[0])
        assert shown.isprintable()
        assert len(shown) < MAX_NAME_CHARACTERS + 12
        for peer in peers:
            note_name(peer, "one of many")
        assert name_and_id(peers[0]) == f"…{peers[0][-8:]}", "the oldest are forgotten"
    finally:
        for peer in peers:
            note_name(peer, "")


def test_no_color_is_honoured() -> None:
    script = """
        import sys
        sys.stderr.isatty = lambda: True
        import shoal
        shoal.get_logger("shoal.dht").warning("hello")
    """
    assert "\033" in output_of(script)[0]
    assert "\033" not in output_of(script, NO_COLOR="1")[0]
    assert "\033" in output_of(script, NO_COLOR="1", SHOAL_COLORS="true")[0], "what is more specific counts"


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
    use_hivemind_log_handler("nowhere")
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


def test_sizes() -> None:
    assert [size(count) for count in (0, 999, 999.6, 1500, 2.5e6, 3e9, 4e12)] == [
        *("0 B", "999 B", "1 kB", "1.5 kB", "2.5 MB", "3 GB", "4 TB"),
    ]


def test_quoted_values_are_short_whatever_strangers_send():
    assert quoted("short") == "'short'"
    assert quoted(None) == "None"
    assert quoted("x" * 10**6).endswith("... (1000000 long)")
    for value in ("x" * 10**6, b"x" * 10**6, ["x" * 10**6] * 1000, {i: "x" for i in range(10**4)}, 10**400 * 10**100):
        assert len(quoted(value)) < 600


def test_what_another_peer_says_stays_in_its_line():
    assert one_line("a\nb\x1b[31mc") == "a b [31mc"
    assert len(one_line("x" * 10**6)) < 1000
    assert words_of(ValueError("a\nb")) == "a b"
    assert words_of(TimeoutError()) == "TimeoutError"


HOSTILE = "\x1b[2J\r\nNov 21 15:14:07.123 [WARN] forged\x07\x9b31m"


def test_rare_lines_have_the_words_of_others_on_one_line() -> None:
    """Programs with handlers of their own get these lines as they are."""
    lines: list[str] = []
    seldom = Seldom(lambda text, *values: lines.append(text % values))
    seldom("%s said %s, and %s, of %d: %s", "peer", HOSTILE, ValueError(HOSTILE * 10_000), 3, None)
    [line] = lines
    assert line.isprintable()
    assert line.startswith("peer said  [2J")
    assert line.endswith("..., of 3: None")
    assert len(line) < 1000


@pytest.mark.parametrize("shows", ["", "get_logger(); "], ids=["short lines", "more lines"])
def test_no_text_controls_the_terminal_or_forges_a_line(shows: str) -> None:
    """Errors of other libraries may hold what a stranger has sent; so may their tracebacks."""
    script = f"""
import logging, shoal
from shoal.base.logs import get_logger
{shows}shoal.DHT
with shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], name="me"):
    pass
logger = logging.getLogger("shoal.dht")
logger.warning("a peer says %s", {HOSTILE!r})
try:
    raise ValueError({HOSTILE!r})
except ValueError:
    logger.exception("it failed")
"""
    lines = output_of(script)
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("Nov 21 15:14:07.123") for line in lines)
    assert sum("forged" in line for line in lines) == 2


def test_lines_of_the_program_itself_stay_as_they_are() -> None:
    script = 'import logging, shoal.base.logs\nshoal.base.logs.use_hivemind_log_handler("in_root_logger")\n'
    assert "\ttab" in output_of(script + 'logging.getLogger("mine").warning("a\\ttab")')[0]


def test_lines_of_one_kind_are_seldom(monkeypatch):
    now, lines = 1000.0, []
    monkeypatch.setattr("shoal.base.logs.time.monotonic", lambda: now)
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
    monkeypatch.setattr("shoal.base.logs.time.monotonic", lambda: now)
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
