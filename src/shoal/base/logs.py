"""Readable log lines on the error output.

shoal writes to the standard loggers ``shoal.*``. Importing it configures nothing. In a program without any logging
handlers, the first DHT makes warnings appear as lines of at most :data:`MOST_LINES` times :data:`WIDTH` columns::

    15:14:08 WARNING shoal: peer laptop-4711 (…Cxkk9fQp) does not answer

As soon as the program adds a handler, with ``logging.basicConfig`` for instance, that handler gets the full text, and
these lines stop. A program that calls :func:`get_logger` or :func:`use_hivemind_log_handler` gets more lines, in
another form::

    Nov 21 15:14:07.123 [INFO] Optimizer: averaged with 3 peers
    Nov 21 15:14:08.456 [WARN] [shoal.dht.node._join:212] no initial peer has answered yet

Level, colors and callers can be set by the environment.

Environment variables that change what shoal does.

=================================  ====================================================================================
``SHOAL_LOGLEVEL``                 least severe level that is printed; default ``INFO``, or ``WARNING`` in a program
                                   that has not asked for lines
``SHOAL_COLORS``                   ``true`` or ``false``; default: colors if the error output is a terminal and
                                   ``NO_COLOR`` is not set
``SHOAL_ALWAYS_LOG_CALLER``        ``true``: lines of level ``INFO`` also show where they come from
``SHOAL_DHT_NUM_WORKERS``          requests in flight of one search in the DHT; default 4
``SHOAL_HOST_MADDRS``              where peers listen if the program gives no address, such as ``/ip4/127.0.0.1/tcp/0``
                                   for this machine alone; several are separated by commas; default: all networks
``SHOAL_NAME``                     the name of peers if the program gives none; empty: no name
``SHOAL_TOKEN``                    token of a private run, or the path of a file with it, if the program gives none
``SHOAL_PROXY``                    proxy for connections to the outside, such as ``socks5://HOST:PORT``, instead of the
                                   one in ``HTTPS_PROXY`` or ``ALL_PROXY``; ``off``: none
``SHOAL_LOOP``                     event loop: ``uvloop`` or ``asyncio``; default: uvloop where it is installed
=================================  ====================================================================================

The prefix ``HIVEMIND_`` works as well as ``SHOAL_``. ``USE_LEGACY_BFLOAT16`` has no prefix, see
:data:`shoal.compression.base.USE_LEGACY_BFLOAT16`. Variables about memory shared between processes have no effect,
because there is no such memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import reprlib
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from enum import Enum
from types import NoneType
from typing import Any, TextIO

from shoal.base.bounded import Bounded
from shoal.base.signs import as_far_as

PACKAGE = "shoal"
# The length of a quoted text: about a line. Chosen, like all numbers here.
QUOTED_CHARACTERS = 120
# The length of a text from another peer.
TOLD_CHARACTERS = 800
# Lines of one kind per period, each about another peer. It is limited because a stranger can be any number of peers.
MOST_LINES_OF_A_KIND = 5
# The size of a message in a program without handlers, in lines and columns of the terminal.
MOST_LINES, WIDTH = 2, 100
# The length of the names that peers give themselves.
MAX_NAME_CHARACTERS = 32


def setting(name: str, default: str = "") -> str:
    """The value of an environment variable, by its name without ``SHOAL_``; an empty value counts as not set."""
    return os.environ.get(f"SHOAL_{name}") or os.environ.get(f"HIVEMIND_{name}") or default


def switch(name: str, default: bool) -> bool:
    """Whether an environment variable is on.

    Raises:
        ValueError: it is neither ``true`` nor ``false``.
    """
    value = setting(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise ValueError(f"SHOAL_{name} must be true or false, got {value!r}")
    return value in ("true", "1")


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 peer", "2 peers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(count: float) -> str:
    """A number of bytes in words, with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"


