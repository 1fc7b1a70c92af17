"""How much of this peer others may take: connections, handshakes, memory, patience.

Anybody on the internet may connect, and identities cost nothing. So each limit is there twice where that makes sense:
for one peer or one host, so that a single greedy one leaves room for the rest, and in total, so that a crowd of them
cannot exhaust this machine. Who is over a limit is refused and told why; what is given up first when everything is
full is what has been of no use for longest.

Also how many files and sockets this process may have open.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from shoal.p2p.identity import PeerID

# Connections that this peer opens to another one at a time; further calls wait for their turn.
MAX_DIALLED_PER_PEER = 24


@dataclass(frozen=True)
class Limits:
    """What a peer grants to others."""

    handshakes_in_flight: int = 256
    """Connections that have not yet proven who they are. When there are more, the oldest one of the host that has most
    of them is dropped: an honest handshake is over within a few round trips, a half-open one waits for ever."""
    handshakes_per_second: float = 100.0
    """From one host (an IPv4 address, or a /64 of IPv6) on average; a handshake takes about a millisecond of a core."""
    handshake_burst: int = 500
    """How many may come at once from a quiet host, such as the peers of one machine that start together."""
    connections: int = 1024
    """Accepted connections in total. When there are more, the one that has been idle for longest is closed. A quarter
    of the places is for peers that this one calls itself: a crowd of strangers does not keep them out."""
    connections_per_peer: int = 32
    """Accepted connections of one peer. More than an honest peer opens at a time."""
    header_bytes_per_peer: int = 8 * 2**20
    """Memory for large headers that are still arriving from one peer."""
    header_bytes: int = 64 * 2**20
    """The same for all peers together."""
    seconds_for_header: float = 30.0
    """From the prefix of a message to the end of its header."""
    seconds_for_write: float = 120.0
    """For taking a few megabytes that this peer has sent; who is slower reads nothing any more."""
    seconds_idle: float = 300.0
    """Without a call. Dialling peers close their idle connections earlier, so only strange ones get here."""

    @property
    def connections_of_strangers(self) -> int:
        """With so many accepted connections there is no place left for peers that this one does not call."""
        return self.connections - self.connections // 4

    def that_fit(self) -> Limits:
        """The same, but accepted connections take at most half of the files that this process may open."""
        files = open_file_limit()
        return self if files is None else replace(self, connections=max(1, min(self.connections, files // 2)))


DEFAULT_LIMITS = Limits()


class HeaderMemory:
    """Keeps count of the memory taken by large headers on their way in."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_peer: Counter[PeerID] = Counter()
        self.total = 0

    def take(self, peer: PeerID, size: int) -> bool:
        """Ask for memory; whether it was granted."""
        if self.total + size > self._limits.header_bytes:
            return False
        if self._by_peer[peer] + size > self._limits.header_bytes_per_peer:
            return False
        self._by_peer[peer] += size
        self.total += size
        return True

    def give_back(self, peer: PeerID, size: int) -> None:
        """The header has arrived, or will not."""
        self.total -= size
        self._by_peer[peer] -= size
        if not self._by_peer[peer]:
            del self._by_peer[peer]


logger = logging.getLogger(__name__)

# What is tried next after a limit that is too high, as a share of it.
_LESS = 0.9


def increase_file_limit(new_soft: int = 2**15, new_hard: int = 2**15) -> None:
    """Allow this process more open files and sockets. Never lowers a limit and never raises.

    Args:
        new_soft: the limit that counts.
        new_hard: up to which it may be raised without further rights.
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
        while (wanted := int(wanted * _LESS)) > soft > 0 and not _set_limits(wanted, hard):
            # MacOS has one more limit, kern.maxfilesperproc, which these do not tell.
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
    """The same, once in a process, for every peer: each connection is an open file, and macOS allows 256 by default."""
    increase_file_limit()


def open_file_limit() -> int | None:
    """How many files and sockets this process may open; ``None`` if there is no such limit."""
    try:
        resource: Any = importlib.import_module("resource")
    except ImportError:  # Windows
        return None
    soft: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _higher(present: int, wanted: int) -> int:
    """The higher of two limits, of which the present one may be none at all."""
    resource: Any = importlib.import_module("resource")
    return present if present == resource.RLIM_INFINITY else max(present, wanted)
