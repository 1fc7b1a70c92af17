"""The ``shoal`` command with its subcommands; ``python -m shoal`` works, too, if it is not on the path."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import shoal
from shoal.base.signs import make_output_plain
from shoal.cli import archive, dht, monitor, server, tell_error, token
from shoal.cli.demo import command as demo
from shoal.cli.doctor import command as doctor
from shoal.cli.plan import command as plan
from shoal.errors import ShoalError


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped word; empty if no known one is like it."""
    similar = difflib.get_close_matches(word, list(known), 1)
    return f". Did you mean {similar[0]}?" if similar else ""


class _Parser(argparse.ArgumentParser):
    """Suggests the command that a mistyped one resembles; ``suggest_on_error`` does so only from Python 3.14 on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.set_defaults(parser=self)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = list(action.choices)
            hint = _did_you_mean(value, known) or f". Commands: {', '.join(known)}"
            self.error(f"there is no command {value!r}{hint}")
        super()._check_value(action, value)

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End with an error about words that are not arguments of this command."""
        options = [option for action in self._actions for option in action.option_strings]
        hint = next(filter(None, (_did_you_mean(word.partition("=")[0], options) for word in words)), "")
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="shoal",
        description="Train PyTorch models together, without a server that everybody depends on.",
        epilog="More about each command: shoal COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}", help="show the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo.add_parser(subparsers)
    plan.add_parser(subparsers)
    dht.add_parser(subparsers)
    doctor.add_parser(subparsers)
    monitor.add_parser(subparsers)
    archive.add_parsers(subparsers)
    server.add_parser(subparsers)
    token.add_parser(subparsers)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line with addresses both before and after its options, which argparse alone cannot do."""
    parsed, rest = parser.parse_known_args(arguments)
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(parsed, "addresses")):
        refusing: _Parser = parsed.parser  # that of the command, so that its usage is shown
        refusing.refuse(rest)
    if rest and getattr(parsed, "ends_with_folder", False):
        *rest, parsed.folder = [parsed.folder, *rest]
    if rest:
        parsed.addresses = [*parsed.addresses, *rest]
    return parsed


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that wants to complete a command line, and end; otherwise do nothing."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def main(arguments: Sequence[str] | None = None, **preset: Any) -> int:
    """Run the command.

    Args:
        arguments: the words after the name of the command; default: those of this process.
        preset: options that the command line does not set.

    Returns:
        The exit status.
    """
    make_output_plain()
    parser = build_parser()
    complete(parser)
    parsed = parse(parser, arguments)
    vars(parsed).update(preset)
    if not hasattr(parsed, "run"):
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = parsed.run(parsed)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python complains at exit, when it flushes the rest
        return 1
    except (ShoalError, ValueError, OSError, ModuleNotFoundError) as error:
        tell_error(" ".join(parsed.parser.prog.split()[:2]), error)
        return 1
    return status


def hivemind_dht() -> int:
    """The command ``hivemind-dht``: like ``shoal dht``, for existing scripts, which read its addresses from stderr."""
    return main(["dht", *sys.argv[1:]], for_scripts=True)


if __name__ == "__main__":
    sys.exit(main())


def hivemind_server() -> int:
    """The command ``hivemind-server``: like ``shoal server``."""
    return main(["server", *sys.argv[1:]])
