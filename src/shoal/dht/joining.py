"""Joins a swarm, keeps in touch with it, and finds it again after an outage.

To join, at least one initial peer must answer and agree about the time. If none can call back, the node looks for
relays. Nodes of one local network find each other there, whenever they start.

While the swarm answers, a node pings its suspects, less and less often; its initial peers that are not in the routing
table; and, if it is otherwise idle, its nearest neighbor. So it notices when an outage begins and ends. A peer that
returns may know others, so the node then walks to its own id, as it did when it joined.

If no peer has answered for ten seconds despite further calls, the swarm is lost. The node then pings three peers at a
time, drawn from all that it has ever known. Its pauses are random and grow up to half a minute, so that after an outage
not all nodes contact their initial peers at once. The search ends with an answer and a walk that finds a node.

A peer that others can dial is a node of the DHT. A peer that they call through a relay is a node only while there are
few others to keep records; so a small swarm behind routers needs no other help. In a larger swarm such a node is of
little use, because each call takes a detour: after a pause it gives its records to the remaining nodes and stops
serving. A peer that is no node uses the DHT as a client.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from shoal.base.backoff import Backoff
from shoal.base.logs import Seldom, counted
from shoal.base.tasks import wait_at_most
from shoal.dht.config import NodeConfig
from shoal.dht.protocol import ATTEMPTS, NO_ANSWER, SECONDS_BETWEEN_ATTEMPTS, DHTProtocol
from shoal.dht.records import NewRecord
from shoal.dht.traverse import meet_nodes_near
from shoal.errors import (
    BootstrapError,
    DialError,
    IdentityMismatchError,
    NoAccessTokenError,
    NoReservationError,
    NotAMemberError,
    NotCallableError,
    RefusedDialError,
    ValidationError,
)
from shoal.net.pasted import Target, describe_target
from shoal.p2p import Multiaddr, PeerID
from shoal.p2p.local_network import LocalNetwork
from shoal.reach.reachability import Reach, Reachability

# --- whether this peer serves others ----------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

# With this many public nodes, peers behind relays are not needed as nodes: as many as hold a record by default.
ENOUGH_PUBLIC_NODES = NodeConfig.num_replicas
# Chosen: longer than a public peer takes to restart.
STEP_DOWN_SECONDS = 600.0


class ServerMode:
    """Switches a peer between node and client.

    Args:
        protocol: its side of the protocol; answers calls and tells others of this node while ``is_node`` is set.
    """

    def __init__(self, protocol: DHTProtocol) -> None:
        self._protocol = protocol
        self._superfluous_since: float | None = None
        self._moving: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Wait until it is clear how others can call this peer, now that the first ones have tried."""
        if not self._protocol.client_mode:
            await self._protocol.p2p.outlook.settle()
            self.look()

    def look(self) -> None:
        """Decide whether this peer should be a node, and change that if need be."""
        protocol = self._protocol
        is_moving = self._moving is not None and not self._moving.done()
        if protocol.client_mode or (is_moving and self._moving is not asyncio.current_task()):
            return
        now = asyncio.get_running_loop().time()
        if protocol.p2p.reachability is not Reachability.RELAYED or self._count_public() < ENOUGH_PUBLIC_NODES:
            self._superfluous_since = None
        elif self._superfluous_since is None:
            self._superfluous_since = now
        is_needed = self._superfluous_since is None or (
            protocol.is_node and now - self._superfluous_since < STEP_DOWN_SECONDS
        )
        # While this is unknown, this peer announces that it can be called: the first peers of the swarm find out.
        wanted = protocol.p2p.reachability is not Reachability.CLIENT and is_needed
        if wanted is not protocol.is_node:
            self._moving = protocol.spawn(self._enter() if wanted else self._leave())

    def _count_public(self) -> int:
        book = self._protocol.p2p.book
        return sum(book.find(peer).reach == Reach.PUBLIC for _, peer in self._protocol.routing_table)

    async def _enter(self) -> None:
        await self._protocol.serve()
        self._protocol.is_node = True
        logger.info("this peer serves the DHT now: others can call it")
        self._protocol.connectivity.came_back.set()  # a walk tells its neighbors
        self.look()

    async def _leave(self) -> None:
        """Stop being a node. First give the records away, to nodes that no longer count this one as a node."""
        self._protocol.is_node = False
        logger.info("this peer no longer serves the DHT: others cannot call it well enough")
        await self._hand_over()
        await self._protocol.stop_serving()
        self.look()

    async def _hand_over(self) -> None:
        protocol = self._protocol
        due: dict[PeerID, list[NewRecord]] = {}
        for key, item in list(protocol.storage.items()):
            record = protocol.records.copy_for_others(key, item.value, item.expiration_time)
            for _, peer in protocol.routing_table.get_nearest_neighbors(key, protocol.config.num_replicas):
                due.setdefault(peer, []).append(record)
        await asyncio.gather(*(protocol.call_store(peer, records) for peer, records in due.items()))
        for key in [key for key, _ in protocol.storage.items()]:
            del protocol.storage[key]


