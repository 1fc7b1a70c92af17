"""The commands ``shoal archive``, which keeps the state of a run, and ``shoal revive``, which brings a run back."""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.logs import one_line, quoted
from shoal.cli import add_option, end_on_signals, run_name, tell_error
from shoal.cli.dht import how_to_join, rate_of
from shoal.cli.token import add_token_option
from shoal.errors import ShoalError
from shoal.net.pasted import read_targets

if TYPE_CHECKING:
    from shoal.dht import DHT

ARCHIVE = """\
Downloads the state of a run now and then, as a newcomer does, and writes it to a folder or to any address that fsspec
can open. Takes no part in the training, and nobody waits for it. If all peers of the run are lost, `shoal revive`
brings it back. Ctrl-C and SIGTERM end it after a last archive. A private run needs a token that allows to train.
"""
REVIVE = """\
Gives the newest good archive of a run to the peers that come, which then train on from there. Start it before them, on
a machine that they can reach. It ends by itself when one of them can give the state to the others.
"""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_parsers(subparsers: Any) -> None:
    """Add ``archive`` and ``revive`` to the subcommands."""
    archive = subparsers.add_parser("archive", help="keep the state of a run in files", description=ARCHIVE)
    archive.add_argument("addresses", nargs="+", metavar="ADDRESS", help="of peers of the run")
    archive.add_argument("folder", metavar="DIR", help="where archives go: a folder, or an address such as s3://…")
    archive.add_argument(
        "--run", dest="run_id", type=run_name, required=True, metavar="NAME", help="the run_id of its optimizers"
    )
    archive.add_argument(
        "--every", type=_seconds, default=600.0, metavar="TIME", help="least time between two, such as 10m (default)"
    )
    archive.add_argument(
        "--keep", type=_count, default=5, metavar="N", help="how many archives stay, and the furthest one (default: 5)"
    )
    archive.add_argument(
        "--rate",
        type=rate_of,
        default=float("inf"),
        metavar="RATE",
        help="most bytes per second to download, such as 5M",
    )
    archive.add_argument("--once", action="store_true", help="write one archive and end")
    _add_identity(archive)
    archive.set_defaults(run=lambda arguments: _guarded("archive", _archive, arguments), ends_with_folder=True)

    revive = subparsers.add_parser("revive", help="bring a run back from an archive", description=REVIVE)
    revive.add_argument("folder", metavar="DIR", help="what `shoal archive` has written to, or one archive in it")
    revive.add_argument(
        "addresses", nargs="*", default=[], metavar="ADDRESS", help="join these peers; none: begin a new swarm"
    )
    for name, what in (
        ("host-maddrs", "where to listen (default: SHOAL_HOST_MADDRS, or all networks on a free port)"),
        ("announce-maddrs", "what others are told instead of that"),
    ):
        add_option(revive, name, nargs="*", default=None, metavar="ADDRESS", help=what)
    _add_identity(revive)
    revive.set_defaults(run=lambda arguments: _guarded("revive", _revive, arguments))


def _add_identity(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser, "identity-path", type=Path, metavar="FILE", help="file with the key of this peer; made if missing"
    )
    add_token_option(parser)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 10m or 2h, got {text}")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text}")
    return int(text)


def _guarded(name: str, command: Callable[[argparse.Namespace, threading.Event], int], arguments: Any) -> int:
    stop = threading.Event()
    end_on_signals()
    try:
        return command(arguments, stop)
    except KeyboardInterrupt:
        _say("Leaving.")
        return 130 if getattr(arguments, "once", False) else 0  # a script waits for that archive, and there is none
    except (ShoalError, ValueError, OSError, ModuleNotFoundError) as error:
        tell_error(name, error)
        return 1


def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def _join(arguments: argparse.Namespace, **options: Any) -> DHT:
    from shoal.dht import DHT

    return DHT(
        initial_peers=arguments.addresses,
        start=True,
        identity_path=arguments.identity_path,
        token=arguments.token,
        **options,
    )


def _is_address(word: str) -> bool:
    try:
        return bool(read_targets(word))
    except ValueError:
        return "/p2p/" in word and "://" not in word


def _archive(arguments: argparse.Namespace, stop: threading.Event) -> int:
    # Imported only here: they load torch, which takes a second and is not needed for other commands.
    from shoal.archive.keeping import Archiver
    from shoal.archive.store import Store

    if _is_address(arguments.folder):
        raise ValueError(f"the last word must be the folder of the archives, got {arguments.folder}")
    store = Store(arguments.folder)
    options = {"every": arguments.every, "keep": arguments.keep, "rate": arguments.rate}
    with _join(arguments, client_mode=True) as dht:
        archiver = Archiver(dht, arguments.run_id, store, say=_say, **options)
        try:
            if arguments.once:
                _say(f"archive of epoch {archiver.write_one().epoch} in {store.url}")
            else:
                try:
                    archiver.run(stop)
                except KeyboardInterrupt:
                    archiver.write_last()
                    raise
        finally:
            archiver.close()
    return 0


def _revive(arguments: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.archive.reviving import Revival
    from shoal.archive.store import Store

    archive = Store.open(arguments.folder)
    run, written = quoted(archive.run_id), one_line(archive.manifest.written)
    _say(f"{archive.path}: epoch {archive.epoch} of run {run}, written {written} UTC")
    with _join(arguments, host_maddrs=arguments.host_maddrs, announce_maddrs=arguments.announce_maddrs) as dht:
        _say(*how_to_join(dht.get_visible_maddrs(), is_private=dht.p2p.membership is not None))
        with Revival(dht, archive) as revival:
            other = revival.run(stop)
    if other is not None:
        _say(f"Peer {other} gives the state now: the run goes on without this one.")
    return 0
