"""The ``shoal server`` command: runs experts for others until it is told to stop."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shoal.base.logs import setting, use_hivemind_log_handler
from shoal.cli import add_option, end_on_signals, value, whole

DESCRIPTION = """\
Runs modules for others, who call them by name, and trains them with each of their backward passes. Options can also be
in a file of YAML, such as `num_experts: 4`; those of the command line come first.
"""
CONFIG = Path("config.yml")

_count = whole("a number from 1 on", 1, 2**31)
_seconds = value("a positive number of seconds", float, lambda seconds: 0 < seconds < 1e9)


class Option(NamedTuple):
    """One option."""

    default: Any
    help: str
    convert: Callable[[str], Any] | None = str
    """``None`` for a switch."""
    metavar: str = "NAME"
    is_list: bool = False


OPTIONS = {
    "num_experts": Option(None, "how many experts", _count, "COUNT"),
    "expert_pattern": Option(None, "of their uids, such as ffn.[0:16].[0:16]; default: expert.0, …", metavar="PATTERN"),
    "expert_uids": Option(None, "their uids, instead of a number", metavar="UID", is_list=True),
    "expert_cls": Option("ffn", "their class"),
    "hidden_dim": Option(1024, "their width", _count, "COUNT"),
    "initial_peers": Option([], "join the swarm of these peers", metavar="ADDRESS", is_list=True),
    "host_maddrs": Option(None, "where to listen; default: all networks, any port", metavar="ADDRESS", is_list=True),
    "announce_maddrs": Option(None, "what others are told instead", metavar="ADDRESS", is_list=True),
    "no_relay": Option(False, "use no relays to reach others, and be none", None),
    "use_auto_relay": Option(False, "shoal always does", None),
    "num_handlers": Option(None, "without effect", _count, "COUNT"),
    "min_batch_size": Option(1, "a batch waits until it has this many rows", _count, "ROWS"),
    "max_batch_size": Option(16384, "the most rows of a batch", _count, "ROWS"),
    "batch_timeout": Option(1.0, "the longest that it waits", _seconds, "SECONDS"),
    "device": Option(None, "where the experts are; default: cuda if there is any"),
    "optimizer": Option("adam", "adam, sgd, or none for experts that do not learn"),
    "scheduler": Option("none", "none or linear"),
    "num_warmup_steps": Option(None, "steps in which the rate rises", _count, "STEPS"),
    "num_training_steps": Option(None, "steps after which it is zero", _count, "STEPS"),
    "clip_grad_norm": Option(None, "the largest norm of an expert's gradients", float, "NORM"),
    "update_period": Option(30.0, "from one declaration and checkpoint to the next", _seconds, "SECONDS"),
    "expiration": Option(None, "how long a declaration holds; default: twice the period", _seconds, "SECONDS"),
    "increase_file_limit": Option(False, "allow more sockets", None),
    "compression": Option("NONE", "the codec of all tensors, such as FLOAT16 or BLOCKWISE_8BIT"),
    "outputs_compression": Option(None, "another codec for outputs"),
    "grad_compression": Option(None, "another codec for gradients"),
    "checkpoint_dir": Option(None, "an existing folder; experts continue from there", Path, "FOLDER"),
    "stats_report_interval": Option(None, "from one line of statistics to the next", _seconds, "SECONDS"),
    "custom_module_path": Option(None, "a file that registers classes of experts", Path, "FILE"),
    "identity_path": Option(None, "file with the key of this peer; made if missing", Path, "FILE"),
    "token": Option(None, "of a private run, as text or as a file (default: SHOAL_TOKEN)", metavar="TOKEN"),
}


def add_parser(subparsers: Any) -> None:
    """Add ``server`` to the subcommands."""
    parser = subparsers.add_parser("server", help="run experts for others", description=DESCRIPTION)
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help=f"options (default: {CONFIG} if it exists)")
    for name, option in OPTIONS.items():
        shown = "" if option.default in (None, False, []) else f" (default: {option.default})"
        how: dict[str, Any] = {"action": "store_true"}
        if option.convert is not None:
            how = {"type": option.convert, "metavar": option.metavar, **({"nargs": "*"} if option.is_list else {})}
        # No default here: what is not given may come from a file.
        add_option(parser, name.replace("_", "-"), help=option.help + shown, default=argparse.SUPPRESS, **how)
    parser.set_defaults(run=run)


def chosen_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The value of each option: from the command line, the file, or the default.

    Raises:
        ValueError: the file has an unknown option, or is none of YAML.
    """
    path = arguments.config or (CONFIG if CONFIG.exists() else None)
    words = [] if path is None else [*_words(path)]
    in_file, given = vars(arguments.parser.parse_args(words)), vars(arguments)
    return {name: given.get(name, in_file.get(name, option.default)) for name, option in OPTIONS.items()}


def _words(path: Path) -> Iterable[str]:
    """The options in a file, as they would be on a command line."""
    try:
        import yaml
    except ModuleNotFoundError:
        message = f"to read {path}, shoal needs PyYAML, which is not installed: pip install 'shoal[server]'"
        raise ModuleNotFoundError(message, name="yaml") from None
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as e:
        raise ValueError(f"{path} is no YAML: {e}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path} must have lines such as `num_experts: 4`")
    for key, given in options.items():
        name = str(key).replace("-", "_")
        if name not in OPTIONS:
            raise ValueError(f"{path} has an unknown option {key!r}; possible are {', '.join(OPTIONS)}")
        if given is True:
            yield f"--{name}"
        elif isinstance(given, list):
            yield from (f"--{name}", *map(str, given))
        elif given not in (None, False):
            yield f"--{name}={given}"


def _show_lines() -> None:
    """Print what concerns the experts, and warnings of everything else."""
    use_hivemind_log_handler("in_hivemind")
    if not setting("LOGLEVEL"):
        logging.getLogger("shoal").setLevel(logging.WARNING)
        for room in ("shoal.moe", "shoal.serving"):
            logging.getLogger(room).setLevel(logging.INFO)


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM and return the exit status."""
    import torch

    from shoal.compression.base import CompressionType
    from shoal.moe.expert_server import Server
    from shoal.net.limits import increase_file_limit

    options = chosen_options(arguments)
    optimizers = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, lr=0.01), "none": None}
    if options["optimizer"] not in optimizers:
        raise ValueError(f"--optimizer must be one of {', '.join(optimizers)}, got {options['optimizer']!r}")
    for name in ("compression", "outputs_compression", "grad_compression"):
        if options[name] is not None and options[name] not in CompressionType.__members__:
            raise ValueError(f"--{name} must be one of {', '.join(CompressionType.__members__)}, got {options[name]!r}")
        options[name] = None if options[name] is None else CompressionType[options[name]]
    options["optim_cls"] = optimizers[options.pop("optimizer")]
    if options.pop("no_relay"):
        options |= {"use_relay": False, "relay": False}
    options["use_auto_relay"] = True
    if options.pop("increase_file_limit"):
        increase_file_limit()
    end_on_signals()
    _show_lines()
    try:
        server = Server.create(**options, start=True)
    except AssertionError as e:
        raise ValueError(str(e)) from e
    except KeyboardInterrupt:
        return 0
    try:
        while server.is_alive():
            time.sleep(0.5)  # waiting for the thread would ignore Ctrl-C on Windows
        return 1
    except KeyboardInterrupt:
        print("Leaving.", file=sys.stderr)
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Leaving takes a moment; a second signal must not interrupt it.
            signal.signal(number, signal.SIG_IGN)
        server.shutdown()
