"""The ``shoal`` command. Each subcommand has a module or a package of its own here."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from typing import Any

from shoal.base.logs import harmless
from shoal.errors import BootstrapError, ValidationError


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


def run_name(text: str) -> str:
    """Read the name of a run."""
    if not text or "." in text:
        raise argparse.ArgumentTypeError(f"must be the run_id of the optimizers, which has no dots, got {text!r}")
    return text


def number(text: str) -> float:
    """The number that a text stands for; NaN if it is none, which no comparison lets through."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def end_on_signals() -> None:
    """Let SIGINT and SIGTERM end this process alike, even as a background job, whose SIGINT the shell has disabled."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def tell_error(command: str, error: Exception) -> None:
    """Print why a command ends, and what tells more if it could not join."""
    print(f"shoal {command}: {harmless(str(error))}", file=sys.stderr)
    if isinstance(error, (BootstrapError, ValidationError)):
        print("More about each address: shoal doctor ADDRESS", file=sys.stderr)