# --- joining ----------------------------------------------------------------------------------------------------------


Targets = Sequence[Target]
Callee = PeerID | Multiaddr
"""A peer to call: its id; or an address, which stands for any peer that answers there."""
Outcomes = asyncio.Queue[tuple[Callee, "Exception | None"]]

# Seconds that other initial peers have to answer, if the first one cannot call back or says that the time is wrong.
# Chosen: a few round trips around the world.
SECOND_OPINION_SECONDS = 1.0


async def meet_neighbors(protocol: DHTProtocol) -> bool:
    """Walk to the own id, so that nearby nodes and this one meet; returns whether there is any other node."""
    return await meet_nodes_near(protocol, protocol.node_id, protocol.config.bucket_size)


async def ping_initial_peers(
    protocol: DHTProtocol, targets: Targets, *, timeout: float, must_succeed: bool, strict: bool
) -> bool:
    """Ping the initial peers; returns when one has accepted this node. The other pings continue in the background.

    Args:
        protocol: the joining node's side of the protocol; learns which peers answer.
        targets: addresses and ids of the initial peers.
        timeout: seconds to wait for the first answer.
        must_succeed: let the peers check this node, and fail if none answers.
        strict: fail if all peers that answer do not agree about the time; or if none can reach this node, and the user
            has said that they can.

    Returns:
        Whether it is about to be clear how others can call this node, because a peer has tried, or there is none.

    Raises:
        ValidationError: the check failed, and ``strict`` is set.
        BootstrapError: no peer answered, and ``must_succeed`` is set.
    """
    clock = protocol.p2p.clock
    for address, peer in targets:
        if peer is not None:
            protocol.p2p.add_addresses(peer, [address])
            clock.join_through(peer)
    peers = list(dict.fromkeys(map(_callee_of, targets)))
    peers = [each for each in peers if _peer_of(protocol, each) != protocol.p2p.peer_id and not _is_own(protocol, each)]
    queue: Outcomes = asyncio.Queue()
    for each in peers:
        protocol.spawn(_ping(protocol, each, must_succeed, queue))
    outcomes: dict[Callee, Exception | None] = {}
    began = asyncio.get_running_loop().time()

    async def collect(limit: float, is_enough: Callable[[Exception | None], bool]) -> None:
        """Collect the outcomes of pings: all of them, or up to the first that is enough."""
        left = began + timeout - asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(left, limit))):
                while len(outcomes) < len(peers):
                    callee, error = await queue.get()
                    outcomes[callee] = error
                    if is_enough(error):
                        return

    await collect(timeout, lambda error: error is None or isinstance(error, NotCallableError))
    if outcomes and None not in outcomes.values():
        # The others have had the same time for calling back.
        await collect(SECOND_OPINION_SECONDS, lambda error: error is None)
    if clock.offset:
        await collect(SECOND_OPINION_SECONDS, lambda error: False)
    if clock.is_disputed and any(_peer_of(protocol, each) in clock.sources for each in outcomes):
        _object(
            "the peers through which this node joins do not agree about the time", _clock_verdicts(protocol), strict
        )
    elif None in outcomes.values() or not peers:
        return True
    elif any(isinstance(error, NotCallableError) for error in outcomes.values()):
        if protocol.p2p.outlook.evidence.forced:
            verdicts = _verdicts(protocol, targets, outcomes, timeout)
            _object(
                "no peer that answers can call this node, which force_reachability says is public", verdicts, strict
            )
        return True
    elif any(isinstance(error, ValidationError) for error in outcomes.values()):
        verdicts = _verdicts(protocol, targets, outcomes, timeout)
        _object("no peer that answers lets this node join", verdicts, strict)
    else:
        error = BootstrapError(_verdicts(protocol, targets, outcomes, timeout))
        if must_succeed:
            raise error
        logger.warning("starting alone: %s", error)
    return False


def _callee_of(target: Target) -> Callee:
    address, peer = target
    return address if peer is None else peer


