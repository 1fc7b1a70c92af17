"""Walks through the DHT towards target ids: ask the nearest known nodes for nearer ones until there are none.

A :class:`Traversal` decides which node to ask next. It serves many queries at once, with few requests in flight. For
each query it keeps a beam: the ``beam_size`` nearest known nodes that have not failed. It asks them, nearest first. A
request for one query also carries other queries whose targets are near the asked node. When most of the very nearest
nodes have answered, the rest of the beam is known and is asked all at once. From then on the query does not wait for
nodes that are suspiciously slow. All of this is bookkeeping on numbers.

A :class:`Lookup` performs the requests. It knows the peers behind the node ids, and how to reach them. A
:class:`PeerFinder` finds the addresses of a peer by its id: a node's place in the DHT follows from its peer id, and the
nodes near that place know its addresses. This needs no stored record and no trust, because a peer that answers at an
address must prove its identity.

Nodes whose ids were chosen count as farther than all others, so that no peer can choose a place next to a key.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import heapq
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from shoal.base.clock import SwarmClock, get_clock
from shoal.base.logs import Seldom
from shoal.dht.config import NodeConfig
from shoal.dht.protocol import NO_ANSWER, DHTProtocol
from shoal.dht.records import (
    MAX_KEYS_PER_FIND,
    MAX_KNOWN,
    MAX_NEIGHBORS_TOLD,
    FoundRecord,
    pack_known,
    peer_of_contact,
    unpack_contact,
)
from shoal.dht.routing import DHTID, ID_BITS
from shoal.dht.validation import Outcome, Reason, outcome_of_failure
from shoal.errors import DHTError, NoAccessTokenError
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)
warn_seldom = Seldom(logger.warning)

# --- the order of requests --------------------------------------------------------------------------------------------

# The most concurrent walks of one process; the others wait in line, without a call in flight. Measured: of a thousand
# concurrent walks, each is so slow that its calls time out, and costs several times as much.
WALKS_IN_FLIGHT = 8

_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[SwarmClock, asyncio.Semaphore]]
_lines = WeakKeyDictionary()


def walk_line() -> asyncio.Semaphore:
    """The line in which walks of the caller's process wait: ``async with walk_line(): ...``."""
    # The clock identifies the process; in a simulation each simulated machine has one.
    lines = _lines.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    clock = get_clock()
    line = lines.get(clock)
    if line is None:
        line = lines[clock] = asyncio.Semaphore(WALKS_IN_FLIGHT)
    return line


# A query keeps at least this many nodes, however narrow its beam, because it will not hear again of dropped nodes.
# Chosen: three full buckets.
LEAST_KEPT = 3 * NodeConfig.bucket_size


class Answer(NamedTuple):
    """A node's answer to one query."""

    neighbors: Iterable[int]
    """Ids of nodes that it knows near the target."""
    is_enough: bool = False
    """Whether the caller is satisfied, so that the query ends."""


Ask = Callable[[DHTID, list[DHTID]], Awaitable[Mapping[DHTID, Answer] | None]]
"""Asks a node about targets; returns ``None`` if it did not respond."""
OnFinished = Callable[[DHTID, list[DHTID]], None]
"""Called once for each query: its target, and the nearest nodes found that did not fail, nearest first."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a task and takes care of it until it ends."""


# Farther than any distance between two ids.
_CHOSEN = 1 << ID_BITS


