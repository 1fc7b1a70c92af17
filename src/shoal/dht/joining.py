"""Joining a swarm, staying together with it, and finding it again.

At least one of the initial peers must answer, be able to call back, and agree about the time.

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

from shoal.dht.protocol import NO_ANSWER, SECONDS_BETWEEN_ATTEMPTS, DHTProtocol
from shoal.errors import BootstrapError, IdentityMismatchError, ValidationError
from shoal.p2p import Multiaddr, PeerID

logger = logging.getLogger(__name__)

Targets = Sequence[tuple[Multiaddr, PeerID]]


Outcomes = asyncio.Queue[tuple[PeerID, "Exception | None"]]

# A connection may break by chance; only then is a peer asked again.
PING_ATTEMPTS = 3
# How long other initial peers may take to say what time it is, if the first one says that this machine is wrong.
SECOND_OPINION_SECONDS = 1.0


async def ping_initial_peers(
    protocol: DHTProtocol, targets: Targets, *, timeout: float, must_succeed: bool, strict: bool
) -> None:
    """Return as soon as one initial peer has answered well; the others go on answering in the background.

    Args:
        protocol: the node that joins; learns who answers.
        targets: where the initial peers are and who they are.
        timeout: seconds to wait for the first answer.
        must_succeed: let the peers check this node, and fail if none answers.
        strict: fail if all peers that answer find that this node cannot be reached, or do not agree about the time.

    Raises:
        ValidationError: with ``strict``.
        BootstrapError: nobody answered, with ``must_succeed``.
    """
    clock = protocol.p2p.clock
    for address, peer in targets:
        protocol.p2p.add_addresses(peer, [address])
        clock.join_through(peer)
    peers = list(dict.fromkeys(peer for _, peer in targets if peer != protocol.p2p.peer_id))
    queue: Outcomes = asyncio.Queue()
    for peer in peers:
        protocol.spawn(_ping(protocol, peer, must_succeed, queue))
    outcomes: dict[PeerID, Exception | None] = {}
    began = asyncio.get_running_loop().time()
    await _collect(queue, outcomes, len(peers), timeout, until_success=True)
    if clock.offset:
        left = began + timeout - asyncio.get_running_loop().time()
        await _collect(queue, outcomes, len(peers), min(left, SECOND_OPINION_SECONDS), until_success=False)
    if clock.is_disputed and any(peer in clock.sources for peer in outcomes):
        _object(
            "the peers through which this node joins do not agree about the time", _clock_verdicts(protocol), strict
        )
    elif None in outcomes.values() or not peers:
        return
    elif any(isinstance(error, ValidationError) for error in outcomes.values()):
        verdicts = _verdicts(targets, outcomes, timeout)
        _object("no peer that answers lets this node join", verdicts, strict)
    else:
        error = BootstrapError(_verdicts(targets, outcomes, timeout))
        if must_succeed:
            raise error
        logger.warning("starting alone: %s", error)


async def _collect(
    queue: Outcomes, outcomes: dict[PeerID, Exception | None], count: int, timeout: float, *, until_success: bool
) -> None:
    """Wait for the outcomes of pings, all of them or until the first good one."""
    try:
        async with asyncio.timeout(max(0.0, timeout)):
            while len(outcomes) < count:
                peer, error = await queue.get()
                outcomes[peer] = error
                if until_success and error is None:
                    return
    except TimeoutError:
        return


async def _ping(protocol: DHTProtocol, peer: PeerID, validate: bool, outcomes: Outcomes) -> None:
    error: Exception | None = None
    for attempt in range(PING_ATTEMPTS):
        try:
            await protocol.ping(peer, validate=validate)
        except (ValidationError, TimeoutError) as e:
            error = e
            break
        except NO_ANSWER as e:
            error = e
            await asyncio.sleep(SECONDS_BETWEEN_ATTEMPTS * (attempt + 1))
        else:
            error = None
            break
    # Others may have let this node in, so that nobody else would say it.
    if isinstance(error, IdentityMismatchError):
        logger.warning("an initial peer is another one than expected: %s", error)
    outcomes.put_nowait((peer, error))


def _object(text: str, verdicts: dict[str, str], strict: bool) -> None:
    objection = ValidationError(f"{text}:", verdicts)
    if strict:
        raise objection
    logger.warning("%s", objection)


def _verdicts(targets: Targets, outcomes: dict[PeerID, Exception | None], timeout: float) -> dict[str, str]:
    """What came of each address."""
    reasons = {peer: str(error) or "no answer in time" for peer, error in outcomes.items()}
    return {f"{address}/p2p/{peer}": reasons.get(peer, f"no answer within {timeout:g} s") for address, peer in targets}


def _clock_verdicts(protocol: DHTProtocol) -> dict[str, str]:
    """What time it is, as each peer tells it that has been asked."""
    return {
        f"peer {source}": f"clock off by {seconds:+.1f} s, compared with the clock of this machine; no majority "
        "tells who is right, so turn on NTP wherever the time is wrong"
        for source, seconds in protocol.p2p.clock.sources.items()
    }


# How often a node looks around, give or take a quarter.
TICK_SECONDS = 5.0
# Without an answer for so long, the nearest neighbor is asked for a sign of life.
IDLE_SECONDS = 20.0
# Until a suspect is asked again; doubled each time.
FIRST_PAUSE_SECONDS = 5.0
# Between two questions to a suspect or an initial peer, or two attempts to find the swarm again.
LONGEST_PAUSE_SECONDS = 30.0
# Between two questions to an initial peer that has answered the last one, but has no place in the table.
PAUSE_WHEN_WELL_SECONDS = 300.0
# Where more nodes are known, each of them asks those that are gone less often.
SMALL_TABLE = 20

# So few at a time: after an outage everybody asks.
PROBES_PER_TICK = 3
SEEDS_PER_ATTEMPT = 3
# After so many attempts, initial peers are preferred: all else that this node knows may be outdated.
PATIENT_ATTEMPTS = 5

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
        # A generator of its own: what it draws changes nothing for the others.
        self._rng = random.Random(int(protocol.node_id))
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
            # What it announced may be outdated.
            self._p2p.add_addresses(peer, self._addresses.get(peer, ()))
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
        self._p2p.clock.settle_anew()
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