def _peer_of(protocol: DHTProtocol, callee: Callee) -> PeerID | None:
    """The peer; ``None`` if it is not known yet which one it is."""
    return callee if isinstance(callee, PeerID) else protocol.p2p.met.get(callee)


def _is_own(protocol: DHTProtocol, callee: Callee) -> bool:
    return isinstance(callee, Multiaddr) and callee in protocol.p2p.transport.addresses()


async def _ping(protocol: DHTProtocol, callee: Callee, validate: bool, outcomes: Outcomes) -> None:
    error: Exception | None = None
    for attempt in range(ATTEMPTS):
        try:
            peer = _peer_of(protocol, callee)
            if isinstance(callee, Multiaddr):
                peer = peer or await protocol.p2p.meet(callee)
                protocol.p2p.clock.join_through(peer)
            assert peer is not None
            await protocol.ping(peer, validate=validate)
        except (ValidationError, NotAMemberError, TimeoutError) as e:
            error = e
            break
        except NO_ANSWER as e:
            error = e
            await asyncio.sleep(SECONDS_BETWEEN_ATTEMPTS * (attempt + 1))
        else:
            error = None
            break
    # Warn here: if another peer has accepted this node, no error will report it.
    if isinstance(error, IdentityMismatchError):
        logger.warning("an initial peer is not the expected one: %s", error)
    outcomes.put_nowait((callee, error))


def _object(text: str, verdicts: dict[str, str], strict: bool) -> None:
    objection = ValidationError(f"{text}:", verdicts)
    if strict:
        raise objection
    logger.warning("%s", objection)


def _verdicts(
    protocol: DHTProtocol, targets: Targets, outcomes: dict[Callee, Exception | None], timeout: float
) -> dict[str, str]:
    """The outcome for each address."""
    verdicts = {}
    for target in targets:
        callee, reason, advice = _callee_of(target), f"no answer within {timeout:g} s", ""
        if callee in outcomes:
            reason = str(outcomes[callee]) or "no answer in time"
        if isinstance(outcomes.get(callee), DialError | None):
            advice = protocol.p2p.advise(target[0])
        verdicts[describe_target(target)] = reason + advice
    return verdicts


def _clock_verdicts(protocol: DHTProtocol) -> dict[str, str]:
    """The time difference to each peer that was asked."""
    return {
        f"peer {source}": f"clock off by {seconds:+.1f} s, compared with the clock of this machine; no majority "
        "tells which is right, so turn on NTP wherever the time is wrong"
        for source, seconds in protocol.p2p.clock.sources.items()
    }


# The times below are chosen. Shorter ones find a swarm sooner, and cost each node more calls while nothing happens.
# Interval of a node's background checks, give or take a quarter.
TICK_SECONDS = 5.0
# The nearest neighbor is pinged after this time without any answer.
IDLE_SECONDS = 4 * TICK_SECONDS
# Longest pause between two pings of a suspect or initial peer, or two attempts to find the swarm again. The first pause
# of a suspect is a tick, and doubles each time.
LONGEST_PAUSE_SECONDS = 6 * TICK_SECONDS
# The same for a suspect whose program has ended, as a refused connection shows: after a restart it joins by itself. An
# initial peer may be restarted without knowing any other, so it keeps the shorter pause.
LONGEST_PAUSE_OF_ENDED_SECONDS = 20 * LONGEST_PAUSE_SECONDS
# Pause between two pings of an initial peer that answers, but has no place in the routing table.
PAUSE_WHEN_WELL_SECONDS = 10 * LONGEST_PAUSE_SECONDS
# Peers pinged at a time: few, because after an outage all nodes ping.
PINGS_AT_A_TIME = 3


def _backoff(due: float) -> Backoff:
    """A backoff for pings of a peer: first at this time, then less and less often while it does not answer."""
    return Backoff(TICK_SECONDS, LONGEST_PAUSE_SECONDS, rests_until=due)