class Query:
    """The search for one target. Nodes are kept as distances to it; nodes in ``chosen`` are beyond all others."""

    __slots__ = (
        "active",
        "asked",
        "beam_size",
        "chosen",
        "draw",
        "finished",
        "front",
        "has_arrived",
        "known",
        "nearest",
        "next_distance",
        "responded",
        "stalled",
        "target",
    )

    def __init__(
        self,
        target: DHTID,
        beam_size: int,
        own_id: int | None = None,
        front: int | None = None,
        chosen: AbstractSet[int] = frozenset(),
        draw: int | None = None,
    ) -> None:
        self.target, self.chosen, self.draw = target, chosen, draw
        self.beam_size = beam_size
        self.front = beam_size if front is None else front
        self.known: set[int] = set() if own_id is None else {own_id ^ target}
        # The nearest nodes that have not failed, sorted: three times the beam or more, in case many are dead.
        self.nearest: list[int] = []
        self.asked: set[int] = set()
        self.responded: set[int] = set()
        self.active = 0
        self.stalled: set[int] = set()
        """Nodes that are suspiciously slow."""
        self.has_arrived = False
        """Whether most of the nearest nodes have responded, so that the rest of the beam can be asked at once."""
        self.finished = False
        self.next_distance: int | None = None
        """Distance of the nearest node of the beam that has not been asked."""

    def distance_to(self, node: int) -> int:
        """The distance under which a node is kept."""
        distance = node ^ self.target
        return distance | _CHOSEN if node in self.chosen else distance

    def node_at(self, distance: int) -> DHTID:
        """The node that is kept under this distance."""
        return DHTID((distance & ~_CHOSEN) ^ self.target)

    def add(self, nodes: Iterable[int]) -> None:
        """Learn of nodes."""
        limit = max(3 * self.beam_size, LEAST_KEPT)
        target, chosen = self.target, self.chosen
        for node in nodes:
            distance = node ^ target
            if chosen and node in chosen:
                distance |= _CHOSEN
            if distance not in self.known and (len(self.nearest) < limit or distance < self.nearest[-1]):
                self.known.add(distance)
                bisect.insort(self.nearest, distance)
        del self.nearest[limit:]
        self._find_next()

    def mark_asked(self, node: int) -> None:
        self.asked.add(self.distance_to(node))
        self._find_next()

    def mark_responded(self, node: int) -> None:
        """Note that a node is alive, even if it had been given up or was asked for another query."""
        distance = self.distance_to(node)
        self.known.add(distance)
        self.responded.add(distance)
        index = bisect.bisect_left(self.nearest, distance)
        if index == len(self.nearest) or self.nearest[index] != distance:
            self.nearest.insert(index, distance)

    def give_up(self, node: int) -> None:
        """Replace this node by the next nearest one."""
        distance = self.distance_to(node)
        index = bisect.bisect_left(self.nearest, distance)
        if index < len(self.nearest) and self.nearest[index] == distance:
            del self.nearest[index]
        self._find_next()

    def _find_next(self) -> None:
        # An honest walk needs one or two requests per place in the beam. With ten, an attacker makes up nearer nodes.
        if len(self.asked) >= 10 * self.beam_size:
            self.next_distance = None
            return
        front = self.nearest[: self.front]
        self.next_distance = next((distance for distance in front if distance not in self.asked), None)
        if self.draw is None or not front:
            return
        asked = sum(distance in self.asked for distance in front)
        if not asked:
            self.next_distance = front[self.draw % len(front)]
        elif asked >= self.beam_size and front[0] in self.asked:
            self.next_distance = None

    def has_responses_of_nearest(self, count: int) -> bool:
        """Whether the ``count`` nearest known nodes have all responded."""
        return len(self.nearest) >= count and all(distance in self.responded for distance in self.nearest[:count])

    def may_end_without_stalled(self, num_replicas: int) -> bool:
        """Whether only suspicious answers are missing, and most nodes that should hold a record have answered."""
        return self.active == len(self.stalled) and self.has_responses_of_most(num_replicas)

    def has_responses_of_most(self, count: int) -> bool:
        """Whether most of the ``count`` nearest nodes, including suspiciously slow ones, have responded."""
        nearest = heapq.nsmallest(count, (*self.nearest[:count], *self.stalled))
        return sum(distance in self.responded for distance in nearest) * 2 > len(nearest)

    def best_nodes(self) -> list[DHTID]:
        """The beam, nearest first."""
        return list(dict.fromkeys(map(self.node_at, self.nearest[: self.beam_size])))


class _Request:
    """A request in flight to one node, about some queries."""

    __slots__ = ("has_slot", "node", "queries", "stall_timer", "started_at")

    def __init__(self, node: DHTID, queries: list[Query], started_at: float) -> None:
        self.node, self.queries, self.started_at = node, queries, started_at
        self.has_slot = True
        self.stall_timer: asyncio.TimerHandle | None = None


