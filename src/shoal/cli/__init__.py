"""The ``shoal`` command. Each subcommand has a module or a package of its own here."""

from __future__ import annotations

import argparse
from typing import Any


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
