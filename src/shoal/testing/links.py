"""Carries data between simulated machines: access lines, the paths between them, and connections.

All connections of a machine share the rate of its access line fairly. Each pair of machines has a path with its own
delay between their access lines. A connection (:class:`SimulatedStream`) sends through the line of its machine, the
path, and the line of the other machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from shoal.net.memory import Piece, PipeEnd
from shoal.testing.loop import Machine
from shoal.testing.nat import Nat

_MOMENT = struct.Struct("<dq")


class Trace:
    """Records everything that reaches a host, with its time and its bytes.

    Args:
        keep_lines: keep one readable line per event, to find where two runs diverge.
    """

    def __init__(self, *, keep_lines: bool = False) -> None:
        self.events = 0
        self.lines: list[str] = []
        self._keep_lines = keep_lines
        self._hash = hashlib.blake2b(digest_size=16)

    def record(self, moment: float, connection: int, event: bytes, data: bytes | memoryview = b"") -> None:
        """Record an event.

        Args:
            moment: its time, in seconds of the loop.
            connection: number of the connection.
            event: what happened, in one word.
            data: the bytes that arrived.
        """
        self.events += 1
        self._hash.update(_MOMENT.pack(moment, connection))
        self._hash.update(event)
        self._hash.update(data)
        if self._keep_lines:
            self.lines.append(f"{moment:.9f} #{connection} {event.decode()} {bytes(data).hex()}")

    def digest(self) -> str:
        """The hash of all events so far, in hexadecimal."""
        return self._hash.hexdigest()


# A turn lasts a millisecond, but sends at least an Ethernet packet, and at most what a system sends at once. Chosen.
_TURN_SECONDS = 0.001
_MIN_TURN_BYTES = 1500
_MAX_TURN_BYTES = 2**16
_QUEUE_SECONDS = 0.01  # chosen: the longest wait of small pieces that pass in order, without turns


class AccessLine:
    """A host's line in one direction. It serves its flows in turn, about a millisecond each.

    Args:
        rate: bytes per second; ``None`` = no limit.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._loop = asyncio.get_running_loop()
        self._turns: deque[Flow] = deque()  # the first one is being served
        self.busy_until = 0.0
        """Loop time at which everything sent by :meth:`pass_at_once` will have passed."""

    def pass_at_once(self, size: int) -> float | None:
        """Loop time at which a small piece will have passed; ``None`` if it has to wait for a turn."""
        rate, now = self.rate, self._loop.time()
        if rate is None or size > _MIN_TURN_BYTES or self._turns or self.busy_until > now + _QUEUE_SECONDS:
            return None
        self.busy_until = max(self.busy_until, now) + size / rate
        return self.busy_until

    def pass_after_all(self, forward: Callable[[Piece], None], piece: Piece) -> None:
        """Forward a piece that takes no time, after everything that :meth:`pass_at_once` has accepted."""
        is_busy = self.busy_until > self._loop.time()
        self._loop.call_at(self.busy_until, forward, piece) if is_busy else forward(piece)

    def flow(self, forward: Callable[[Piece], None]) -> Flow:
        """A connection's share of the line; data that has passed goes to ``forward``."""
        return Flow(self, forward)

    def enqueue(self, flow: Flow) -> None:
        """Add a flow that has something to send."""
        self._turns.append(flow)
        if len(self._turns) == 1:
            self._serve()

    def _serve(self) -> None:
        queue, rate = self._turns[0].queue, math.inf if self.rate is None else self.rate
        size = len(queue[0] or b"") if queue else 0
        if size > _MIN_TURN_BYTES and rate < math.inf:
            size = min(size, max(_MIN_TURN_BYTES, int(rate * _TURN_SECONDS)), _MAX_TURN_BYTES)
        self._loop.call_at(max(self.busy_until, self._loop.time()) + size / rate, self._served, size)

    def _served(self, size: int) -> None:
        flow = self._turns.popleft()
        flow.pass_on(size)
        if flow.queue:
            self._turns.append(flow)
        if self._turns:
            self._serve()