class Traversal:
    """One walk for many targets.

    Args:
        targets: the ids to walk to, without duplicates.
        start: returns the nodes known at the start, for each target.
        ask: asks one node.
        on_finished: gets the result of each query as soon as it ends; must not raise.
        num_workers: most requests in flight, not counting suspiciously slow ones.
        beam_size: how many of the nearest nodes are asked before a query gives up.
        queries_per_call: most targets in one request.
        own_id: id of this node, which is never asked.
        enough_responses: end a query when this many of the nearest nodes have responded; ``None`` = ask the whole beam.
        num_replicas: how many of the nearest nodes should hold the record. When most of them have answered, the rest of
            the beam is asked at once, and the query does not wait for suspicious nodes. ``None`` = a query ends when
            its whole beam has answered or failed.
        stall_after: least seconds after which a request is suspicious. Then another one may start in parallel, and the
            node counts as gone unless it answers after all.
        spawn: starts the requests; they may outlive the walk.
        chosen: ids that count as farther than all others; may grow during the walk, before an answer names them.
        draw: a random number that selects which of the ``num_replicas`` nearest nodes is asked first. That node sends
            nearly all of the data, so it should not always be the nearest. The nearest ones follow, until ``beam_size``
            have been asked. ``None``: the nearest are asked first.
    """

    def __init__(
        self,
        targets: Iterable[DHTID],
        start: Callable[[DHTID], Iterable[DHTID]],
        ask: Ask,
        on_finished: OnFinished,
        *,
        num_workers: int,
        beam_size: int,
        own_id: int | None = None,
        queries_per_call: int | None = None,
        enough_responses: int | None = None,
        num_replicas: int | None = None,
        stall_after: float | None = None,
        spawn: Spawn = asyncio.create_task,
        chosen: AbstractSet[int] = frozenset(),
        draw: int | None = None,
    ) -> None:
        front = enough_responses if draw is None else num_replicas
        self._unfinished = {target: Query(target, beam_size, own_id, front, chosen, draw) for target in targets}
        self._start = start
        self._ask = ask
        self._on_finished = on_finished
        self._num_workers = num_workers
        self._queries_per_call = min(queries_per_call or 2**31, max(1, math.isqrt(len(self._unfinished))))
        self._enough_responses = enough_responses
        self._num_replicas = num_replicas
        self._beam_size = beam_size
        self._stall_after = stall_after
        self._spawn = spawn
        self._slots_taken = 0
        self._waited = (0, 0.0)  # the answers so far, and the seconds until each of them in total
        self._done: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Walk until every query has ended. Cancelling this ends the queries without a result.

        Requests that are still in flight then continue: cutting them off would cost connections, and their answers
        still show which nodes are alive.
        """
        if not self._unfinished:
            return
        self._done = asyncio.get_running_loop().create_future()
        for query in self._unfinished.values():
            query.add(self._start(query.target))
        self._advance()
        try:
            await self._done
        except asyncio.CancelledError:
            for query in self._unfinished.values():
                query.finished = True
            self._unfinished.clear()
            raise

    def finish(self, target: DHTID) -> None:
        """End one query now, with the nodes found so far."""
        query = self._unfinished.pop(target, None)
        if query is None:
            return
        query.finished = True
        self._on_finished(target, query.best_nodes())
        if not self._unfinished and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _advance(self) -> None:
        """End the queries that have nothing left to do, and fill the free slots with requests."""
        for query in list(self._unfinished.values()):
            if self._has_ended(query):
                self.finish(query.target)
        while self._slots_taken < max(self._num_workers, self._beam_size):
            waiting = [query for query in self._unfinished.values() if self._may_proceed(query)]
            if not waiting:
                return
            query = min(waiting, key=_urgency)
            assert query.next_distance is not None
            self._send_request(query.node_at(query.next_distance), query)

    def _may_proceed(self, query: Query) -> bool:
        if query.next_distance is None:
            return False
        if self._slots_taken < self._num_workers:
            return True
        return query.has_arrived

    def _has_ended(self, query: Query) -> bool:
        if self._enough_responses is not None and query.has_responses_of_nearest(self._enough_responses):
            return True
        if query.next_distance is not None:
            return False
        if self._num_replicas is not None and query.may_end_without_stalled(self._num_replicas):
            return True
        return query.active == 0

    def _send_request(self, node: DHTID, first: Query) -> None:
        queries = [first, *self._choose_companions(node, first)]
        for query in queries:
            query.mark_asked(node)
            query.active += 1
        loop = asyncio.get_running_loop()
        request = _Request(node, queries, loop.time())
        self._slots_taken += 1
        if self._stall_after is not None:
            # The limit scales with the mean: if all nodes are slow, none is suspicious.
            answers, seconds = self._waited
            mean = seconds / max(1, answers)
            delay = max(self._stall_after, 3.0 * mean)
            request.stall_timer = loop.call_later(delay, self._on_stalled, request)
        task = self._spawn(self._carry_out(request))
        task.add_done_callback(functools.partial(self._on_request_done, request))

    def _on_stalled(self, request: _Request) -> None:
        request.has_slot = False
        self._slots_taken -= 1
        for query in request.queries:
            query.give_up(request.node)
            query.stalled.add(query.distance_to(request.node))
            self._note_progress(query)
        self._advance()

    def _choose_companions(self, node: DHTID, first: Query) -> list[Query]:
        if self._queries_per_call == 1:
            return []
        others = (
            query
            for query in self._unfinished.values()
            if query is not first and query.distance_to(node) not in query.asked
        )
        return heapq.nsmallest(self._queries_per_call - 1, others, key=lambda query: node ^ query.target)

    async def _carry_out(self, request: _Request) -> None:
        answers = None
        try:
            answers = await self._ask(request.node, [query.target for query in request.queries])
        finally:
            for query in request.queries:
                query.active -= 1
                query.stalled.discard(query.distance_to(request.node))
        if answers is not None:
            number, seconds = self._waited
            self._waited = number + 1, seconds + (asyncio.get_running_loop().time() - request.started_at)
        for query in request.queries:
            answer = None if answers is None else answers.get(query.target)
            if answer is None:
                query.give_up(request.node)
                continue
            query.mark_responded(request.node)
            query.add(answer.neighbors)
            self._note_progress(query)
            if answer.is_enough:
                self.finish(query.target)

    def _note_progress(self, query: Query) -> None:
        if self._num_replicas is not None:
            query.has_arrived = query.has_responses_of_most(self._num_replicas)

    def _on_request_done(self, request: _Request, task: asyncio.Task[None]) -> None:
        if request.stall_timer is not None:
            request.stall_timer.cancel()
        if request.has_slot:
            self._slots_taken -= 1
        error = None if task.cancelled() else task.exception()
        if self._done is None or self._done.done():
            return
        if task.cancelled():
            self._done.set_exception(DHTError("the search was ended: this node is being shut down"))
        elif error is not None:
            self._done.set_exception(error)
        else:
            self._advance()


def _urgency(query: Query) -> tuple[int, int]:
    assert query.next_distance is not None
    return query.active, query.next_distance


# --- asking the nodes -------------------------------------------------------------------------------------------------

# Most nodes in a have-set (chosen); the rest of the room is for entries.
MAX_NODES_KNOWN = MAX_KNOWN // 4


_BACKED_OFF = Outcome(Reason.BACKED_OFF)
_OTHER_ID = Outcome(Reason.BAD_ANSWER, "its id differs from the one that others give")


class Lookup:
    """State shared by all requests of one walk.

    Args:
        protocol: asks other nodes; has the blacklist of peers not to ask.
        known_nodes: nodes to start with, besides those of the routing table.
    """

    def __init__(self, protocol: DHTProtocol, known_nodes: Mapping[DHTID, PeerID] | None = None) -> None:
        self._protocol = protocol
        self._known_nodes = dict(known_nodes or {})
        self._peers: dict[int, PeerID] = {int(node_id): peer for node_id, peer in self._known_nodes.items()}
        self._contacts: dict[int, msgspec.Raw] = {}  # contacts that other nodes have sent
        self._hops: dict[int, int] = {}
        # By targets: known nodes near them, as ids and packed; forgotten when more nodes become known.
        self._near: dict[tuple[DHTID, ...], tuple[list[int], bytes]] = {}
        self.chosen: set[int] = {
            node_id for node_id, peer in self._known_nodes.items() if node_id != DHTID.of_peer(peer)
        }
        """Ids of nodes that do not follow from their peers' ids."""
        self.failures: dict[PeerID, Outcome] = {}
        """Peers that did not answer, or were not asked because they had not answered shortly before."""
        self._neighbors = protocol.config.bucket_size

    def starting_nodes(self, target: DHTID) -> list[DHTID]:
        """The nearest nodes to a target that are known without a request; suspects only if there are no others."""
        table = self._protocol.routing_table
        nearest = dict(table.get_nearest_neighbors(target, max(self._neighbors, LEAST_KEPT))) or table.suspects
        for node_id, peer in nearest.items():
            self._peers[node_id] = peer
            self._hops[node_id] = 1
        self._near.clear()
        if table.chosen:
            self.chosen |= table.chosen & nearest.keys()
        own_id = self._protocol.node_id
        return [
            node_id
            for node_id in (*nearest, *self._known_nodes)
            if node_id != own_id and not self._is_backed_off(self._peers[node_id])
        ]

    def _is_backed_off(self, peer: PeerID) -> bool:
        """Whether a peer must not be asked for a while."""
        if peer not in self._protocol.blacklist:
            return False
        self.failures.setdefault(peer, _BACKED_OFF)
        return True

    async def ask(
        self,
        node_id: DHTID,
        targets: Sequence[DHTID],
        *,
        neighbors_only: bool = False,
        known_entries: Sequence[int] = (),
        most_entries: int = 0,
    ) -> dict[DHTID, FoundRecord] | None:
        """Ask a node about targets; returns ``None`` if it does not answer.

        Args:
            known_entries: :func:`~shoal.dht.records.numbers_of_entries` that need not be in the answer.
            most_entries: as for :meth:`DHTNode.get_many_by_id`.
        """
        peer = self.peer_of(node_id)
        if peer is None or self._is_backed_off(peer):
            return None
        wanted = self._neighbors if self._neighbors > self._protocol.config.bucket_size else 0
        known_nodes, known = self._known_near(targets)
        if known_entries or most_entries:  # each node should draw different entries
            known = pack_known([*known_nodes, *known_entries], self._protocol.p2p.rng)
        try:
            answer = await self._protocol.find_at(
                peer, targets, wanted, neighbors_only=neighbors_only, known=known, most=most_entries
            )
        except NoAccessTokenError:
            raise
        except NO_ANSWER as e:
            self.failures[peer] = outcome_of_failure(e)
            return None
        # The peer has another id, so this one was made up. One peer must not stand for many nodes.
        if answer.node_id != node_id.to_bytes():
            self._protocol.p2p.metrics.node_ids_refused += 1
            self.failures[peer] = _OTHER_ID
            warn_seldom(
                "the DHT names peer %s with an id that it does not have, so it is left out. Some node lies about which "
                "nodes are near a key, or that peer has a new id",
                peer,
            )
            return None
        self._hear_of(answer.contacts, self.hops_to(node_id) + 1)
        if len(targets) > 1:  # an answer for one target is left out for the others, although their queries need it
            for record in answer.records.values():
                record.neighbors.extend(known_nodes)
        return answer.records

    def _known_near(self, targets: Sequence[DHTID]) -> tuple[list[int], bytes]:
        """Nodes for the have-set, plainly and packed."""
        found = self._near.get(tuple(targets))
        if found is None:
            # Nodes with chosen ids are left out: they may be false contacts of nodes that others describe correctly.
            known = list((self._peers.keys() | self._contacts.keys()) - self.chosen)
            # Some more than in an answer, because the asked node knows other nodes than the asker.
            count = min(self._neighbors + 4, MAX_NODES_KNOWN // max(1, len(targets)))
            if len(known) > count:
                nearest = (heapq.nsmallest(count, known, key=target.__xor__) for target in targets)
                known = list(dict.fromkeys(node_id for few in nearest for node_id in few))
            found = self._near[tuple(targets)] = known, pack_known(known, self._protocol.p2p.rng)
        return found

    def _hear_of(self, contacts: Mapping[int, msgspec.Raw], hops: int) -> None:
        """Learn of nodes. One whose id follows from its peer's replaces others with the same id."""
        if contacts:
            self._near.clear()
        for told_id, contact in contacts.items():
            is_known = told_id in self._contacts or told_id in self._peers
            if is_known and told_id not in self.chosen:
                continue
            if DHTID.of_peer_bytes(peer_of_contact(contact)) == told_id:
                self.chosen.discard(told_id)
                self._peers.pop(told_id, None)
            elif is_known:
                continue
            else:
                self.chosen.add(told_id)
            self._contacts[told_id] = contact
            self._hops.setdefault(told_id, hops)

    def with_own(self, nearest: Iterable[DHTID], target: DHTID) -> list[DHTID]:
        """The nodes nearest to a target and this one, in the order in which they should hold records stored there."""
        own_id = self._protocol.node_id
        chosen = self.chosen | self._protocol.routing_table.chosen & {own_id}
        return sorted([*nearest, own_id], key=lambda node_id: (node_id in chosen, node_id ^ target))

    def hops_to(self, node_id: int) -> int:
        """Number of consecutive answers needed to get one from this node; 1 if it was known from the start."""
        return self._hops.get(node_id, 1)

    def peer_of(self, node_id: int) -> PeerID | None:
        """The peer of a known node, ready to be called; ``None`` if its contact is malformed."""
        peer = self._peers.get(node_id)
        if peer is None and (told := self._contacts.get(node_id)) is not None:
            peer = self._introduce(told)
            if peer is not None:
                self._peers[node_id] = peer
        return peer

    def _introduce(self, told: msgspec.Raw) -> PeerID | None:
        """Give the network layer the addresses of a peer that others have named."""
        try:
            contact = unpack_contact(told)
        except ValueError as e:
            logger.debug("ignored a node that another node named: %s", e)
            return None
        peer, p2p = PeerID(contact.peer_id), self._protocol.p2p
        if peer == p2p.peer_id:
            return None
        known = {str(address) for address in p2p.get_addresses(peer)}
        for address in contact.addresses:
            if address not in known:
                try:
                    p2p.add_addresses(peer, [address])
                except ValueError as e:
                    # Perhaps of a kind that this version does not know; the peer's other addresses may work.
                    logger.debug("ignored an address that another node sent: %s", e)
        return peer

    async def find_nearest(
        self, targets: Iterable[DHTID], on_finished: OnFinished, *, num_workers: int, beam_size: int, enough: int
    ) -> None:
        """Find the nodes that are nearest to targets, without asking for records.

        Args:
            targets: the ids to look near.
            on_finished: gets a target and the nearest nodes found there, without this node.
            num_workers: most requests in flight.
            beam_size: most nodes in a result.
            enough: a target is done when this many of the nearest nodes have answered.
        """
        # Ask for enough neighbors: the nearest nodes know each other, but would return fewer by default.
        self._neighbors = max(self._neighbors, enough)
        walk = Traversal(
            targets,
            self.starting_nodes,
            self._ask_for_neighbors,
            on_finished,
            num_workers=num_workers,
            beam_size=beam_size,
            own_id=self._protocol.node_id,
            queries_per_call=min(MAX_KEYS_PER_FIND, max(1, MAX_NEIGHBORS_TOLD // self._neighbors)),
            enough_responses=enough,
            stall_after=self._protocol.stall_after,
            spawn=self._protocol.spawn,
            chosen=self.chosen,
        )
        await self.run(walk)

    @staticmethod
    async def run(walk: Traversal) -> None:
        """Run a walk as soon as the line of walks lets it in."""
        async with walk_line():
            await walk.run()

    async def _ask_for_neighbors(self, node_id: DHTID, targets: list[DHTID]) -> dict[DHTID, Answer] | None:
        answers = await self.ask(node_id, targets, neighbors_only=True)
        if answers is None:
            return None
        return {target: Answer(record.neighbors) for target, record in answers.items()}


async def meet_nodes_near(protocol: DHTProtocol, place: DHTID, count: int) -> bool:
    """Walk to a place in the DHT so that the nodes there and this one meet; returns whether there is any other node.

    Args:
        count: end the walk when this many of the nearest nodes have answered.
    """
    met: list[DHTID] = []
    config = protocol.config
    await Lookup(protocol).find_nearest(
        [place],
        lambda _, nearest: met.extend(nearest),
        num_workers=config.num_workers,
        beam_size=max(config.bucket_size, count),
        enough=count,
    )
    return bool(met)


# The pause before a peer that was not found is looked for again. Chosen.
SECONDS_BETWEEN_SEARCHES = 5.0


class PeerFinder:
    """Looks for the addresses of peers in the DHT.

    Args:
        protocol: the searching node's side of the protocol; its peer can dial the found peers.
    """

    def __init__(self, protocol: DHTProtocol) -> None:
        self._protocol = protocol
        self._searches: dict[PeerID, asyncio.Task[None]] = {}
        self._now = asyncio.get_running_loop().time

    async def find(self, peer: PeerID) -> None:
        """Look for the addresses of a peer; concurrent callers share one search."""
        if self._now() < self._protocol.p2p.book.find(peer).sought_at + SECONDS_BETWEEN_SEARCHES:
            return
        search = self._searches.get(peer)
        if search is None:
            search = self._searches[peer] = self._protocol.spawn(self._search(peer))
            search.add_done_callback(lambda _: self._searches.pop(peer))
        await asyncio.wait([search])

    async def _search(self, peer: PeerID) -> None:
        try:
            async with asyncio.timeout(self._protocol.wait_timeout):
                await meet_nodes_near(self._protocol, DHTID.of_peer(peer), self._protocol.config.num_replicas)
        except (DHTError, TimeoutError) as e:
            logger.debug("the search for peer %s was given up: %r", peer, e)
        if not self._protocol.p2p.is_reachable(peer):
            self._protocol.p2p.book[peer].sought_at = self._now()
