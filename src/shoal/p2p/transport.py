"""What every transport offers: authenticated, ordered, reliable, flow-controlled byte streams between two peers.

Everything above this file works on these two classes alone, so that a new way to reach a peer (a relay, QUIC, a
simulated network) is one more implementation and no change elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""Bytes to send. A memoryview must be contiguous and of format ``B``."""


class Stream(ABC):
    """One two-way byte pipe to a peer whose identity has been proven. One task may read while another one writes."""

    remote: PeerID
    remote_address: Multiaddr | None
    """Where the other side is seen from here, as far as the transport knows."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """The connection is over: nothing more can be written, only what has arrived can be read."""

    @abstractmethod
    async def write(self, *buffers: Buffer) -> None:
        """Send buffers, waiting while the other side is slow. They may be changed as soon as this returns.

        Raises:
            StreamClosedError: the connection ended.
        """

    @abstractmethod
    async def read_exactly_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer (format ``B``, writable) with the next bytes.

        Raises:
            StreamClosedError: the connection ended before the buffer was full.
        """

    def take(self, size: int) -> bytearray | None:
        """The next bytes if all of them are here already; otherwise ``None``, and nothing is taken.

        Spares the small messages that came in one piece what waiting costs.
        """
        return None

    def limit_backlog(self, nbytes: int | None) -> None:  # noqa: B027
        """Let no more than about so many bytes wait here unsent while the other side is slow; ``None``: as usual.

        For work that is shared among several streams: what waits here, none of the others can take over.
        """

    @abstractmethod
    def on_closed(self, callback: Callable[[], object] | None) -> None:
        """Call this once when the connection ends; at once if it has. Replaces the previous callback."""

    @abstractmethod
    def close(self) -> None:
        """End the connection after what was written has been sent."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection now; unsent data is dropped."""


OnStream = Callable[[Stream], None]


class Transport(ABC):
    """A way to reach peers, on behalf of one identity."""

    identity: Identity
    on_addresses_changed: Callable[[], object] | None = None
    """Called when this peer has become reachable elsewhere, so that what others were told is not true any more."""

    @abstractmethod
    def supports(self, address: Multiaddr) -> bool:
        """Whether this transport understands such addresses."""

    def listens_by_default(self) -> list[str]:
        """Where a peer listens that has not been told where."""
        return ["/ip4/0.0.0.0/tcp/0"]

    @abstractmethod
    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        """Accept streams from other peers; ``on_stream`` gets each one after the dialler has proven who it is.

        Returns:
            The addresses where others may reach this peer, without ``/p2p``.

        Raises:
            P2PDaemonError: it is not possible to listen there; the text says why.
        """

    @abstractmethod
    def addresses(self, latest: bool = False) -> list[Multiaddr]:
        """Where others may reach this peer at present, the best first, without ``/p2p``; empty if it does not listen.

        Args:
            latest: look again; otherwise what was true a short while ago will do.
        """

    def worth_dialling(self, addresses: Sequence[Multiaddr]) -> list[Multiaddr]:
        """Those addresses of another peer at which it may be reached from here, in the order to try them."""
        return [address for address in addresses if self.supports(address)]

    @abstractmethod
    async def dial(self, address: Multiaddr, expected_peer: PeerID) -> Stream:
        """Connect to a peer and check that it is the expected one.

        Raises:
            IdentityMismatchError: somebody else answered.
            DialError: the peer could not be reached, or is no shoal peer; the text says why.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and drop every connection that is still being made."""
