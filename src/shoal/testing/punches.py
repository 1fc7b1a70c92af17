"""Simulated simultaneous opens: attempts to connect from one port, and what routers let through meanwhile.

An attempt opens the sender's own router for answers of its destination. So it gets through the other router if that one
has been opened before it arrives: if some attempt of each side is on its way at the same time. A router that answers
attempts also closes the way again; then both sides try again soon. Otherwise systems repeat an attempt after a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, cast

from shoal.base.tasks import cancel_and_wait
from shoal.net.memory import MemorySession, PunchPort
from shoal.peers.multiaddr import Multiaddr
from shoal.testing.nat import Endpoint, Internet, Packet, address_of, endpoint_of

if TYPE_CHECKING:
    from shoal.testing.host import Host
    from shoal.testing.network import Network

# Seconds after which an attempt without an answer is repeated.
SILENT_SECONDS = 1.0
# Seconds before an attempt that was refused is repeated, at least; and what is added to half of a round trip at most.
SHORTEST_PAUSE, EXTRA_PAUSE = 0.005, 0.01


class _Outcome(Enum):
    CONNECTED = "connected"
    REFUSED = "refused"
    LOST = "lost"


class Punches:
    """All ports of a network that try to connect to each other at present."""

    def __init__(self, network: Network, internet: Internet[Host]) -> None:
        self._network, self._internet = network, internet
        self._ports: dict[Endpoint, PunchPort] = {}

    async def punch(
        self, here: Host, session: MemorySession, candidates: Sequence[Multiaddr], seconds: float
    ) -> AsyncGenerator[MemorySession, None]:
        """See :meth:`Transport.punch`."""
        address = cast("Multiaddr", session.local_address)
        port = PunchPort(address, candidates)
        self._ports[endpoint_of(address)] = port
        loop = asyncio.get_running_loop()
        knocking = [loop.create_task(self._knock(here, port, each)) for each in dict.fromkeys(candidates)]
        end = loop.time() + seconds
        try:
            while (found := await port.next(end)) is not None:
                yield found
        finally:
            port.close()
            del self._ports[endpoint_of(address)]
            await cancel_and_wait(*knocking)

    async def _knock(self, here: Host, port: PunchPort, candidate: Multiaddr) -> None:
        """Try to connect to a candidate again and again."""
        to = endpoint_of(candidate)
        while (packet := self._internet.depart(here, endpoint_of(port.address)[1], to)) is not None:
            delay = self._network.delay_between(here, self._internet.host_towards(packet))
            await asyncio.sleep(delay)
            outcome = self._arrive(here, port, candidate, packet)
            if outcome is _Outcome.CONNECTED:
                return
            if outcome is _Outcome.LOST:
                await asyncio.sleep(SILENT_SECONDS - delay)
            else:
                await asyncio.sleep(delay)
                packet.withdraw()
                await asyncio.sleep(here.rng.uniform(SHORTEST_PAUSE, delay + EXTRA_PAUSE))

    def _arrive(self, here: Host, port: PunchPort, candidate: Multiaddr, packet: Packet) -> _Outcome:
        arrived = self._internet.arrive(packet)
        there = arrived.host
        if there is None:
            return _Outcome.REFUSED if arrived.is_rejected else _Outcome.LOST
        if self._network.is_silent(here, there):
            return _Outcome.LOST
        other = self._ports.get(arrived.to)
        if other is None or other is port:
            return _Outcome.REFUSED
        if port.may_meet(other):
            source = address_of(packet.source)
            near, far = self._network.link_hosts(here, there, arrived.routers)
            delay = self._network.delay_between(here, there)
            call_later = asyncio.get_running_loop().call_later
            call_later(delay, port.connected, MemorySession(near, port.address, candidate))
            # If it tries itself, the answer to its attempt comes meanwhile; otherwise it waits for that to its answer.
            away = delay if source in other.candidates else 2 * delay
            call_later(away, other.connected, MemorySession(far, other.address, source))
        return _Outcome.CONNECTED
