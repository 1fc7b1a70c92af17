"""The ``shoal`` command: one subcommand per thing to do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shoal


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal", description="Train PyTorch models together, without a server that everybody depends on."
    )
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = build_parser()
    parser.parse_args(arguments)
    parser.print_help()
    return 0
