"""The ``shoal demo`` command."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shoal.cli.demo.report import succeeded, ten_lines, write_report
from shoal.cli.demo.run import Demo, DemoConfig, DemoError
from shoal.cli.demo.viewer import viewer_for

DESCRIPTION = """\
Trains a small language model with several peers on this machine, each a process of its own. The text is the source of
Python's standard library. On the way one peer is killed and a new one joins from nothing.
"""


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to the subcommands."""
    defaults = DemoConfig()
    parser = subparsers.add_parser(
        "demo", help="train a small language model with several peers on this machine", description=DESCRIPTION
    )
    parser.add_argument("--peers", type=int, default=defaults.peers, help="peers at the start (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, help="how long to train (default: %(default)g)"
    )
    parser.add_argument(
        "--folder", type=Path, default=defaults.folder, help="where the report goes (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return the exit status: 0 if it showed what it is meant to show."""
    try:
        config = DemoConfig(arguments.peers, arguments.seconds, arguments.folder)
    except ValueError as error:
        print(f"shoal demo: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background of a script
    signal.signal(signal.SIGTERM, _leave)
    try:
        with contextlib.closing(viewer_for(sys.stdout)) as viewer:
            story = Demo(config, viewer).run()
    except DemoError as error:
        print(f"shoal demo: {error}", file=sys.stderr)
        return 1
    print()
    print(*ten_lines(story, write_report(story, config.folder)), sep="\n")
    return 0 if succeeded(story) else 1


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
