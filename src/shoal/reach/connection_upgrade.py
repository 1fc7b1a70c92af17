"""Better and more connections to peers that are reached only through relays, made while the present ones are in use.

If there are only relayed connections, direct ones are attempted again and again. Once there is a direct one, some spare
ones are made at once: the relay may be gone when they are needed, and without it no more can be made.

If connections break in the middle of a round, all that the round needs are dialled at once, not one after another.

No call is moved to another connection: calls in progress stay where they are, and the next ones take the connection
that the pool prefers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine

from shoal.errors import NoRelayError, ShoalError
from shoal.net.connection_pool import CIRCUIT_STAGGER, MAX_IDLE, SPARE
from shoal.net.endpoint import Endpoint
from shoal.peers.identity import PeerID
from shoal.reach.relay.circuits import OutgoingCircuits
from shoal.reach.relay.messages import MAX_AT_ONCE

logger = logging.getLogger(__name__)

UPGRADE_SECONDS = 60.0
"""Seconds between two attempts at direct connections to a peer. Chosen."""
ROOM_FOR_SPARES = MAX_IDLE // 2
"""With more idle connections than this no spare ones are made, because each would evict another peer's. Chosen."""


class ConnectionUpgrades:
    """Attempts direct connections while there are only relayed ones, and makes spare ones once there are any.

    Args:
        endpoint: has the connections.
        circuits: makes them, with the help of relays.
    """

    def __init__(self, endpoint: Endpoint, circuits: OutgoingCircuits) -> None:
        self._endpoint, self._circuits = endpoint, circuits
        self.tasks: dict[PeerID, asyncio.Task[None]] = {}
        """One task for each peer that has, or recently had, only relayed connections."""
        self.filling: dict[PeerID, asyncio.Task[None]] = {}
        """One task for each peer to which spare connections are being made."""
        self.replacing: dict[PeerID, asyncio.Task[None]] = {}
        """One task for each peer whose connections have just broken."""

    def watch(self, peer: PeerID) -> None:
        """A relay carries or has arranged a new connection to this peer."""
        if not self._endpoint.is_alive:
            return
        streams = self._endpoint.pool.streams_to(peer)
        if all(stream.is_relayed for stream in streams):
            self._begin(self.tasks, peer, self._keep_trying)
        elif len(streams) < SPARE and self._endpoint.pool.idle_count < ROOM_FOR_SPARES:
            self._begin(self.filling, peer, self._fill)

    def _begin(
        self,
        tasks: dict[PeerID, asyncio.Task[None]],
        peer: PeerID,
        work: Callable[[PeerID], Coroutine[object, object, None]],
    ) -> None:
        if peer not in tasks:
            tasks[peer] = self._endpoint.tasks.start(work(peer))
            tasks[peer].add_done_callback(lambda _: tasks.pop(peer))

    async def _fill(self, peer: PeerID) -> None:
        try:
            await self._circuits.prepare(peer, 1)
        except ShoalError as e:
            logger.debug("no spare connections to %s: %s", peer, e)

    def replace(self, peer: PeerID, count: int) -> None:
        """Connections arranged by relays have broken: make ``count`` new ones; calls wait for them."""
        if peer in self.replacing or not self._endpoint.is_alive:
            return
        for each in self._endpoint.pool.streams_to(peer):
            if each.via is not None and each.closed:
                self._endpoint.dialler.note_broken(each.via)
        punching = self._circuits.punching
        if punching is not None and punching.expects_success(peer):
            count = max(count, SPARE)  # otherwise the rest would be made right after the first one
        count = min(count, MAX_AT_ONCE)
        end = self._endpoint.pool.expect(peer, count)
        self._begin(self.replacing, peer, functools.partial(self._dial_at_once, count, end))

    async def _dial_at_once(self, count: int, end: Callable[[], None], peer: PeerID) -> None:
        # If this relay does not connect soon, calls try the others.
        limit = asyncio.get_running_loop().call_later(CIRCUIT_STAGGER, end)
        try:
            for address in self._endpoint.dialler.circuits(peer):
                try:
                    streams = await self._circuits.dial(address, peer, count)
                except NoRelayError:  # the connection to the relay itself may have broken, too
                    continue
                for stream in streams:
                    self._endpoint.pool.add(self._endpoint.greet(stream))
                return
        except ShoalError as e:  # calls dial for themselves then
            logger.debug("the broken connections to %s were not replaced at once: %s", peer, e)
        finally:
            limit.cancel()
            end()

    async def _keep_trying(self, peer: PeerID) -> None:
        while True:
            await asyncio.sleep(UPGRADE_SECONDS)
            streams = self._endpoint.pool.streams_to(peer)
            if not streams or not all(stream.is_relayed for stream in streams):
                return
            punching = self._circuits.punching
            if punching is not None and punching.is_worth_it(peer):
                try:
                    await self._try(peer, min(len(streams), MAX_AT_ONCE))
                except ShoalError as e:
                    logger.debug("no direct connections to %s: %s", peer, e)

    async def _try(self, peer: PeerID, count: int) -> None:
        circuits = self._endpoint.dialler.circuits(peer)
        if not circuits:
            return
        for stream in await self._circuits.dial(circuits[0], peer, count):
            if stream.is_relayed:
                stream.abort()  # there are enough of these
            else:
                self._endpoint.pool.add(self._endpoint.greet(stream))