def quoted(value: object) -> str:
    """A value for an error text or a log line, shortened, because strangers send values of any length."""
    rest = ""
    if isinstance(value, (str, bytes, bytearray)) and len(value) > QUOTED_CHARACTERS:
        value, rest = value[:QUOTED_CHARACTERS], f"... ({len(value)} long)"
    text = repr(value) if isinstance(value, (str, bytes, bytearray, int, float, NoneType)) else reprlib.repr(value)
    return f"{text}{rest}" if len(text) <= 4 * QUOTED_CHARACTERS else f"{text[: 4 * QUOTED_CHARACTERS]}{rest or '...'}"


def one_line(text: str) -> str:
    """A text from another peer for a log line: on one line, without terminal codes, and not too long."""
    line = "".join(each if each.isprintable() else " " for each in text[:TOLD_CHARACTERS])
    return f"{line}..." if len(text) > TOLD_CHARACTERS else line


def words_of(error: BaseException) -> str:
    """The text of an error, as by :func:`one_line`; its type if it has no text."""
    return one_line(str(error)) or type(error).__name__


def harmless(text: str) -> str:
    """A text without terminal codes, in which no line after the first one can be mistaken for a log line.

    Texts from other peers are made harmless where they enter an error. This catches what was overlooked, and errors of
    other libraries.
    """
    return re.sub(r"\n(?=\S)", "\n  ", _without_codes(text))


def _without_codes(text: str) -> str:
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text)


def _harmless_traceback(text: str, error: BaseException | None) -> str:
    for _ in range(32):  # longer chains of causes are cycles
        if error is None:
            break
        said = str(error)
        text = text.replace(said, harmless(said)) if "\n" in said else text
        error = error.__cause__ or error.__context__
    return _without_codes(text)


_PEER_ID = re.compile(r"(?<![\w/])12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b")
_names: Bounded[str, str] = Bounded()


def shown_name(name: str) -> str:
    """A peer's name for people to read: on one line, without terminal codes, and not too long."""
    return " ".join(one_line(name[:MAX_NAME_CHARACTERS]).split())


def note_name(peer: str, name: str) -> None:
    """Remember the name that a peer gives itself, for log lines; an empty name removes it.

    Args:
        peer: its id.
    """
    if shown := shown_name(name):
        _names[peer] = shown
    else:
        _names.pop(peer, None)


def short_id(peer: str) -> str:
    """The end of a peer id, which is what differs between peers."""
    return f"…{peer[-8:]}"


def name_and_id(peer: str) -> str:
    """A peer as log lines show it. Any peer can take any name, so the end of its id follows."""
    name = _names.get(peer)
    return short_id(peer) if name is None else f"{name} ({short_id(peer)})"


def with_names(text: str) -> str:
    """A text with short names in place of peer ids, except in addresses, which are there to be copied."""
    return _PEER_ID.sub(lambda found: name_and_id(found[0]), text)


class Seldom:
    """Rate-limits log lines of each kind: lines that strangers can cause must not fill a disk.

    A line about one peer does not suppress a line about another peer, unless there are many. Inside an event loop, the
    loop's clock counts, so that an hour of simulated time has the lines of an hour. Texts and errors among the values
    are put on one line, because they may come from strangers.

    Args:
        log: writes a line, such as the ``warning`` of a logger.
        seconds: least time between two lines of one kind about the same peer.
    """

    def __init__(self, log: Callable[..., None], seconds: float = 60.0) -> None:
        self._log, self._seconds = log, seconds
        # By kind (a format string), then by subject: when a line was last logged.
        self.told: dict[str, dict[Hashable, tuple[object, float]]] = {}
        self._left_out: dict[str, int] = {}

    def __call__(
        self, kind: str, *values: object, about: Hashable = None, traceback_of: BaseException | None = None
    ) -> None:
        """Log a line as a logger does, or only count it.

        Args:
            about: the subject of the line, such as a peer.
            traceback_of: an error in code of the user, who needs to see where it was raised.
        """
        clock, now = _now()
        # No lock: at worst two threads log one line too many, and a forked child never finds a held lock.
        told = {
            whom: (by, at)
            for whom, (by, at) in self.told.get(kind, {}).items()
            if by is clock and now - at < self._seconds
        }
        left_out = self._left_out.get(kind, 0)
        if about in told or len(told) >= MOST_LINES_OF_A_KIND:
            self._left_out[kind] = left_out + 1
            return
        self.told[kind], self._left_out[kind] = {**told, about: (clock, now)}, 0
        if left_out:
            kind, values = f"{kind} (and %d more like this before)", (*values, left_out)
        more = {} if traceback_of is None else {"exc_info": traceback_of}
        self._log(kind, *map(_on_one_line, values), **more)


