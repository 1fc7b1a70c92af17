"""Staying together with the swarm, and finding it again.

While somebody answers, a node pings its suspects, less and less often; its initial peers, if they are not in the
table; and, if it has nothing else to ask, its nearest neighbor. So it notices when an outage begins, and when it is
over. Whoever comes back may bring others along: the node then looks for its own id, as when it joined.

When nobody has answered for ten seconds, though others were asked meanwhile, the swarm is lost. The node then asks
three peers at a time, drawn from all that it has ever heard of, with pauses that grow up to half a minute and are
random, so that a swarm that returns from an outage does not fall upon its first peers at once. An answer and a walk
that finds somebody end the search.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from shoal.dht.protocol import NO_ANSWER, DHTProtocol
from shoal.p2p import Multiaddr, PeerID

logger = logging.getLogger(__name__)

TICK_SECONDS = 5.0
"""How often a node looks around, give or take a quarter."""
IDLE_SECONDS = 20.0
"""Without an answer for so long, the nearest neighbor is asked for a sign of life."""
FIRST_PAUSE_SECONDS = 5.0
"""Until a suspect is asked again; doubled each time."""
LONGEST_PAUSE_SECONDS = 30.0
"""Between two questions to a suspect or an initial peer, or two attempts to find the swarm again."""
PAUSE_WHEN_WELL_SECONDS = 300.0
"""Between two questions to an initial peer that has answered the last one, but has no place in the table."""
SMALL_TABLE = 20
"""Where more nodes are known, each of them asks those that are gone less often."""
PROBES_PER_TICK = 3
SEEDS_PER_ATTEMPT = 3
PATIENT_ATTEMPTS = 5
"""After so many attempts, initial peers are preferred: all else that this node knows may be outdated."""
SHARE_OF_INITIAL_PEERS = 0.25


@dataclass
class _Probe:
    """When to ask a peer for a sign of life."""

    due: float
    pause: float = FIRST_PAUSE_SECONDS


class Reunion:
    """What a node does in the background to stay in the swarm.

    Args:
        protocol: the node's side of the protocol.
        initial_peers: where the node has joined; they are never forgotten.
        meet_neighbors: looks for the node's own id; whether it found somebody.
    """

    def __init__(
        self,
        protocol: DHTProtocol,
        initial_peers: Sequence[tuple[Multiaddr, PeerID]],
        meet_neighbors: Callable[[], Awaitable[bool]],
    ) -> None:
        self._protocol = protocol
        self._p2p, self._reception = protocol.p2p, protocol.reception
        self._rng = random.Random(int(protocol.node_id))  # of its own: what it draws changes nothing for the others
        self._addresses: dict[PeerID, list[Multiaddr]] = {}
        for address, peer in initial_peers:
            if peer != self._p2p.peer_id:
                self._addresses.setdefault(peer, []).append(address)
        self._meet_neighbors = meet_neighbors
        self._probes: dict[PeerID, _Probe] = {}
        self._heard = asyncio.Event()
        self._reception.on_heard = self._heard.set
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Stay together, and find back when the swarm is lost, for ever."""
        while True:
            await asyncio.sleep(TICK_SECONDS * self._rng.uniform(0.75, 1.25))
            if not self._reception.is_lost:
                await self._look_around()
            if self._reception.is_lost:
                await self._find_back()

    # --- together -----------------------------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        await self._ping(self._choose_probes())
        if self._protocol.came_back.is_set():
            self._protocol.came_back.clear()
            await self._meet_neighbors()

    def _choose_probes(self) -> list[PeerID]:
        table, now = self._protocol.routing_table, self._now()
        suspects = dict.fromkeys(table.suspects.values())
        absent = dict.fromkeys(peer for peer in self._addresses if peer not in table)
        watched = suspects | absent
        self._probes = {
            peer: self._probes.get(peer) or _Probe(now + FIRST_PAUSE_SECONDS * self._rng.random()) for peer in watched
        }
        due = sorted(
            (peer for peer in watched if self._probes[peer].due <= now), key=lambda peer: self._probes[peer].due
        )
        chosen = due[:PROBES_PER_TICK]
        longest = LONGEST_PAUSE_SECONDS * max(1.0, len(table) / SMALL_TABLE)
        for peer in chosen:
            probe = self._probes[peer]
            probe.due = now + probe.pause
            probe.pause = min(2 * probe.pause, longest)
        if self._reception.is_silent:  # one dead peer, or an outage? Others can tell
            members = [peer for _, peer in table if peer not in watched]
            chosen += self._rng.sample(members, min(PROBES_PER_TICK, len(members)))
        elif not chosen and now - self._reception.heard_at >= IDLE_SECONDS:
            chosen += [peer for _, peer in table.get_nearest_neighbors(self._protocol.node_id, 1)]
        return chosen

    async def _ping(self, peers: Collection[PeerID]) -> None:
        """Ask peers for a sign of life; the protocol notes what comes of it."""
        for peer in peers:
            self._p2p.add_addresses(peer, self._addresses.get(peer, ()))  # what it announced may be outdated
        await asyncio.gather(*map(self._ping_one, peers))

    async def _ping_one(self, peer: PeerID) -> None:
        try:
            await self._protocol.ping(peer, validate=False)
        except NO_ANSWER:
            return
        if peer in self._probes:
            self._probes[peer] = _Probe(self._now() + PAUSE_WHEN_WELL_SECONDS)

    # --- lost ---------------------------------------------------------------------------------------------------------

    async def _find_back(self) -> None:
        candidates = await self._candidates()
        if not candidates:
            return
        logger.warning(
            "no peer has answered for %.0f s: this machine is offline, or all others have left. Looking for them again "
            "at %d known %s until one answers",
            self._now() - self._reception.heard_at,
            len(candidates),
            "peer" if len(candidates) == 1 else "peers",
        )
        lost_at, attempt = self._reception.heard_at, 0
        while True:
            self._heard.clear()
            await self._pause(self._rng.uniform(0.0, min(LONGEST_PAUSE_SECONDS, 2.0**attempt)))
            if self._reception.is_lost:
                await self._ping(await self._draw(attempt))
            if not self._reception.is_lost and await self._meet_neighbors():
                break
            attempt = min(attempt + 1, 16)
        self._protocol.came_back.clear()
        logger.info("found the swarm again, %.0f s after the last answer", self._now() - lost_at)

    async def _pause(self, seconds: float) -> None:
        """Wait; but who is heard meanwhile, because the application has asked, ends the search."""
        try:
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        except TimeoutError:
            return

    async def _candidates(self) -> list[PeerID]:
        """Everybody that this node has ever heard of: initial peers, the table, suspects, companions of a run."""
        known = [*self._addresses, *(peer.peer_id for peer in await self._p2p.list_peers())]
        return [peer for peer in dict.fromkeys(known) if peer != self._p2p.peer_id]

    async def _draw(self, attempt: int) -> list[PeerID]:
        candidates = await self._candidates()
        drawn = self._rng.sample(candidates, min(SEEDS_PER_ATTEMPT, len(candidates)))
        if self._addresses and attempt >= PATIENT_ATTEMPTS and self._rng.random() < SHARE_OF_INITIAL_PEERS:
            drawn[0] = self._rng.choice(list(self._addresses))
        return list(dict.fromkeys(drawn))
