"""The ``shoal`` command and the options that its subcommands share.

:mod:`~.__main__` parses the command line. Each subcommand has a module or package of its own: :mod:`~.dht`,
:mod:`~.demo`, :mod:`~.plan`, :mod:`~.doctor`, :mod:`~.monitor`, :mod:`~.server`, :mod:`~.token`, and :mod:`~.archive`
with ``revive``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shoal.base.logs import harmless
from shoal.errors import BootstrapError, ValidationError

T = TypeVar("T")


def add_option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add an option that can be written with hyphens or underscores; the help shows the hyphens.

    Args:
        parser: gets the option.
        name: with hyphens, but without the leading ``--``.
        settings: for ``ArgumentParser.add_argument``.
    """
    parser.add_argument(f"--{name}", **settings)
    if "-" in name:
        hidden = {**settings, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        parser.add_argument(f"--{name.replace('-', '_')}", **hidden)


def value(what: str, convert: Callable[[str], T], is_good: Callable[[T], bool]) -> Callable[[str], T]:
    """A ``type`` for ``add_argument`` that checks the value.

    Args:
        what: completes "must be".
        convert: parses the text, or raises ``ValueError``.
        is_good: whether the value is valid.
    """

    def read(text: str) -> T:
        with contextlib.suppress(ValueError):
            found = convert(text)
            if is_good(found):
                return found
        raise argparse.ArgumentTypeError(f"must be {what}, got {text or repr(text)}")

    return read


def whole(what: str, least: int, end: int) -> Callable[[str], int]:
    """A ``type`` for whole numbers from ``least`` on, below ``end``."""
    return value(what, int, lambda number: least <= number < end)


port_of = whole("the number of a port, from 0 to 65535", 0, 2**16)


def scaled(text: str) -> float:
    """A number that may end with a unit, such as 350M."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}.get(text[-1:].upper())
    return float(text) if factor is None else float(text[:-1]) * factor


rate_of = value("bytes per second, such as 5M or 800k", scaled, lambda rate: 0 < rate < math.inf)


def add_addresses(parser: argparse.ArgumentParser, what: str, nargs: str = "*") -> None:
    """Add the addresses of other peers."""
    parser.add_argument("addresses", nargs=nargs, default=[], metavar="ADDRESS", help=what)


def add_listening(
    parser: argparse.ArgumentParser, where: str = "all networks of this machine on a free port", extra: str = ""
) -> None:
    """Add the options for where a peer listens, and which addresses it announces.

    Args:
        where: where it listens by default.
        extra: added to the help of the second option.
    """
    host = f"where to listen (default: SHOAL_HOST_MADDRS, or {where})"
    add_option(parser, "host-maddrs", nargs="*", default=None, metavar="ADDRESS", help=host)
    announce = f"what others are told instead of that{extra}"
    add_option(parser, "announce-maddrs", nargs="*", default=None, metavar="ADDRESS", help=announce)


def add_identity(
    parser: argparse.ArgumentParser, identity: str = "file with the key of this peer; made if missing"
) -> None:
    """Add the options for the identity of this peer, and for its token."""
    add_option(parser, "identity-path", type=Path, metavar="FILE", help=identity)
    add_token(parser)


def add_token(parser: argparse.ArgumentParser, what: str = "of a private run") -> None:
    """Add ``--token``."""
    parser.add_argument("--token", metavar="TOKEN", help=f"{what}, as text or as a file (default: SHOAL_TOKEN)")


def add_run_name(parser: argparse.ArgumentParser) -> None:
    """Add the name of a run."""
    name = value("the run_id of the optimizers, which has no dots", str, lambda text: bool(text) and "." not in text)
    parser.add_argument(
        "--run", dest="run_id", type=name, required=True, metavar="NAME", help="the run_id of its optimizers"
    )


def end_on_signals() -> None:
    """Let SIGTERM end this process as SIGINT does, also in a background job, whose SIGINT the shell has disabled."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def tell_error(command: str, error: Exception) -> None:
    """Print why a command such as ``shoal dht`` ends, and how to learn more if it could not join."""
    print(f"{command}: {harmless(str(error))}", file=sys.stderr)
    if isinstance(error, (BootstrapError, ValidationError)):
        print("More about each address: shoal doctor ADDRESS", file=sys.stderr)