def _on_one_line(value: object) -> object:
    if isinstance(value, BaseException):
        return words_of(value)
    return one_line(value) if isinstance(value, str) else value


def _now() -> tuple[object, float]:
    """The clock of the caller, and its time: the loop of the caller's simulation, or ``None`` for the machine.

    Each simulation begins at the same time, so lines of one must not suppress those of the next.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None, time.monotonic()
    return (weakref.ref(loop) if hasattr(loop, "swarm_clock") else None), loop.time()


class HandlerMode(Enum):
    """Which loggers' lines are printed."""

    NOWHERE = "nowhere"
    """shoal prints none: lines go to the handlers that the program has set up."""
    IN_HIVEMIND = "in_hivemind"
    """Lines of shoal alone."""
    IN_ROOT_LOGGER = "in_root_logger"
    """Lines of the whole program."""


_USES_COLORS = switch(
    "COLORS", default=sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
)


class TextStyle:
    """Terminal codes for colors and bold text; empty if colors are off."""

    RESET = "\033[0m" if _USES_COLORS else ""
    BOLD = "\033[1m" if _USES_COLORS else ""
    RED = "\033[31m" if _USES_COLORS else ""
    BLUE = "\033[34m" if _USES_COLORS else ""
    PURPLE = "\033[35m" if _USES_COLORS else ""
    ORANGE = "\033[38;5;208m" if _USES_COLORS else ""


_STYLES = {
    logging.DEBUG: TextStyle.PURPLE,
    logging.INFO: TextStyle.BLUE,
    logging.WARNING: TextStyle.ORANGE,
    logging.ERROR: TextStyle.RED,
    logging.CRITICAL: TextStyle.RED + TextStyle.BOLD,
}


always_log_caller = switch("ALWAYS_LOG_CALLER", default=False)
"""Whether lines of level ``INFO`` also show where they come from."""


class ConsoleFormatter(logging.Formatter):
    """One line per record: the time, the level, the caller unless the level is ``INFO``, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self._always_tells_caller = switch("ALWAYS_LOG_CALLER", default=False)

    def formatMessage(self, record: logging.LogRecord) -> str:
        when = f"{self.formatTime(record, '%b %d %H:%M:%S')}.{int(record.msecs):03d}"
        level = "WARN" if record.levelno == logging.WARNING else record.levelname
        style = _STYLES.get(record.levelno, "")
        caller = f" [{TextStyle.BOLD}{record.name}.{record.funcName}:{record.lineno}{TextStyle.RESET}]"
        # Lines of the program itself are left as they are.
        text = harmless(record.message) if record.name.partition(".")[0] == PACKAGE else record.message
        tells_caller = record.levelno != logging.INFO or self._always_tells_caller
        reset = TextStyle.RESET if style else ""
        return f"{when} [{style}{level}{reset}]{caller if tells_caller else ''} {with_names(text)}"

    def formatException(self, ei: Any) -> str:
        return _harmless_traceback(super().formatException(ei), ei[1])


def _in_few_lines(text: str) -> list[str]:
    """A text in at most :data:`MOST_LINES` lines.

    If it is too long, whole sentences are left out from the end. Only the first sentence is ever cut.
    """
    wrapped = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines, sentences = wrapped.wrap(text), text.split(". ")
    while len(lines) > MOST_LINES and len(sentences) > 1:
        sentences.pop()
        lines = wrapped.wrap(f"{'. '.join(sentences)}. …")
    if len(lines) > MOST_LINES:
        wrapped.max_lines, wrapped.placeholder = MOST_LINES, " …"
        lines = wrapped.wrap(text)
    return lines


class ShortFormatter(logging.Formatter):
    """The time, the level and the text, in a few short lines. A traceback follows in full."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname} {PACKAGE}: "
        lines = _in_few_lines(head + with_names(harmless(record.message)))
        style = _STYLES.get(record.levelno, "")
        if style:
            lines[0] = lines[0].replace(record.levelname, f"{style}{record.levelname}{TextStyle.RESET}", 1)
        return "\n".join(lines)

    def formatException(self, ei: Any) -> str:
        return _harmless_traceback(super().formatException(ei), ei[1])


