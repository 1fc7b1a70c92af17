"""Reaching a peer at one of the addresses where it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.errors import DialError, IdentityMismatchError, P2PDaemonError
from shoal.p2p.addresses import AddressBook
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.peer_id import PeerID
from shoal.p2p.transport import Stream, Transport

DIAL_STAGGER = 0.25
"""Seconds after which the next address of a peer is tried beside the one that has not answered yet."""


class Dialler:
    """Dials peers at their known addresses, and can give all of that up at once."""

    def __init__(self, transport: Transport, addresses: AddressBook) -> None:
        self._transport = transport
        self._addresses = addresses
        self._tasks: dict[asyncio.Task[Stream], None] = {}
        self._closed = False

    async def dial(self, peer: PeerID) -> Stream:
        """Dial the addresses of a peer one after another, each a little later than the one before; the first success
        wins.

        Raises:
            DialError: no address is known, or none answers as that peer.
            P2PDaemonError: this peer is shut down.
        """
        addresses = self._transport.worth_dialling(self._addresses.get(peer))
        if not addresses:
            raise DialError(f"no address of peer {peer} is known: it may be in client mode, or it has left")
        return await self._dial_first(peer, addresses)

    async def dial_address(self, peer: PeerID, address: Multiaddr) -> Stream:
        """Dial one address of a peer; raises what :meth:`dial` raises."""
        return await self._dial_first(peer, [address])

    async def _dial_first(self, peer: PeerID, addresses: Sequence[Multiaddr]) -> Stream:
        dials: dict[asyncio.Task[Stream], Multiaddr] = {}
        errors: list[BaseException] = []
        waiting = list(addresses)
        try:
            while waiting or dials:
                if waiting:
                    address = waiting.pop(0)
                    dials[self._start(peer, address)] = address
                await asyncio.wait(
                    dials, timeout=DIAL_STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in dials if task.done()]:
                    address = dials.pop(task)
                    error = asyncio.CancelledError() if task.cancelled() else task.exception()
                    if error is None:
                        self._addresses.prefer(peer, address)
                        return task.result()
                    errors.append(error)
        finally:
            for task in dials:
                task.add_done_callback(_abort_late)
                task.cancel()
        if self._closed:
            raise P2PDaemonError("this peer is shut down")
        if len(errors) == 1:
            raise errors[0]
        kind = IdentityMismatchError if all(isinstance(e, IdentityMismatchError) for e in errors) else DialError
        raise kind(f"cannot reach peer {peer}: " + "; ".join(map(str, errors)))

    def _start(self, peer: PeerID, address: Multiaddr) -> asyncio.Task[Stream]:
        if self._closed:
            raise P2PDaemonError("this peer is shut down")
        task = asyncio.get_running_loop().create_task(self._transport.dial(address, peer))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def close(self) -> None:
        """Give up every dial in progress."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _abort_late(task: asyncio.Task[Stream]) -> None:
    """Another address was faster, or nobody waits any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()