class Flow:
    """The data that one connection sends through an :class:`AccessLine`.

    Attributes:
        queue: pieces that have not passed yet; short, and never starts with the end of the stream or an empty piece.
    """

    __slots__ = ("_forward", "_line", "queue")

    def __init__(self, line: AccessLine, forward: Callable[[Piece], None]) -> None:
        self._line, self._forward = line, forward
        self.queue: list[Piece] = []

    def pass_at_once(self, piece: Piece) -> float | None:
        """Loop time at which a piece will have passed; ``None`` if it must be :meth:`put`."""
        return None if self.queue or not piece else self._line.pass_at_once(len(piece))

    def put(self, piece: Piece) -> None:
        """Send a piece after the ones before it; a piece that needs no time goes through at once."""
        queue = self.queue
        if queue:
            queue.append(piece)
        elif not piece or self._line.rate is None:
            self._line.pass_after_all(self._forward, piece)
        else:
            queue.append(piece)
            self._line.enqueue(self)

    def pass_on(self, size: int) -> None:
        """Forward this many bytes of the first piece, which have passed the line."""
        queue = self.queue
        if not queue:  # dropped in the meantime
            return
        head = queue[0] or b""
        if size < len(head):
            rest = memoryview(head)
            queue[0] = rest[size:]
            self._forward(rest[:size])
        else:
            del queue[0]
            self._forward(head)
        while queue and not queue[0]:
            self._forward(queue.pop(0))

    def drop(self) -> None:
        """Drop everything that has not passed yet."""
        self.queue.clear()


@dataclass(frozen=True)
class Link:
    """How the network behaves between two hosts."""

    delay: float | tuple[float, float] = 0.0
    """Seconds one way. With a range, the delay of each pair of hosts is drawn once from it."""
    jitter: float = 0.0
    """Most extra seconds, drawn for each message. Messages of one connection never overtake each other."""
    dial_failure: float = 0.0
    """Probability that an attempt to connect fails."""
    break_rate: float = 0.0
    """Breaks per second of a connection; with 0.01 it lives for 100 seconds on average."""


class Path:
    """The state of the network between two hosts, in both directions.

    Attributes:
        delay: seconds one way, drawn from the link's range.
        is_cut: whether the path is cut, so that nothing gets through.
        held: connection ends that have data waiting at the cut, in order.
    """

    __slots__ = ("delay", "held", "is_cut", "jitter", "link")  # there is one for each pair of peers that ever met

    def __init__(self, link: Link, delay: float, is_cut: bool) -> None:
        self.held: dict[SimulatedStream, None] = {}
        self.is_cut = is_cut
        self.change(link, delay)

    def change(self, link: Link, delay: float) -> None:
        """Change the link and delay; data in flight is not affected."""
        self.link, self.delay, self.jitter = link, delay, link.jitter

    def release_held(self) -> None:
        """Let the data through that waits at the cut."""
        held, self.held = self.held, {}
        for stream in held:
            stream.release()


class HostState(Enum):
    """Whether a host works, and if not, how it looks from outside."""

    UP = "up"
    CRASHED = "crashed"
    """The program is gone, and the machine says so: its connections have ended, and new ones are refused."""
    OFF = "off"
    """The machine is gone: it answers nothing, and its connections seem open but silent."""


class Station(Machine):
    """A machine on the network: its access line in each direction, its connections, and its ways to die.

    Args:
        uplink: bytes per second that its connections can send together; ``None`` = no limit.
        downlink: bytes per second that they can receive together.
    """

    def __init__(self, uplink: float | None, downlink: float | None) -> None:
        self.state = HostState.UP
        self.outgoing, self.incoming = AccessLine(uplink), AccessLine(downlink)
        self.streams: dict[SimulatedStream, None] = {}

    @property
    def is_up(self) -> bool:
        """Whether it works."""
        return self.state is HostState.UP

    @property
    def is_off(self) -> bool:
        """Whether it is powered off, so that it does not even refuse connections."""
        return self.state is HostState.OFF

    @property
    def uplink(self) -> float | None:
        """Bytes per second that its connections can send together; ``None`` = no limit."""
        return self.outgoing.rate

    @uplink.setter
    def uplink(self, rate: float | None) -> None:
        self.outgoing.rate = rate

    @property
    def downlink(self) -> float | None:
        """Bytes per second that its connections can receive together; ``None`` = no limit."""
        return self.incoming.rate

    @downlink.setter
    def downlink(self, rate: float | None) -> None:
        self.incoming.rate = rate


