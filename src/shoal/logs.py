"""Readable log lines on the error output, for programs that ask for them.

shoal itself only writes to the standard loggers ``shoal.*``: importing or starting it prints and configures nothing. A
program that calls :func:`get_logger` or :func:`use_hivemind_log_handler` gets the lines printed::

    Nov 21 15:14:07.123 [INFO] Optimizer: averaged with 3 peers
    Nov 21 15:14:08.456 [WARN] [shoal.dht.node._join:212] no initial peer has answered yet

Level, colors and callers can be set by the environment.

Environment variables that change what shoal does.

=================================  ====================================================================================
``SHOAL_LOGLEVEL``                 least severe level that is printed; default ``INFO``
``SHOAL_COLORS``                   ``true`` or ``false``; default: colors if the error output is a terminal
``SHOAL_ALWAYS_LOG_CALLER``        ``true``: also lines of level ``INFO`` tell where they come from
``SHOAL_DHT_NUM_WORKERS``          requests in flight of one search in the table; default 4
``SHOAL_HOST_MADDRS``              where peers listen that are not told where, such as ``/ip4/127.0.0.1/tcp/0`` for this
                                   machine alone; several are separated by commas; default: all networks
``SHOAL_LOOP``                     event loop: ``uvloop`` or ``asyncio``; default: uvloop where it is installed
=================================  ====================================================================================

Each is also understood with ``HIVEMIND_`` instead of ``SHOAL_``. ``USE_LEGACY_BFLOAT16`` has no prefix, see
:data:`shoal.compression.base.USE_LEGACY_BFLOAT16`. Variables about memory shared between processes have no effect:
there is none.
"""

from __future__ import annotations

import logging
import math
import os
import reprlib
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import NoneType

PACKAGE = "shoal"
# Of a text that is quoted.
QUOTED_CHARACTERS = 120
# Of what another peer says.
TOLD_CHARACTERS = 800


def setting(name: str, default: str = "") -> str:
    """The value of an environment variable, by its name without ``SHOAL_``; what is empty counts as not set."""
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
    """So many of them: "1 peer", "2 peers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def quoted(value: object) -> str:
    """A value as it stands in an error text or a log line: shortened, for strangers send values of any length."""
    if isinstance(value, (str, bytes, bytearray)) and len(value) > QUOTED_CHARACTERS:
        return f"{value[:QUOTED_CHARACTERS]!r}... ({len(value)} long)"
    text = repr(value) if isinstance(value, (str, bytes, bytearray, int, float, NoneType)) else reprlib.repr(value)
    return text if len(text) <= 4 * QUOTED_CHARACTERS else f"{text[: 4 * QUOTED_CHARACTERS]}..."


def one_line(text: str) -> str:
    """What another peer says, for a log: in one line, without codes for the terminal, and not too long."""
    line = "".join(each if each.isprintable() else " " for each in text[:TOLD_CHARACTERS])
    return f"{line}..." if len(text) > TOLD_CHARACTERS else line


class Seldom:
    """Lets one line of each kind through in a while: what strangers can cause must not fill a disk.

    Args:
        log: writes a line, such as the ``warning`` of a logger.
        seconds: between two lines of one kind.
    """

    def __init__(self, log: Callable[..., None], seconds: float = 60.0) -> None:
        self._log, self._seconds = log, seconds
        # When each kind, a text with places for values, was logged last, and how many lines were left out since.
        self._kinds: dict[str, tuple[float, int]] = {}

    def __call__(self, kind: str, *values: object) -> None:
        """Log a line as a logger does, or only count it."""
        now = time.monotonic()
        # Without a lock: two threads may at worst log a line too many, and a forked child finds nothing locked.
        logged_at, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now - logged_at < self._seconds:
            self._kinds[kind] = logged_at, left_out + 1
            return
        self._kinds[kind] = now, 0
        if left_out:
            kind, values = f"{kind} (and %d more like this before)", (*values, left_out)
        self._log(kind, *values)


class HandlerMode(Enum):
    """Which loggers' lines are printed."""

    NOWHERE = "nowhere"
    """None by shoal: they go to whatever handlers the program has set up."""
    IN_HIVEMIND = "in_hivemind"
    """Those of shoal alone."""
    IN_ROOT_LOGGER = "in_root_logger"
    """Those of the whole program."""


_USES_COLORS = switch("COLORS", default=sys.stderr is not None and sys.stderr.isatty())


class TextStyle:
    """Codes that change how a terminal shows what follows; empty if colors are off."""

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


class ConsoleFormatter(logging.Formatter):
    """One line per record: when, how severe, from where unless it is a plain notice, and what."""

    def __init__(self) -> None:
        super().__init__()
        self._always_tells_caller = switch("ALWAYS_LOG_CALLER", default=False)

    def formatMessage(self, record: logging.LogRecord) -> str:
        when = f"{self.formatTime(record, '%b %d %H:%M:%S')}.{int(record.msecs):03d}"
        level = "WARN" if record.levelno == logging.WARNING else record.levelname
        style = _STYLES.get(record.levelno, "")
        caller = f" [{TextStyle.BOLD}{record.name}.{record.funcName}:{record.lineno}{TextStyle.RESET}]"
        tells_caller = record.levelno != logging.INFO or self._always_tells_caller
        reset = TextStyle.RESET if style else ""
        return f"{when} [{style}{level}{reset}]{caller if tells_caller else ''} {record.message}"


class _Installation:
    """What was changed in a logger, to undo it."""

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


def use_hivemind_log_handler(where: HandlerMode | str) -> None:
    """Choose which lines are printed: ``"in_hivemind"``, ``"nowhere"`` or ``"in_root_logger"``.

    Raises:
        ValueError: none of these.
    """
    global _mode, _installation
    mode = HandlerMode(where.lower()) if isinstance(where, str) else HandlerMode(where)
    with _lock:
        if mode is _mode:
            return
        if _installation is not None:
            _installation.undo()
            _installation = None
        if mode is not HandlerMode.NOWHERE:
            _installation = _Installation(logging.getLogger(PACKAGE if mode is HandlerMode.IN_HIVEMIND else None))
        _mode = mode


def get_logger(name: str | None = None) -> logging.Logger:
    """A standard logger: that of shoal, or the one with this name. From the first call on shoal's lines are printed.

    A program that wants its own lines in the same form calls ``use_hivemind_log_handler("in_root_logger")``.
    """
    if _mode is None:
        use_hivemind_log_handler(HandlerMode.IN_HIVEMIND)
    return logging.getLogger(PACKAGE if name is None else name)
