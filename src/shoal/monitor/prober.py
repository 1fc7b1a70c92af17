"""Calls peers to find out which are still there.

The record of a peer lives for a minute, so it takes a minute to show that the peer has ended. The peers themselves
notice a death within seconds, because their connection to the dead one breaks. A monitor does the same: it keeps one
idle connection to each of a few dozen peers, which costs a small call from time to time. When a connection ends, it
calls the peer. If the machine answers that nothing listens there any more, the peer has ended.

In a larger swarm it also calls peers that others miss, and those that have published nothing for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.base.clock import get_dht_time
from shoal.base.tasks import cancel_and_wait
from shoal.errors import NoReservationError, NotAMemberError, P2PHandlerError, RefusedDialError, ShoalError
from shoal.monitor.run import PeerView, RunView
from shoal.optim.report import end_of_id
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.dht.node import DHTNode

logger = logging.getLogger(__name__)

# All numbers are chosen so that a death is seen within seconds and the calls cost peers next to nothing.
LOOK_SECONDS = 0.5
# Idle connections are closed after 30 s.
SECONDS_BETWEEN_CALLS = 15.0
# The backoff after a call that was made because there was no connection; it doubles with each further one in a row.
LEAST_PAUSE, MOST_PAUSE = 2.0, 60.0
CALL_SECONDS = 5.0
# Peers to which connections are kept, and calls at the same time.
MAX_KEPT, MAX_CALLS = 64, 8
# After this many unanswered calls in a row, a peer loses its place to another one.
HOPELESS = 3
# A peer that has published nothing for this long may have ended.
SUSPICIOUS_SECONDS = 40.0
# A single refusal may be chance, but once a process has ended, its machine refuses every time.
ATTEMPTS, SECONDS_BETWEEN_ATTEMPTS = 2, 0.2


@dataclass
class _Contact:
    """The monitor's calls to a peer."""

    called_at: float = -math.inf
    vain: int = 0
    """The number of calls in a row that began without a connection."""
    call: asyncio.Task[None] | None = None
    """The call in progress."""


class Prober:
    """Tells a view which peers answer, and which have ended.

    Args:
        node: the monitor's node of the DHT.
        view: the view to update.
        look_for: reads a peer's record again. A peer that ends in good order withdraws its record first.
    """

    def __init__(self, node: DHTNode, view: RunView, look_for: Callable[[PeerID], Awaitable[object]]) -> None:
        self._node, self._p2p, self._view, self._look_for = node, node.p2p, view, look_for
        self._contacts: dict[PeerID, _Contact] = {}
        # The peers that a connection is kept to.
        self._kept: dict[PeerID, None] = {}

    async def watch(self) -> None:
        """Call peers until cancelled."""
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await cancel_and_wait(*[contact.call for contact in self._contacts.values() if contact.call is not None])

    def look(self) -> None:
        """Begin the calls that are due."""
        now = asyncio.get_running_loop().time()
        with self._view.lock:
            there = {peer: view for peer, view in self._view.peers.items() if _can_be_called(view)}
            suspects = self._suspects(there)
        known = self._contacts
        self._contacts = {peer: each for peer, each in known.items() if peer in there or each.call is not None}
        self._choose(there)
        calls = sum(each.call is not None for each in self._contacts.values())
        for peer in dict.fromkeys([*self._kept, *suspects]):
            contact = self._contacts.setdefault(peer, _Contact())
            is_connected = bool(self._p2p.pool.streams_to(peer))
            if calls >= MAX_CALLS or contact.call is not None or now < _due(contact, is_connected=is_connected):
                continue
            contact.called_at, contact.vain = now, 0 if is_connected else contact.vain + 1
            contact.call = asyncio.get_running_loop().create_task(self._call(peer, there[peer], contact))
            calls += 1

    def _choose(self, there: dict[PeerID, PeerView]) -> None:
        """Choose the peers to which connections are kept. Those that never answer make room for others."""

        def is_hopeful(peer: PeerID) -> bool:
            contact = self._contacts.get(peer)
            return contact is None or contact.vain < HOPELESS or len(there) <= MAX_KEPT

        self._kept = {peer: None for peer in self._kept if peer in there and is_hopeful(peer)}
        for peer in there if len(self._kept) < min(MAX_KEPT, len(there)) else ():
            if len(self._kept) >= MAX_KEPT:
                break
            if is_hopeful(peer):
                self._kept.setdefault(peer)

    def _suspects(self, there: dict[PeerID, PeerView]) -> list[PeerID]:
        now = get_dht_time()
        missed = {end for view in there.values() if view.report is not None for end in view.report.lost}
        return [
            peer
            for peer, view in there.items()
            if now - view.last_sign > SUSPICIOUS_SECONDS or (missed and end_of_id(peer) in missed)
        ]

    async def _call(self, peer: PeerID, view: PeerView, contact: _Contact) -> None:
        try:
            await self._ask(peer, view)
        finally:
            contact.call = None

    async def _ask(self, peer: PeerID, view: PeerView) -> None:
        for attempt in range(ATTEMPTS):
            for address in view.record.addresses:
                with contextlib.suppress(ValueError):  # perhaps a kind of address that this version does not know
                    self._p2p.add_addresses(peer, [address])
            try:
                await self._node.protocol.ping(peer, validate=False, timeout=CALL_SECONDS, is_trial=True)
            except P2PHandlerError:
                pass  # even an error is an answer
            except NotAMemberError:
                return  # it has answered, but refuses this monitor, so nothing is known
            except (ShoalError, ConnectionError, TimeoutError) as e:
                logger.debug("peer %s does not answer: %s: %s", peer, type(e).__name__, e)
                if not isinstance(e, RefusedDialError) or isinstance(e, NoReservationError):
                    with self._view.lock:
                        self._view.hear_silence(peer)
                    return
                if attempt < ATTEMPTS - 1:
                    await asyncio.sleep(SECONDS_BETWEEN_ATTEMPTS)
                continue
            with self._view.lock:
                self._view.hear_answer(peer)
            return
        await self._look_for(peer)
        with self._view.lock:
            self._view.hear_refusal(peer, get_dht_time())


def _can_be_called(view: PeerView) -> bool:
    return not view.state.is_gone and not view.record.client_mode and bool(view.record.addresses)


def _due(contact: _Contact, *, is_connected: bool) -> float:
    """When to call a peer next: at once after its connection has ended, and then less and less often."""
    if is_connected:
        return contact.called_at + SECONDS_BETWEEN_CALLS
    pause: float = min(LEAST_PAUSE * 2 ** (contact.vain - 1), MOST_PAUSE) if contact.vain else 0.0
    return contact.called_at + pause
