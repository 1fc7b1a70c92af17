"""Better connections for peers that only relays lead to, found while the present ones are in use.

Nothing is moved from one connection to another: calls in progress stay where they are, and the next ones take what the
pool prefers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.p2p.identity import PeerID
from shoal.p2p.relay_messages import MAX_AT_ONCE
from shoal.tasks import cancel_and_wait

if TYPE_CHECKING:
    from shoal.p2p.p2p import P2P

logger = logging.getLogger(__name__)

UPGRADE_SECONDS = 60.0
"""Between two attempts at direct connections to a peer."""


class Upgrades:
    """Attempts at direct connections, as long as there are only relayed ones.

    Args:
        p2p: whose connections these are.
    """

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        self.tasks: dict[PeerID, asyncio.Task[None]] = {}
        """One for each peer with relayed connections only, or that was so a little while ago."""
        p2p.pool.on_relayed = self.watch

    def watch(self, peer: PeerID) -> None:
        """There is a new relayed connection to a peer."""
        if peer not in self.tasks and self._p2p.is_alive:
            task = asyncio.get_running_loop().create_task(self._keep_trying(peer))
            self.tasks[peer] = task
            task.add_done_callback(lambda _: self.tasks.pop(peer))

    async def _keep_trying(self, peer: PeerID) -> None:
        while True:
            await asyncio.sleep(UPGRADE_SECONDS)
            streams = self._p2p.pool.streams_to(peer)
            if not streams or not all(stream.is_relayed for stream in streams):
                return
            punching = self._p2p.circuits.punching
            if punching is not None and punching.is_worth_it(peer):
                try:
                    await self._try(peer, min(len(streams), MAX_AT_ONCE))
                except ShoalError as e:
                    logger.debug("no direct connections to %s: %s", peer, e)

    async def _try(self, peer: PeerID, count: int) -> None:
        circuits = self._p2p.dialler.circuits(peer)
        if not circuits:
            return
        for stream in await self._p2p.circuits.dial(circuits[0], peer, count):
            if stream.is_relayed:
                stream.abort()  # there are enough of these
            else:
                self._p2p.pool.add(self._p2p.greet(stream))

    async def close(self) -> None:
        """Try no more."""
        await cancel_and_wait(*self.tasks.values())
