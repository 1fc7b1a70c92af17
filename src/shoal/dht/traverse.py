"""Walks through the table towards target ids: ask the nearest known nodes for nearer ones until there are none.

One traversal serves many queries at once, with few requests in flight. For each query it keeps a beam: the
``beam_size`` nearest known nodes that have not failed. It asks them, nearest first. A request for one query also
carries other queries, those whose targets are nearest to the node that is asked.

When most of the very nearest nodes have answered, the rest of the beam is known and is asked all at once. From then on
the query does not wait for nodes that are suspiciously slow.

Nodes whose ids were chosen count as farther than all others: nobody gets next to a key by saying so.

Everything here is plain bookkeeping on numbers; how a node is asked is the caller's business.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import heapq
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from shoal.base.clock import SwarmClock, get_clock
from shoal.dht.routing import DHTID, ID_BITS
from shoal.errors import DHTError

# Concurrent walks of one process; the others wait in line. Among a thousand concurrent walks each would be so slow that
# its calls time out, and would cost several times as much. A walk that waits in line has no call in flight.
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


# A query gives up after this many requests per place in its beam.
MAX_REQUESTS_PER_BEAM = 10


# A query keeps at least this many nodes, however narrow its beam is: nobody tells it again of those that it drops.
LEAST_KEPT = 60

# A request is suspicious only after this many times the mean response time.
STALLED_OVER_MEAN = 3.0
# Most suspicious requests per worker that give up their slots; further ones keep theirs.
MAX_STALLED_PER_WORKER = 4


class Answer(NamedTuple):
    """A node's answer to one query."""

    neighbors: Iterable[int]
    """Ids of nodes that it knows near the target."""
    is_enough: bool = False
    """Whether the caller has what it wanted, so that the query ends."""


Ask = Callable[[DHTID, list[DHTID]], Awaitable[Mapping[DHTID, Answer] | None]]
"""Asks a node about targets; returns ``None`` if it did not respond."""
OnFinished = Callable[[DHTID, list[DHTID]], None]
"""Called once for each query: its target, and the nearest nodes found that did not fail, nearest first."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a task and takes care of it until it ends."""


# Farther than any distance between two ids.
_CHOSEN = 1 << ID_BITS


class Query:
    """The search for one target. Nodes are kept as their distances to it; those in ``chosen`` are beyond all others."""

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
        # The nearest nodes that have not failed, sorted: three times the beam, or more in case that many are dead.
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
        """How a node is kept."""
        distance = node ^ self.target
        return distance | _CHOSEN if node in self.chosen else distance

    def node_at(self, distance: int) -> DHTID:
        """The node that is kept so."""
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
        """This node is there, even if it had been given up or was asked for the sake of another query."""
        distance = self.distance_to(node)
        self.known.add(distance)
        self.responded.add(distance)
        index = bisect.bisect_left(self.nearest, distance)
        if index == len(self.nearest) or self.nearest[index] != distance:
            self.nearest.insert(index, distance)

    def give_up(self, node: int) -> None:
        """Do not count on this node: the next nearest one gets its place."""
        distance = self.distance_to(node)
        index = bisect.bisect_left(self.nearest, distance)
        if index < len(self.nearest) and self.nearest[index] == distance:
            del self.nearest[index]
        self._find_next()

    def _find_next(self) -> None:
        # So many requests mean that somebody makes up ever nearer nodes.
        if len(self.asked) >= MAX_REQUESTS_PER_BEAM * self.beam_size:
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
        """Whether only suspicious nodes are still to answer, and most nodes that should hold a record have answered."""
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
        start: returns the nodes known at the beginning, for each target.
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
        stall_after: least seconds after which a request is suspicious. Then another one may start beside it, and the
            node counts as gone unless it answers after all.
        spawn: starts the requests; they may outlive the walk.
        chosen: ids that count as farther than all others; may grow while the walk goes on, before they are told.
        draw: a random number, which tells which of the ``num_replicas`` nearest nodes is asked first. That one sends
            nearly all there is, so it should not always be the nearest. The nearest ones follow, until ``beam_size``
            have been asked. ``None``: they are asked nearest first.
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
        self._queries = {target: Query(target, beam_size, own_id, front, chosen, draw) for target in targets}
        self._start = start
        self._unfinished = dict(self._queries)
        self._ask = ask
        self._on_finished = on_finished
        self._num_workers = num_workers
        self._queries_per_call = min(queries_per_call or 2**31, max(1, math.isqrt(len(self._queries))))
        self._enough_responses = enough_responses
        self._num_replicas = num_replicas
        self._beam_size = beam_size
        self._stall_after = stall_after
        self._spawn = spawn
        self._slots_taken = 0
        self._stalled = 0
        self._answers = 0
        self._seconds_until_answers = 0.0
        self._done: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Walk until every query has ended. Cancelling this ends the queries without a result.

        Requests that are still in flight then go on: cutting them off would cost connections, and their answers still
        show which nodes are alive.
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
            # Scales with the mean: if all nodes are slow, none is suspicious.
            mean = self._seconds_until_answers / max(1, self._answers)
            delay = max(self._stall_after, STALLED_OVER_MEAN * mean)
            request.stall_timer = loop.call_later(delay, self._on_stalled, request)
        task = self._spawn(self._carry_out(request))
        task.add_done_callback(functools.partial(self._on_request_done, request))

    def _on_stalled(self, request: _Request) -> None:
        if self._stalled >= MAX_STALLED_PER_WORKER * self._num_workers:
            return
        request.has_slot = False
        self._slots_taken -= 1
        self._stalled += 1
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
            self._answers += 1
            self._seconds_until_answers += asyncio.get_running_loop().time() - request.started_at
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
        else:
            self._stalled -= 1
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
