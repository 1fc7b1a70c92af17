"""The ``shoal monitor`` command: shows a run, in the terminal, as a page, or to other programs."""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.cli import add_addresses, add_identity, add_option, add_run_name, end_on_signals, port_of, whole
from shoal.dht import DHT
from shoal.errors import torch_is_missing

if TYPE_CHECKING:
    from shoal.monitor.exporters import Exporter
    from shoal.monitor.run import RunView

DESCRIPTION = """\
Shows a run while it trains: its peers, how fast they are, their losses if they report them, what has failed and why.
It joins as an observer: no peer waits for it, and it changes nothing.
"""
EPILOG = """\
Peers report their own figures with optimizer.report(loss=loss). Without that, only their progress is seen.
"""
# Chosen: unassigned by IANA, and below the ports that systems choose themselves.
WEB_PORT = 7463

T = TypeVar("T")


def add_parser(subparsers: Any) -> None:
    """Add ``monitor`` to the subcommands."""
    parser = subparsers.add_parser("monitor", help="watch a run", description=DESCRIPTION, epilog=EPILOG)
    add_addresses(parser, "of one or more peers of the run")
    add_option(parser, "initial-peers", nargs="*", default=[], metavar="ADDRESS", help="the same, as an option")
    add_run_name(parser)
    add_identity(parser, "file with the key of this peer, if the token is a badge")
    parser.add_argument(
        "--web",
        nargs="?",
        type=port_of,
        const=WEB_PORT,
        metavar="PORT",
        help=f"show a page instead, at this port of this machine (default: {WEB_PORT}; 0 = any)",
    )
    add_option(
        parser,
        "web-host",
        default="127.0.0.1",
        metavar="HOST",
        help="show it at this IP address of the machine; with 0.0.0.0, everybody who can reach the machine sees it",
    )
    add_option(
        parser,
        "goal-epochs",
        type=whole("the number of an epoch, from 1", 1, 2**53),
        default=0,
        metavar="N",
        help="the epoch at which the run is to end: shows how long that will take",
    )
    parser.add_argument("--tensorboard", metavar="DIR", help="write the figures of the swarm there, for TensorBoard")
    parser.add_argument("--wandb", metavar="PROJECT", help="log the figures of the swarm to Weights & Biases")
    parser.add_argument(
        "--prometheus", type=port_of, metavar="PORT", help="show the figures to Prometheus at this port"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Watch until SIGINT or SIGTERM and return the exit status."""
    end_on_signals()
    try:
        with ExitStack() as stack:
            _watch(arguments, stack)
    except KeyboardInterrupt:
        pass
    return 0


def _watch(arguments: argparse.Namespace, stack: ExitStack) -> None:
    addresses = [*arguments.addresses, *arguments.initial_peers]
    if not addresses:
        raise ValueError("give the address of at least one peer of the run, such as the one that shoal dht prints")
    if importlib.util.find_spec("torch") is None:  # check before joining
        raise torch_is_missing()
    dht = stack.enter_context(
        DHT(
            addresses,
            start=True,
            client_mode=True,
            token=arguments.token,
            identity_path=arguments.identity_path,
        )
    )
    # Imported only here, because it loads torch, which takes longer than finding out that no peer answers.
    from shoal.monitor.observer import Monitor

    monitor = stack.enter_context(Monitor(dht, arguments.run_id, goal_epochs=arguments.goal_epochs))
    footer = _show_page(arguments, monitor.view, stack)
    exporters = _exporters(arguments, monitor.view, stack)
    screen: Any = stack.enter_context(_screen(footer, is_page=arguments.web is not None))
    pause = threading.Event()
    while True:
        # Short waits, because a wait for an event ignores Ctrl-C on Windows.
        pause.wait(1.0)
        monitor.check()
        for exporter in exporters:
            exporter.note(monitor.view)
        screen.show(monitor.view)


def _show_page(arguments: argparse.Namespace, view: RunView, stack: ExitStack) -> str:
    """Start the page if it is wanted; returns a line that tells where it is."""
    if arguments.web is None:
        return ""
    page = start_page(view, arguments.web, arguments.web_host, is_chosen=arguments.web != WEB_PORT)
    stack.enter_context(closing(page))
    line = f"Watch {arguments.run_id} at {page.url}"
    print(line, flush=True)
    return line


def check_page() -> None:
    """Check that the packages for the page are installed.

    Raises:
        ModuleNotFoundError: they are not; the text says which one is missing.
    """
    try:
        importlib.import_module("shoal.monitor.page")
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        raise ModuleNotFoundError(f"the page needs {package}: pip install 'shoal[monitor]'", name=package) from None


def start_page(view: RunView, port: int, host: str = "127.0.0.1", *, is_chosen: bool = True) -> Any:
    """Serve the page of a run.

    Args:
        is_chosen: whether the user has chosen this port, so that no other one will do.

    Raises:
        ModuleNotFoundError: packages are missing; the text says which.
        OSError: the port is taken.
    """
    check_page()
    from shoal.monitor.page import PageServer

    try:
        return PageServer(view, port, host)
    except OSError as e:
        reason = e.strerror or os.strerror(e.errno or 0)
        if e.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise OSError(f"cannot listen at {host} ({reason}): give --web-host an address of this machine") from None
        if not is_chosen:
            return PageServer(view, 0, host)
        raise OSError(f"cannot listen at {host}, port {port} ({reason}): choose another one, or --web 0") from None


def _exporters(arguments: argparse.Namespace, view: RunView, stack: ExitStack) -> list[Exporter]:
    from shoal.monitor.exporters import Prometheus, TensorBoard, Wandb

    wanted: list[tuple[Any, Callable[[Any], Exporter]]] = [
        (arguments.tensorboard, TensorBoard),
        (arguments.wandb, lambda project: Wandb(project, arguments.run_id)),
        (arguments.prometheus, lambda port: serve_to_prometheus(view, port)),
    ]
    exporters = [make(argument) for argument, make in wanted if argument is not None]
    for exporter in exporters:
        stack.callback(exporter.close)
        if isinstance(exporter, Prometheus):
            print(f"For Prometheus: {exporter.url}", flush=True)
    return exporters


def serve_to_prometheus(view: RunView, port: int) -> Exporter:
    """Show the figures to Prometheus.

    Raises:
        OSError: the port is taken.
    """
    from shoal.monitor.exporters import Prometheus

    try:
        return Prometheus(view, port)
    except OSError as e:
        reason = e.strerror or os.strerror(e.errno or 0)
        raise OSError(f"Prometheus cannot be served at port {port} ({reason}): choose another --prometheus") from None


def _screen(footer: str, *, is_page: bool) -> Any:
    from shoal.monitor.terminal import Lines, Screen

    if is_page or not sys.stdout.isatty():
        return Lines()
    try:
        return Screen(footer)
    except ModuleNotFoundError:
        print("For a live table: pip install 'shoal[monitor]'", file=sys.stderr)
        return Lines()
