"""How much of this peer others may take: connections, handshakes, memory, patience.

Anybody on the internet may connect, and identities cost nothing. So most resources have two limits: one for each peer
or host, so that a single greedy one leaves room for the rest, and one in total, so that a crowd cannot exhaust this
machine. A peer over a limit is refused and told why. When everything is full, the connection that has been idle for
longest is closed first.

This module also raises the number of files and sockets that this process may have open.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from shoal.peers.identity import PeerID

# Connections that this peer keeps open to another one at the same time; further calls wait their turn. Chosen: below
# `Limits.connections_per_peer` of the other side.
MAX_DIALLED_PER_PEER = 24


@dataclass(frozen=True)
class Limits:
    """The most that a peer grants to others; each attribute is one limit. All numbers are chosen."""

    files: int | None = None
    """Accepted connections of any kind in the whole process: with :attr:`answered`, at most half of the files that it
    may open, see :meth:`that_fit`. Over the limit, an unproven connection is closed."""
    answered: int = 512
    """Connections that this peer opens because relays say that somebody wants to reach it: at most one per 32 files.
    Over the limit, the oldest of the requests that want most connections are given up."""
    handshakes_in_flight: int = 256
    """Connections that have sent nothing yet, and as many again in a handshake. Over the limit, the host with the most
    of them loses its oldest: an honest handshake is over within a few round trips, a half-open one never ends."""
    handshakes_per_second: float = 100.0
    """Average rate from one host (an IPv4 address or an IPv6 /64); a handshake takes about a millisecond of a core."""
    handshake_burst: int = 500
    """How many may come at once from a quiet host, such as the peers of one machine that start together."""
    connections: int = 1024
    """Accepted connections in total. Over the limit, the connection that has been idle for longest is closed. A quarter
    of the places is reserved for peers that this one calls itself, so a crowd of strangers does not keep them out."""
    connections_per_peer: int = 32
    """Accepted connections of one peer; more than an honest peer opens at the same time."""
    refusals: int = 64
    """Refused connections that are being told the reason at the same time; further ones are just cut."""
    header_bytes_per_peer: int = 8 * 2**20
    """Memory for large headers that are still arriving from one peer; only bytes that have arrived count."""
    header_bytes: int = 64 * 2**20
    """The same for all peers together."""
    seconds_for_header: float = 30.0
    """From the prefix of a message to the end of its header."""
    seconds_for_first_message: float = 10.0
    """From the opening of a call to its first message; until then the call counts as unused."""
    seconds_of_silence: float = 60.0
    """Silence of a caller while its handler waits for it, unless the method is marked :func:`~shoal.p2p.patient`."""
    seconds_for_write: float = 120.0
    """Time to take a few megabytes that this peer sends; a slower peer is taken to have stopped reading."""
    seconds_idle: float = 300.0
    """Time without a call. Diallers close their idle connections earlier, so ordinary peers never reach this limit."""

    @property
    def connections_of_strangers(self) -> int:
        """The number of accepted connections from which strangers are turned away."""
        return self.connections - self.connections // 4

    def that_fit(self) -> Limits:
        """The same limits, scaled down to at most half of the files that this process may open.

        Connections, handshakes, refusals and circuits all shrink in proportion, so that none can crowd out another.
        """
        files = open_file_limit()
        if files is None:
            return self
        share, answered = _share_of(files), _answered(files)
        return replace(
            self,
            files=max(1, files // 2 - answered),
            answered=min(self.answered, answered),
            connections=_fitting(self.connections, DEFAULT_LIMITS.connections, share),
            handshakes_in_flight=_fitting(self.handshakes_in_flight, DEFAULT_LIMITS.handshakes_in_flight, share),
            refusals=_fitting(self.refusals, DEFAULT_LIMITS.refusals, share),
        )


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class RelayLimits:
    """The most that a relay grants to peers that cannot be called otherwise. All numbers are chosen."""

    reservations: int = 128
    """A relay that has granted half of them takes only peers that find no other relay. Over the limit, a peer without
    any relay evicts one that has another relay, or that was not called for minutes; others are refused."""
    reservations_per_host: int = 16
    """More than one: peers behind carrier-grade NAT share an address."""
    circuits: int = 256
    circuits_per_peer: int = 32
    """Circuits dialled by one peer; while half of all circuits are in use, by its whole public host."""
    circuits_per_pair: int = 24
    """Circuits from one peer to the same other one: :data:`MAX_DIALLED_PER_PEER`, as over direct connections."""
    rate: float | None = 6_250_000.0
    """Bytes per second for all circuits together, which an uplink carries in each direction. Busy circuits share it
    equally. ``None``: no limit, for machines that do nothing else."""
    connects_per_second: float = 20.0
    """Average rate at which the peers of one host may ask for circuits."""
    connect_burst: int = 500
    """How many such requests may come at once."""

    def that_fit(self) -> RelayLimits:
        """The same limits, but with no more circuits than the files of this process allow, see :class:`Limits`."""
        files = open_file_limit()
        if files is None:
            return self
        return replace(self, circuits=_fitting(self.circuits, DEFAULT_RELAY_LIMITS.circuits, _share_of(files)))


DEFAULT_RELAY_LIMITS = RelayLimits()
# The files that others may take under the limits above; a circuit has two ends.
_ALL_FILES = (
    DEFAULT_LIMITS.connections
    + 2 * DEFAULT_LIMITS.handshakes_in_flight
    + DEFAULT_LIMITS.refusals
    + 2 * DEFAULT_RELAY_LIMITS.circuits
)


def _fitting(limit: int, default: int, share: float) -> int:
    """A limit, but at most this share of the default one, and at least 1."""
    return min(limit, max(1, int(default * share)))


def _answered(files: int) -> int:
    """The files that a process may open on the word of relays: at least as many as one caller asks for."""
    return min(DEFAULT_LIMITS.answered, max(8, files // 32))


def _share_of(files: int) -> float:
    """The share of the default limits that fits into half of the files of a process."""
    return min(1.0, max(0.0, files / 2 - _answered(files)) / _ALL_FILES)


class HeaderMemory:
    """Counts the memory taken by large headers that are still arriving."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.by_peer: Counter[PeerID] = Counter()
        """Bytes taken, by peer."""
        self.total = 0

    def take(self, peer: PeerID, size: int) -> bool:
        """Ask for memory; returns whether it was granted."""
        if self.total + size > self._limits.header_bytes:
            return False
        if self.by_peer[peer] + size > self._limits.header_bytes_per_peer:
            return False
        self.by_peer[peer] += size
        self.total += size
        return True

    def give_back(self, peer: PeerID, size: int) -> None:
        """Release memory: the header has arrived, or never will."""
        self.total -= size
        self.by_peer[peer] -= size
        if not self.by_peer[peer]:
            del self.by_peer[peer]