class Reunion:
    """A node's background task that keeps it in the swarm.

    Args:
        protocol: the node's side of the protocol.
        server_mode: decides regularly whether this peer should be a node.
        initial_peers: the peers through which the node has joined; they are never forgotten. An address without an id
            stands for any peer that answers there.
        neighbours: the peers that are now in the local network.
    """

    def __init__(
        self,
        protocol: DHTProtocol,
        server_mode: ServerMode,
        initial_peers: Targets,
        neighbours: Mapping[PeerID, Sequence[Multiaddr]] = MappingProxyType({}),
    ) -> None:
        self._protocol, self._server_mode = protocol, server_mode
        self._p2p, self._connectivity = protocol.p2p, protocol.connectivity
        # A generator of its own, so that its draws do not affect other users of randomness.
        self._rng = random.Random(int(protocol.node_id))
        self._addresses: dict[PeerID, list[Multiaddr]] = {}
        self._places = [address for address, peer in initial_peers if peer is None and not _is_own(protocol, address)]
        for address, peer in initial_peers:
            if peer is not None and peer != self._p2p.peer_id:
                self._addresses.setdefault(peer, []).append(address)
        self._neighbours = neighbours
        self._probes: dict[Callee, Backoff] = {}
        """When to ping peers that are watched; a ping counts as failed until it is answered."""
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Run until cancelled: keep in touch with the swarm, and find it again when it is lost."""
        while True:
            await asyncio.sleep(TICK_SECONDS * self._rng.uniform(0.75, 1.25))
            self._server_mode.look()
            try:
                if not self._connectivity.is_lost:
                    await self._look_around()
                if self._connectivity.is_lost:
                    await self._find_back()
            except NoAccessTokenError as e:
                logger.debug("this node cannot look for others now: %s", e)

    # --- in touch -----------------------------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        await self._ping(self._choose_probes())
        if self._protocol.connectivity.came_back.is_set():
            self._protocol.connectivity.came_back.clear()
            await meet_neighbors(self._protocol)

    def _choose_probes(self) -> list[Callee]:
        table, now = self._protocol.routing_table, self._now()
        watched: dict[Callee, None] = dict.fromkeys(table.suspects.values())
        watched |= dict.fromkeys(peer for peer in self._addresses if peer not in table)
        watched |= dict.fromkeys(peer for peer in self._neighbours if peer not in table)
        watched |= dict.fromkeys(place for place in self._places if not self._is_met(place))
        self._probes = {
            peer: self._probes.get(peer) or _backoff(now + TICK_SECONDS * self._rng.random()) for peer in watched
        }
        due = [peer for peer in watched if self._probes[peer].is_due(now)]
        chosen = sorted(due, key=lambda peer: self._probes[peer].rests_until)[:PINGS_AT_A_TIME]
        # With more nodes in the table than in one bucket, enough other nodes ping the dead ones.
        longest = LONGEST_PAUSE_SECONDS * max(1.0, len(table) / table.bucket_size)
        for peer in chosen:
            self._probes[peer].longest = max(longest, self._probes[peer].longest)
            self._probes[peer].fail(now)
        if self._connectivity.is_silent:  # pings of members tell a dead peer from an outage
            members = [peer for _, peer in table if peer not in watched]
            chosen += self._rng.sample(members, min(PINGS_AT_A_TIME, len(members)))
        elif not chosen and now - self._connectivity.heard_at >= IDLE_SECONDS:
            chosen += [peer for _, peer in table.get_nearest_neighbors(self._protocol.node_id, 1)]
        return chosen

    def _is_met(self, place: Multiaddr) -> bool:
        """Whether the peer that was found at an address is in the routing table, or is this one."""
        peer = self._p2p.met.get(place)
        return peer is not None and (peer == self._p2p.peer_id or peer in self._protocol.routing_table)

    async def _ping(self, peers: Collection[Callee]) -> None:
        """Ping peers; the protocol notes the outcomes."""
        for peer in peers:
            # The addresses that the peer has announced may be outdated: try the initial ones, too.
            if isinstance(peer, PeerID):
                self._p2p.add_addresses(peer, [*self._addresses.get(peer, ()), *self._neighbours.get(peer, ())])
        await asyncio.gather(*map(self._ping_one, peers))

    async def _ping_one(self, peer: Callee) -> None:
        try:
            # There may be another peer at the address by now.
            await self._protocol.ping(peer if isinstance(peer, PeerID) else await self._p2p.meet(peer), validate=False)
        except NO_ANSWER as e:
            # If its relay holds no reservation of the peer, it may have moved to other relays.
            is_refused = isinstance(e, RefusedDialError) and not isinstance(e, NoReservationError)
            if is_refused and isinstance(peer, PeerID) and peer in self._probes and peer not in self._addresses:
                self._probes[peer].longest = LONGEST_PAUSE_OF_ENDED_SECONDS
            return
        if peer in self._probes:
            self._probes[peer] = _backoff(self._now() + PAUSE_WHEN_WELL_SECONDS)

    # --- lost, and found again ----------------------------------------------------------------------------------------

    async def _find_back(self) -> None:
        candidates = await self._candidates()
        if not candidates:
            return
        if all(map(self._has_left, candidates)):
            logger.info("all others have left: this peer continues alone. It keeps calling them")
        else:
            logger.warning(
                "no peer has answered for %.0f s: this machine is offline, or all others have left. It keeps "
                "calling %s",
                self._now() - self._connectivity.heard_at,
                counted(len(candidates), "known peer"),
            )
        self._p2p.clock.settle_anew()
        lost_at, backoff = self._connectivity.heard_at, Backoff(first=1.0, longest=LONGEST_PAUSE_SECONDS)
        while True:
            self._connectivity.heard.clear()
            # Stop waiting when an answer arrives, for example to a call of the application.
            await wait_at_most(self._connectivity.heard, self._rng.uniform(0.0, backoff.pause))
            if self._connectivity.is_lost:
                await self._ping(await self._draw(backoff.failures))
            if not self._connectivity.is_lost and await meet_neighbors(self._protocol):
                break
            backoff.fail()
        self._protocol.connectivity.came_back.clear()
        logger.info("found the swarm again, %.0f s after the last answer", self._now() - lost_at)

    def _has_left(self, callee: Callee) -> bool:
        """Whether a peer, or the one that was found at a place, has said goodbye."""
        peer = callee if isinstance(callee, PeerID) else self._p2p.met.get(callee)
        return peer is not None and self._p2p.book.find(peer).goodbye_at is not None

    async def _candidates(self) -> list[Callee]:
        """All peers that this node has ever known: initial peers, members, suspects, and other peers of a run."""
        known: list[Callee] = [
            *self._addresses,
            *self._neighbours,
            *(peer.peer_id for peer in await self._p2p.list_peers()),
            *self._places,
        ]
        return [peer for peer in dict.fromkeys(known) if peer != self._p2p.peer_id]

    async def _draw(self, attempt: int) -> list[Callee]:
        candidates = await self._candidates()
        drawn = self._rng.sample(candidates, min(PINGS_AT_A_TIME, len(candidates)))
        initial: list[Callee] = [*self._addresses, *self._places]
        # After some attempts, prefer initial peers now and then, because all other addresses may be outdated.
        if initial and attempt >= 5 and self._rng.random() < 0.25:
            drawn[0] = self._rng.choice(initial)
        return list(dict.fromkeys(drawn))


# --- the local network ------------------------------------------------------------------------------------------------

# The seconds that a node waits for the first neighbour. Measured: a neighbour answers within a second.
FIRST_SECONDS = 3.0


class Neighbours:
    """Joins the nodes of the local network as they appear.

    Args:
        protocol: the node's side of the protocol.
        server_mode: decides whether this peer should be a node when another one has accepted it.
    """

    def __init__(self, protocol: DHTProtocol, server_mode: ServerMode) -> None:
        self._protocol, self._server_mode = protocol, server_mode
        self.network = LocalNetwork(protocol.p2p, self._note)
        """Tells which peers are there."""
        self._joined = asyncio.Event()
        self._warn_seldom = Seldom(logger.warning)

    async def start(self) -> None:
        """Announce this node, and join others as soon as they are found."""
        await self.network.start()

    async def wait_for_first(self) -> None:
        """Wait until this node has joined another one, for a few seconds at most."""
        if not await wait_at_most(self._joined, FIRST_SECONDS):
            logger.info("no peer is in the local network yet: starting alone. When one appears, the two join")

    async def close(self) -> None:
        """Stop announcing this node."""
        await self.network.close()

    def _note(self, peer: PeerID) -> None:
        self._protocol.spawn(self._join(peer))

    async def _join(self, peer: PeerID) -> None:
        protocol = self._protocol
        if peer not in protocol.routing_table:
            protocol.p2p.add_addresses(peer, self.network.present.get(peer, ()))
            if not len(protocol.routing_table):
                protocol.p2p.clock.join_through(peer)
            try:
                await protocol.ping(peer, validate=True)
            except ValidationError as e:
                # As with initial peers: it is in the routing table, and the user has to act.
                self._warn_seldom("joined peer %s in the local network, but %s", peer, e, about=peer)
            except NO_ANSWER as e:
                # With others around, it is enough that the node keeps trying.
                if not len(protocol.routing_table):
                    self._warn_seldom("cannot join a peer that is announced in the local network: %s", e, about=peer)
                return
            else:
                logger.info("joined peer %s in the local network", peer)
            await self._server_mode.settle()
            await meet_neighbors(protocol)
        self._joined.set()
