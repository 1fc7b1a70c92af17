"""What a pool has of one peer: connections, dials in progress, and calls that wait for either."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shoal.net.connection import Connection
from shoal.net.limits import MAX_DIALLED_PER_PEER
from shoal.peers.identity import PeerID

# Dials to one peer at the same time.
MAX_PARALLEL_DIALS = 2
# After a dial has failed, calls that can wait for another one's connection do so for as long.
BARREN_SECONDS = 10.0
SPARE = 4
"""So many direct connections are made at least to a peer that only relays lead to. A round takes two or more, and other
calls come meanwhile. When no relay is left, there will be no more."""

# What a waiting call gets: a connection, or the right to dial one.
Turn = Connection | None


@dataclass(eq=False)
class PooledPeer:
    """The connections and waiting calls of one peer."""

    peer_id: PeerID
    idle: list[Connection] = field(default_factory=list)
    in_use: dict[Connection, None] = field(default_factory=dict)
    dialling: int = 0
    expected: int = 0
    """As many of the dials are made elsewhere, and whoever waits may have their connections."""
    waiting: dict[asyncio.Future[Turn], asyncio.Task[Connection] | None] = field(default_factory=dict)
    """In order, each with the dial that its call makes meanwhile."""
    barren_until: float = 0.0
    """Until then it is not worth dialling, in the time of the loop."""

    @property
    def may_dial(self) -> bool:
        connections = len(self.in_use) + len(self.idle) + self.dialling
        if self.has_arranged_in_use and asyncio.get_running_loop().time() < self.barren_until:
            return False
        return self.dialling < MAX_PARALLEL_DIALS and connections < MAX_DIALLED_PER_PEER

    @property
    def has_arranged_in_use(self) -> bool:
        """Some call uses a connection that relays have brought about, and will give it back."""
        return any(each.stream.is_arranged for each in self.in_use)

    @property
    def has_direct(self) -> bool:
        return any(not each.stream.is_relayed for each in (*self.idle, *self.in_use))

    @property
    def is_forgettable(self) -> bool:
        return not (self.idle or self.in_use or self.dialling or self.waiting)

    def next_in_line(self, *, to_dial: bool = False) -> asyncio.Future[Turn] | None:
        if not self.waiting:
            return None
        for turn, own_dial in list(self.waiting.items()):
            if to_dial and own_dial is not None and not own_dial.done():
                continue
            del self.waiting[turn]
            if not turn.done():
                return turn
        return None