logger = logging.getLogger(__name__)


def increase_file_limit(new_soft: int = 2**15, new_hard: int = 2**15) -> None:
    """Allow this process more open files and sockets. Never lowers a limit and never raises.

    Args:
        new_soft: the limit in force.
        new_hard: the ceiling up to which a process without special rights may raise the soft limit.
    """
    try:
        resource: Any = importlib.import_module("resource")
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Only the superuser may raise the hard limit.
    for allowed in (_higher(hard, new_hard), hard):
        wanted = _higher(soft, new_soft)
        if allowed != resource.RLIM_INFINITY:
            wanted = allowed if wanted == resource.RLIM_INFINITY else min(wanted, allowed)
        if _set_limits(wanted, allowed):
            break
    else:
        while (wanted := int(0.9 * wanted)) > soft > 0 and not _set_limits(wanted, hard):
            # macOS has another limit, kern.maxfilesperproc, which getrlimit does not report.
            pass
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _higher(soft, new_soft) != soft:
        logger.info("at most %d files and sockets can be open in this process, not the wanted %d", soft, new_soft)


def _set_limits(soft: int, hard: int) -> bool:
    resource: Any = importlib.import_module("resource")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (ValueError, OSError) as e:
        logger.debug("cannot allow %d open files (at most %d): %s", soft, hard, e)
        return False
    return True


@functools.cache
def have_enough_files() -> None:
    """Raise the limit once per process: each connection is an open file, and macOS allows 256 by default."""
    increase_file_limit()


def open_file_limit() -> int | None:
    """How many files and sockets this process may open; ``None`` if there is no such limit."""
    try:
        resource: Any = importlib.import_module("resource")
    except ImportError:  # Windows
        return None
    soft: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def more_files() -> str:
    """How many files this process may open, and how to allow it more."""
    files = open_file_limit()
    if files is None:
        return "This system gives it no more"
    # 4096 are enough for all that is granted to others, and as much for the user.
    return f"This process may open {files} files; allow more: ulimit -n {max(4096, 2 * files)}"


def _higher(present: int, wanted: int) -> int:
    """The higher of two limits; the present one may be unlimited."""
    resource: Any = importlib.import_module("resource")
    return present if present == resource.RLIM_INFINITY else max(present, wanted)
