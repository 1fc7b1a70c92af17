"""Bare connections between simulated hosts."""

from __future__ import annotations

import asyncio

from shoal.peers.multiaddr import Multiaddr
from shoal.testing import Host
from shoal.testing.links import SimulatedStream


class Listener:
    """Accepts connections on a host.

    Args:
        host: where it listens.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.transport = host.transport()
        self.accepted: asyncio.Queue[SimulatedStream] = asyncio.Queue()

    async def start(self) -> Listener:
        (self.address,) = await self.host.run(
            self.transport.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), self.accepted.put_nowait)
        )
        return self

    async def dialled_by(self, host: Host) -> tuple[SimulatedStream, SimulatedStream]:
        """Connect from a host; returns the dialler's end and this one's."""
        near = await host.run(self.dial_from(host))
        return near, await self.accepted.get()

    def dial_from(self, host: Host):
        return host.transport().dial(self.address, self.transport.identity.peer_id)


async def connect(dialler: Host, listener: Host) -> tuple[SimulatedStream, SimulatedStream]:
    """A connection between two hosts, both ends."""
    return await (await Listener(listener).start()).dialled_by(dialler)


async def read(stream: SimulatedStream, size: int) -> bytes:
    buffer = bytearray(size)
    await stream.read_exactly_into(memoryview(buffer))
    return bytes(buffer)


def now() -> float:
    return asyncio.get_running_loop().time()
