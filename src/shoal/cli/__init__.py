"""The ``shoal`` command."""

from __future__ import annotations

import argparse
from typing import Any


def add_option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add an option that may be written with hyphens or with underscores; the help shows the hyphens.

    Args:
        parser: where to.
        name: with hyphens, without the two in front.
        settings: of ``ArgumentParser.add_argument``.
    """
    parser.add_argument(f"--{name}", **settings)
    if "-" in name:
        hidden = {**settings, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        parser.add_argument(f"--{name.replace('-', '_')}", **hidden)
