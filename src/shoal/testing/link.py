"""What lies between two hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.testing.stream import SimulatedStream


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
