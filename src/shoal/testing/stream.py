"""A connection between two simulated hosts."""

from __future__ import annotations

import asyncio

from shoal.p2p.identity import PeerID
from shoal.p2p.memory import Piece, PipeEnd
from shoal.p2p.multiaddr import Multiaddr
from shoal.testing.host import Host
from shoal.testing.link import Path

RETRANSMISSION_SECONDS = 900.0
"""For so long a host repeats what nobody acknowledges before it takes the connection for broken, as Linux does."""


class SimulatedStream(PipeEnd):
    """One end. What it sends takes the host's line out, the path, and the other host's line in.

    Args:
        host: where this end is.
        path: the way to the other host.
        number: of the connection, for the trace.
    """

    other: SimulatedStream

    def __init__(self, host: Host, path: Path, number: int, remote: PeerID, address: Multiaddr | None) -> None:
        super().__init__(remote, address)
        self.host, self.number = host, number
        self._path = path
        self._trace, self._rng = host.network.trace, host.network.rng
        self._outgoing = host.outgoing.flow(self._travel)
        self._incoming = host.incoming.flow(self.arrive)
        self._arrival = 0.0  # when the last piece that was sent from here reaches the other host
        self._held: list[Piece] = []  # what reached a cut in the network on the way here
        self._has_doubts = False
        self.break_timer: asyncio.TimerHandle | None = None
        """Breaks the connection, unless this end is closed before."""
        host.streams[self] = None

    # --- from here ----------------------------------------------------------------------------------------------------

    def send(self, piece: Piece) -> None:
        if self.host.is_up:
            self._outgoing.put(piece)

    def _travel(self, piece: Piece) -> None:
        path = self._path
        arrival = self._loop.time() + path.delay
        if path.jitter:
            arrival += path.jitter * self._rng.random()
        self._arrival = max(self._arrival, arrival)
        self._loop.call_at(self._arrival, self.other.reach_host, piece)

    def abort(self) -> None:
        if not self._closed:
            self._outgoing.drop()
            self._travel(None)  # the operating system says so even if the program is gone
            self.end()

    def vanish(self) -> None:
        """This end is gone, and nobody says so."""
        self._outgoing.drop()
        self.end()

    def end(self) -> None:
        if not self._closed:
            self.host.streams.pop(self, None)
            super().end()
            if self.break_timer is not None:
                self.break_timer.cancel()

    def opens_after(self, delay: float) -> None:
        """Nothing that is sent from here arrives before the other end exists."""
        self._arrival = self._loop.time() + delay

    # --- to here ------------------------------------------------------------------------------------------------------

    def reach_host(self, piece: Piece) -> None:
        """A piece has come to the end of the path."""
        if self._path.is_cut or self._held:
            if not self._held:
                self._path.held[self] = None
                self.other.begin_to_doubt()
            self._held.append(piece)
        elif self.host.is_off:
            self.other.begin_to_doubt()
        else:
            self._incoming.put(piece)

    def release(self) -> None:
        """The network is whole again: what was held is repeated and comes through."""
        held, self._held = self._held, []
        for piece in held:
            self.reach_host(piece)

    def arrive(self, piece: Piece) -> None:
        if self._trace is not None:
            event, data = (b"end", b"") if piece is None else (b"data", piece)
            self._trace.record(self._loop.time(), self.number, event, data)
        super().arrive(piece)

    # --- silence ------------------------------------------------------------------------------------------------------

    def begin_to_doubt(self) -> None:
        """What was sent from here is not acknowledged."""
        if not self._has_doubts:
            self._has_doubts = True
            self._loop.call_later(RETRANSMISSION_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._has_doubts = False
        if self.other._held or self.other.host.is_off:
            self.end()