class OwnHandler(logging.Handler):
    """Prints shoal's lines in a program that has no handler for them, as Python's handler of last resort does.

    It is silent while there is any other handler, so a program can set up its logging at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(ShortFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO | None = sys.stderr
        if stream is None or self._is_handled(record.name):
            return
        try:
            stream.write(as_far_as(stream.encoding, f"{self.format(record)}\n"))
            stream.flush()
        except Exception:
            self.handleError(record)

    def _is_handled(self, name: str) -> bool:
        """Whether another handler gets the records of a logger."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


class _Installation:
    """A handler installed on a logger, and the logger's former settings to restore."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._level, self._propagate = logger.level, logger.propagate
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(ConsoleFormatter())
        logger.setLevel(setting("LOGLEVEL", "INFO").upper())
        logger.propagate = False
        logger.addHandler(self._handler)

    def undo(self) -> None:
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)
        self._logger.propagate = self._propagate


_lock = threading.Lock()
_mode: HandlerMode | None = None
_installation: _Installation | None = None
_own_handler: OwnHandler | None = None


def show_own_lines() -> None:
    """Print shoal's lines if the program has no handlers of its own. Called when the first object is made."""
    global _own_handler
    with _lock:
        if _own_handler is None and _mode is None:
            _own_handler = OwnHandler()
            logger = logging.getLogger(PACKAGE)
            if setting("LOGLEVEL"):
                logger.setLevel(setting("LOGLEVEL").upper())
            logger.addHandler(_own_handler)


def use_hivemind_log_handler(where: HandlerMode | str) -> None:
    """Choose which lines are printed: ``"in_hivemind"``, ``"nowhere"`` or ``"in_root_logger"``.

    Raises:
        ValueError: ``where`` is none of these.
    """
    global _mode, _installation, _own_handler
    mode = HandlerMode(where.lower()) if isinstance(where, str) else HandlerMode(where)
    with _lock:
        if mode is _mode:
            return
        if _own_handler is not None:
            logging.getLogger(PACKAGE).removeHandler(_own_handler)
            _own_handler = None
        if _installation is not None:
            _installation.undo()
            _installation = None
        if mode is not HandlerMode.NOWHERE:
            _installation = _Installation(logging.getLogger(PACKAGE if mode is HandlerMode.IN_HIVEMIND else None))
        _mode = mode


def get_logger(name: str | None = None) -> logging.Logger:
    """A standard logger: shoal's, or the one with this name. From the first call on, shoal's lines are printed.

    A program that wants its own lines in the same form calls ``use_hivemind_log_handler("in_root_logger")``.
    """
    if _mode is None:
        use_hivemind_log_handler(HandlerMode.IN_HIVEMIND)
    return logging.getLogger(PACKAGE if name is None else name)
