"""A list of the runs in a swarm, to show a user the runs that exist when the name of a run is mistyped.

A few peers of each run keep a small signed record under one key of the DHT: the number of peers in their run. Only
monitors, and peers that find nobody in their own run, read the records. Runs with a token are not listed. The records
are claims of strangers, so they are only shown to people.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable
from statistics import median_low
from typing import Any

from shoal.averaging.groups.keys import Table
from shoal.base.clock import get_dht_time
from shoal.base.logs import counted, one_line
from shoal.dht.crypto import peer_of, tag_of
from shoal.dht.validation import is_short_lived
from shoal.errors import ShoalError
from shoal.optim.progress.board import ProgressBoard
from shoal.p2p import P2P, PeerID

logger = logging.getLogger(__name__)

KEY = "shoal_runs"
# Seconds for which a record is valid, and between two checks whether the run needs one. Chosen: a keeper renews
# its record in the last third of its lifetime.
LIFETIME, PERIOD = 1800.0, 600.0
# How many peers keep a record of a run, and how many peers of a large run check whether one is missing. Chosen: a few
# suffice, and more would only add traffic.
KEEPERS, LOOKERS = 3, 12
# Seconds after which a peer that has met nobody reads the list. Chosen: usually peers meet within a few seconds.
ALONE_SECONDS = 20.0
# How many records are read, and from how many of the nodes that hold them. Chosen: bounds the traffic of a reading.
MOST_READ, HOLDERS_READ = 256, 2
# Limits on what a record may claim. Chosen.
MAX_NAME_BYTES, MOST_PEERS = 64, 10**6
# How many runs a message names. Chosen: it must fit into a log line or two.
RUNS_SHOWN = 5

_OWNER = b"[owner:"


def name_in_list(run_id: str) -> str:
    """The name of a run as it is listed: long names are cut."""
    return run_id.encode()[:MAX_NAME_BYTES].decode(errors="ignore")


async def read_runs(table: Table) -> dict[str, dict[PeerID, tuple[int, float]]]:
    """Read the list.

    Returns:
        By the name of each run, the peers that keep a record of it: how many peers they say it has, and the DHT time
        at which their record expires.
    """
    how: dict[str, Any] = {"beam_size": HOLDERS_READ, "num_workers": 1, "most_entries": MOST_READ}
    found = await table.get(KEY, latest=True, keep_copies=False, **how)
    entries = found.value if found is not None and isinstance(found.value, dict) else {}
    runs = dict[str, dict[PeerID, tuple[int, float]]]()
    for subkey, entry in list(entries.items())[:MOST_READ]:
        try:
            name, keeper = _parse(subkey)
        except ValueError as e:
            logger.debug("skipped a malformed record of a run: %s", e)
            continue
        if type(entry.value) is int and entry.value > 0 and is_short_lived(entry.expiration_time):
            claim = min(entry.value, MOST_PEERS), float(entry.expiration_time)
            runs.setdefault(name, {})[keeper] = claim
    return runs


def _parse(subkey: object) -> tuple[str, PeerID]:
    """The run and the peer of a record.

    Raises:
        ValueError: it is no record of a run.
    """
    if not isinstance(subkey, bytes) or (start := subkey.find(_OWNER)) < 1:
        raise ValueError("it names no run or no peer")
    if start > MAX_NAME_BYTES:
        raise ValueError("the name of its run is too long")
    return subkey[:start].decode(), peer_of(subkey[start:])  # a UnicodeDecodeError is a ValueError


def describe_runs(runs: dict[str, dict[PeerID, tuple[int, float]]], own: PeerID | None = None) -> list[str]:
    """The runs in words, those with most keepers first: ``12 peers here train 'digits'``.

    Args:
        own: leave out the runs of which this peer keeps a record itself.
    """
    others = {name: keepers for name, keepers in runs.items() if own not in keepers}
    peers = {name: median_low(count for count, _ in keepers.values()) for name, keepers in others.items()}
    largest = sorted(others, key=lambda name: (-len(others[name]), -peers[name], name))
    told = [
        f"{counted(peers[name], 'peer')} here {'trains' if peers[name] == 1 else 'train'} {one_line(name)!r}"
        for name in largest[:RUNS_SHOWN]
    ]
    rest = len(largest) - RUNS_SHOWN
    return told if rest <= 0 else [*told, f"there are {counted(rest, 'more run')}"]


class RunList:
    """One peer's part in the list. Lives in the event loop.

    Args:
        table: the DHT.
        p2p: this peer.
        run_id: name of the run.
        board: knows the peers of the run.
    """

    def __init__(self, table: Table, p2p: P2P, run_id: str, board: ProgressBoard) -> None:
        self._table, self._p2p, self._run_id, self._board = table, p2p, run_id, board
        self._name = name_in_list(run_id)
        self._subkey = self._name.encode() + tag_of(p2p.peer_id)
        self._listed_until = -math.inf

    def _num_peers(self) -> int:
        return self._board.global_progress(get_dht_time()).num_peers

    def _is_alone(self) -> bool:
        return not self._board.present(get_dht_time())

    async def keep(self) -> None:
        """Keep the run in the list until cancelled. If this peer is alone, tell its user once which runs there are."""
        rng, loop = self._p2p.rng, asyncio.get_running_loop()
        began = loop.time()
        # Peers of a large run look at different times, and find that the first ones have listed it.
        await asyncio.sleep(rng.uniform(0.5, 1.5) * min(60.0, 1.0 + self._num_peers() / KEEPERS))
        await self._try(self._list_if_needed())
        await asyncio.sleep(max(0.0, began + ALONE_SECONDS - loop.time()))
        if self._is_alone():
            await self._try(self._tell_other_runs())
        while True:
            await asyncio.sleep(PERIOD * rng.uniform(0.75, 1.0))
            if rng.random() * self._num_peers() < LOOKERS:
                await self._try(self._list_if_needed())

    async def _try(self, work: Awaitable[None]) -> None:
        try:
            await work
        except ShoalError as e:  # the list only helps people
            logger.debug("the list of runs cannot be read or written: %s", e)

    async def _list_if_needed(self) -> None:
        now = get_dht_time()
        keepers = (await read_runs(self._table)).get(self._name, {})
        others = [
            until for keeper, (_, until) in keepers.items() if keeper != self._p2p.peer_id and until - now > PERIOD
        ]
        if len(others) >= KEEPERS or self._listed_until - now > PERIOD:
            return
        until = now + LIFETIME
        peers = max(1, min(self._num_peers(), MOST_PEERS))
        if await self._table.store(KEY, peers, until, subkey=self._subkey):
            self._listed_until = until

    async def _tell_other_runs(self) -> None:
        runs = await read_runs(self._table)
        others = describe_runs({name: each for name, each in runs.items() if name != self._name}, self._p2p.peer_id)
        is_listed = set(runs.get(self._name, {})) - {self._p2p.peer_id}
        if others and not is_listed and self._is_alone():
            logger.warning("%s, none %r. Is run_id right?", ", ".join(others), self._run_id)

    async def withdraw(self) -> None:
        """Withdraw this peer's record, because it leaves."""
        if self._listed_until > get_dht_time():
            await self._table.store(KEY, None, math.nextafter(self._listed_until, math.inf), subkey=self._subkey)