# Seconds of retransmission without an acknowledgement after which a host gives up a connection. About that of Linux:
# tcp_retries2 = 15 gives 924.6 s.
RETRANSMISSION_SECONDS = 900.0


class SimulatedStream(PipeEnd):
    """One end of a connection. Its data passes the host's outgoing line, the path, and the other's incoming line.

    Args:
        host: the machine of this end.
        path: the path to the other machine.
        number: number of the connection, for the trace.
        rng: source of the jitter.
        trace: records what arrives here.
        routers: the routers that translate the connection; only one of its ends gets them.
    """

    other: SimulatedStream

    def __init__(
        self,
        host: Station,
        path: Path,
        number: int,
        rng: random.Random,
        trace: Trace | None,
        routers: Iterable[Nat] = (),
    ) -> None:
        super().__init__(None, None)
        self.host, self.number = host, number
        self._routers = tuple(routers)
        self._is_severed = False
        for router in self._routers:
            router.streams[self] = None
        self._path = path
        self._trace, self._rng = trace, rng
        self._outgoing = host.outgoing.flow(self._travel)
        self._incoming = host.incoming.flow(self.arrive)
        # Time at which the last piece sent from here reaches the other host.
        self._arrival = 0.0
        # Data for this end that waits at a cut in the network.
        self._held: list[Piece] = []
        self._has_doubts = False
        self.break_timer: asyncio.TimerHandle | None = None
        """Breaks the connection unless this end is closed first."""
        host.streams[self] = None

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, piece: Piece) -> None:
        if self.host.is_up and (passed := self._outgoing.pass_at_once(piece)) is not None:
            self._travel(piece, passed)
        elif self.host.is_up:
            self._outgoing.put(piece)

    def _travel(self, piece: Piece, departure: float | None = None) -> None:
        path = self._path
        arrival = (self._loop.time() if departure is None else departure) + path.delay
        if path.jitter:
            arrival += path.jitter * self._rng.random()
        self._arrival = max(self._arrival, arrival)
        self._loop.call_at(self._arrival, self.other.reach_host, piece)

    def abort(self) -> None:
        if self.host.is_off:
            self.vanish()
        elif not self._closed:
            self._outgoing.drop()
            # The operating system sends the end even if the program is gone.
            self._travel(None)
            self.end()

    def vanish(self) -> None:
        """Let this end disappear without telling the other one."""
        self._outgoing.drop()
        self.end()

    def end(self) -> None:
        if not self._closed:
            self.host.streams.pop(self, None)
            for router in self._routers:
                router.streams.pop(self, None)
            super().end()
            if self.break_timer is not None:
                self.break_timer.cancel()

    def opens_after(self, delay: float) -> None:
        """Let nothing from here arrive before the other end exists, which takes this delay."""
        self._arrival = self._loop.time() + delay

    def sever(self) -> None:
        """A router has forgotten the connection: everything sent from now on is lost."""
        self._is_severed = self.other._is_severed = True

    # --- receiving ----------------------------------------------------------------------------------------------------

    def reach_host(self, piece: Piece) -> None:
        """Handle a piece that has reached the end of the path."""
        if self._path.is_cut or self._held:
            if not self._held:
                self._path.held[self] = None
                self.other.begin_to_doubt()
            self._held.append(piece)
        elif self.host.is_off or self._is_severed:
            self.other.begin_to_doubt()
        elif (passed := self._incoming.pass_at_once(piece)) is not None:
            self._loop.call_at(passed, self.arrive, piece)
        else:
            self._incoming.put(piece)

    def release(self) -> None:
        """Let the held data through: the network is whole again, and the sender repeats it."""
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
        """Start the timeout after which this end gives up: what it sent is not acknowledged."""
        if not self._has_doubts:
            self._has_doubts = True
            self._loop.call_later(RETRANSMISSION_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._has_doubts = False
        if self.other._held or self.other.host.is_off or self._is_severed:
            self.end()
