"""The commands ``shoal archive``, which keeps the state of a run, and ``shoal revive``, which brings a run back."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import threading
from typing import TYPE_CHECKING, Any

from shoal.base.logs import one_line, quoted
from shoal.cli import (
    add_addresses,
    add_identity,
    add_listening,
    add_run_name,
    end_on_signals,
    rate_of,
    value,
    whole,
)
from shoal.cli.dht import how_to_join
from shoal.net.pasted import read_targets

if TYPE_CHECKING:
    from shoal.dht import DHT

ARCHIVE = """\
Downloads the state of a run from time to time, as a newcomer does, and writes it to a folder or to any address that
fsspec can open. It does not train, and no peer waits for it. If all peers of the run are lost, `shoal revive` restores
it. Ctrl-C and SIGTERM end it after a last archive. A private run needs a token with the role train.
"""
REVIVE = """\
Serves the newest good archive of a run to peers, which continue training from it. Start it before them, on a machine
that they can reach. It ends by itself once one of them can serve the state to the others.
"""


def _seconds(text: str) -> float:
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:])
    return float(text) if factor is None else float(text[:-1]) * factor


def add_parsers(subparsers: Any) -> None:
    """Add ``archive`` and ``revive`` to the subcommands."""
    archive = subparsers.add_parser("archive", help="keep the state of a run in files", description=ARCHIVE)
    add_addresses(archive, "of peers of the run", nargs="+")
    archive.add_argument("folder", metavar="DIR", help="where archives go: a folder, or an address such as s3://…")
    add_run_name(archive)
    time = value("a time such as 90s, 10m or 2h", _seconds, lambda seconds: 0 < seconds < threading.TIMEOUT_MAX)
    archive.add_argument(
        "--every", type=time, default=600.0, metavar="TIME", help="least time between two, such as 10m (default)"
    )
    archive.add_argument(
        "--keep",
        type=whole("a number from 1 on", 1, sys.maxsize),
        default=5,
        metavar="N",
        help="how many archives to keep, besides the one of the highest epoch (default: 5)",
    )
    archive.add_argument(
        "--rate", type=rate_of, default=math.inf, metavar="RATE", help="most bytes per second to download, such as 5M"
    )
    archive.add_argument("--once", action="store_true", help="write one archive and end")
    add_identity(archive)
    archive.set_defaults(run=_archive, ends_with_folder=True)

    revive = subparsers.add_parser("revive", help="bring a run back from an archive", description=REVIVE)
    revive.add_argument("folder", metavar="DIR", help="what `shoal archive` has written to, or one archive in it")
    add_addresses(revive, "join these peers; none: begin a new swarm")
    revive.add_argument(
        "--stage",
        type=whole("the number of a stage, from 0 on", 0, sys.maxsize),
        metavar="N",
        help="only this stage of a run in stages, on a machine that has no memory for all of them",
    )
    add_listening(revive, "all networks on a free port")
    add_identity(revive)
    revive.set_defaults(run=_revive)


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


def _archive(arguments: argparse.Namespace) -> int:
    end_on_signals()
    try:
        _keep(arguments)
    except KeyboardInterrupt:
        _say("Leaving.")
        return 130 if arguments.once else 0  # with --once a script expects an archive, and there is none
    return 0


def _keep(arguments: argparse.Namespace) -> None:
    # Imported only here, because they load torch, which takes a second and which other commands do not need.
    from shoal.archive.keeping import Archiver
    from shoal.archive.store import Store
    from shoal.stages.directory import stages_of

    if _is_address(arguments.folder):
        raise ValueError(f"the last word must be the folder of the archives, got {arguments.folder}")
    store = Store(arguments.folder)
    options: dict[str, Any] = {"every": arguments.every, "keep": arguments.keep, "rate": arguments.rate}
    with (
        _join(arguments, client_mode=True) as dht,
        contextlib.closing(
            Archiver(dht, arguments.run_id, store, say=_say, find_stages=stages_of, **options)
        ) as archiver,
    ):
        if arguments.once:
            _say(f"archive of epoch {archiver.write_one().epoch} in {store.url}")
            return
        try:
            archiver.run(threading.Event())
        except KeyboardInterrupt:
            archiver.write_last()
            raise


def _revive(arguments: argparse.Namespace) -> int:
    from shoal.archive.reviving import Revival
    from shoal.archive.store import Store

    end_on_signals()
    try:
        archive = Store.open(arguments.folder, arguments.stage)
        run, written = quoted(archive.run_id), one_line(archive.manifest.written)
        _say(f"{archive.path}: epoch {archive.epoch} of run {run}, written {written} UTC")
        with _join(arguments, host_maddrs=arguments.host_maddrs, announce_maddrs=arguments.announce_maddrs) as dht:
            _say(*how_to_join(dht.get_visible_maddrs(), is_private=dht.p2p.membership is not None))
            with Revival(dht, archive) as revival:
                other = revival.run(threading.Event())
    except KeyboardInterrupt:
        _say("Leaving.")
        return 0
    _say(f"Peer {other} gives the state now: the run continues without this one.")
    return 0
