"""Lines between hosts: each host's own, whose rate its connections share fairly, and what lies between two of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.p2p.memory import Piece

if TYPE_CHECKING:
    from shoal.testing.host import SimulatedStream


_TURN_SECONDS = 0.001
_MIN_TURN_BYTES = 1500
_MAX_TURN_BYTES = 2**16


class AccessLine:
    """Serves its flows in turn, about a millisecond each.

    Args:
        rate: bytes per second; ``None`` = no limit.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._loop = asyncio.get_running_loop()
        self._turns: deque[Flow] = deque()  # the first one is being served

    def flow(self, forward: Callable[[Piece], None]) -> Flow:
        """A connection's share of the line; what has passed goes to ``forward``."""
        return Flow(self, forward)

    def enqueue(self, flow: Flow) -> None:
        """A flow has something to send."""
        self._turns.append(flow)
        if len(self._turns) == 1:
            self._serve()

    def _serve(self) -> None:
        size, seconds = self._turns[0].head_size, 0.0
        if self.rate is not None:
            size = min(size, max(_MIN_TURN_BYTES, int(self.rate * _TURN_SECONDS)), _MAX_TURN_BYTES)
            seconds = size / self.rate
        self._loop.call_later(seconds, self._served, size)

    def _served(self, size: int) -> None:
        flow = self._turns.popleft()
        flow.pass_on(size)
        if flow.head_size:
            self._turns.append(flow)
        if self._turns:
            self._serve()


class Flow:
    """What one connection sends through an :class:`AccessLine`."""

    __slots__ = ("_forward", "_line", "_queue")

    def __init__(self, line: AccessLine, forward: Callable[[Piece], None]) -> None:
        self._line, self._forward = line, forward
        self._queue: list[Piece] = []  # never long, and never begins with an end

    @property
    def head_size(self) -> int:
        """Bytes of the piece whose turn it is."""
        return len(self._queue[0] or b"") if self._queue else 0

    def put(self, piece: Piece) -> None:
        """Send this after what was put before; what needs no time goes through at once."""
        if not self._queue and (not piece or self._line.rate is None):
            self._forward(piece)
            return
        self._queue.append(piece)
        if len(self._queue) == 1:
            self._line.enqueue(self)

    def pass_on(self, size: int) -> None:
        """So many bytes of the first piece have passed."""
        if not self._queue:  # it was dropped meanwhile
            return
        head = memoryview(self._queue.pop(0) or b"")
        if size < len(head):
            self._queue.insert(0, head[size:])
        self._forward(head[:size])
        while self._queue and not self._queue[0]:
            self._forward(self._queue.pop(0))

    def drop(self) -> None:
        """Forget what has not passed yet."""
        self._queue.clear()


@dataclass(frozen=True)
class Link:
    """How the network behaves between two hosts."""

    delay: float | tuple[float, float] = 0.0
    """Seconds one way; a range means that every pair of hosts has a delay of its own, drawn once from this range."""
    jitter: float = 0.0
    """Up to this many more seconds, drawn for each message. Messages of one connection never overtake each other."""
    dial_failure: float = 0.0
    """Probability that an attempt to connect fails."""
    break_rate: float = 0.0
    """How often a connection breaks, per second; 0.01 means that it lives for 100 seconds on average."""


class Path:
    """The state of the network between two hosts, in both directions.

    Attributes:
        delay: seconds one way, drawn from the link's range.
        is_cut: nothing comes through at the moment.
        held: ends of connections for which something waits at the cut, in order.
    """

    def __init__(self, link: Link, delay: float, is_cut: bool) -> None:
        self.held: dict[SimulatedStream, None] = {}
        self.is_cut = is_cut
        self.change(link, delay)

    def change(self, link: Link, delay: float) -> None:
        """Behave differently from now on; what is on its way already is not affected."""
        self.link, self.delay, self.jitter = link, delay, link.jitter

    def release_held(self) -> None:
        """Let through what waits at the cut."""
        held, self.held = self.held, {}
        for stream in held:
            stream.release()
