"""The three calls between nodes (ping, store, find): asking, answering, and learning from both which nodes are alive.

An unanswered call has one of two causes. If the peer is gone, others answer as usual. If this machine is offline or too
busy to listen, most calls fail, whatever the peer. Only the first counts against the peer. A peer that is silent twice,
ten seconds apart, counts as gone in any case if another peer was heard in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

import msgspec

from shoal.access.badges import ANY_ROLE, Roles
from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time
from shoal.base.tasks import BackgroundTasks
from shoal.dht.authorization import AuthorizerBase, AuthRole, AuthRPCWrapper, MembersOnly
from shoal.dht.config import NodeConfig
from shoal.dht.local_records import LocalRecords, Payer, records_for_newcomer
from shoal.dht.records import (
    MAX_ANSWER_BYTES,
    MAX_KEYS_PER_FIND,
    MAX_NEIGHBORS,
    MAX_NEIGHBORS_TOLD,
    FindAnswer,
    FindRequest,
    FindResponse,
    FindResult,
    Found,
    HaveSet,
    NewRecord,
    PackedContacts,
    PingRequest,
    PingResponse,
    StoreRequest,
    StoreResponse,
    split_into_requests,
)
from shoal.dht.routing import DHTID, RoutingTable, id_of
from shoal.dht.storage import DHTLocalStorage
from shoal.dht.validation import CompositeValidator, Outcome, RecordValidatorBase
from shoal.errors import (
    DHTError,
    DialError,
    InterruptedDialError,
    NoAccessTokenError,
    NotAMemberError,
    NotCallableError,
    ProtocolError,
    ShoalError,
    StreamClosedError,
    ValidationError,
)
from shoal.net.service import open_to
from shoal.p2p import P2P, Header, P2PContext, PeerID, ServicerBase
from shoal.p2p.joining import explain_unreachable
from shoal.peers.book import PeerBook
from shoal.reach.reachability import Reachability

# --- a peer that is gone, or an outage of this machine ----------------------------------------------------------------

# Calls within this window are compared with each other. After this time without any answer the swarm may be lost.
# Chosen: three times the timeout of a call.
WINDOW_SECONDS = 10.0
# An event loop that lags more than this may have missed answers that arrived in time. Chosen: well over the pauses of a
# garbage collection, well under the timeout of a call.
LATE_SECONDS = 0.5
# Interval of the checks whether the loop lags.
HEARTBEAT_SECONDS = LATE_SECONDS / 2


class Blacklist:
    """Peers that did not answer, each avoided for ``base_time * backoff_rate ** earlier failures`` seconds.

    Args:
        base_time: seconds after the first failure; 0: no peer is avoided.
        backoff_rate: each further failure in a row multiplies the time by this.
        book: keeps the failures; default: a new one.
    """

    def __init__(self, base_time: float = 5.0, backoff_rate: float = 2.0, book: PeerBook | None = None) -> None:
        if not (base_time >= 0 and backoff_rate >= 1):
            raise ValueError(
                f"blacklist_time must be at least 0 and backoff_rate at least 1, got {base_time} and {backoff_rate}"
            )
        self.base_time, self.backoff_rate = base_time, backoff_rate
        self._book = PeerBook() if book is None else book

    def register_failure(self, peer: PeerID) -> None:
        """Note that the peer did not answer. Failures while it is avoided do not extend the pause."""
        if peer in self or self.base_time == 0:
            return
        record = self._book[peer]
        growth = self.backoff_rate ** min(record.unanswered, 10)  # by then it lasts over an hour
        record.avoided_until = get_dht_time() + self.base_time * growth
        record.unanswered += 1

    def register_success(self, peer: PeerID) -> None:
        """Note that the peer answered: forget its failures, and no longer avoid it."""
        record = self._book.get(peer)
        if record is not None:
            record.unanswered, record.avoided_until = 0, -math.inf

    def clear(self) -> None:
        """Forget all failures."""
        for record in self._book.values():
            record.unanswered, record.avoided_until = 0, -math.inf

    def __contains__(self, peer: PeerID) -> bool:
        record = self._book.get(peer)
        # Walks ask this for each node that they know, and nearly all of them have answered: so the quick test first.
        return record is not None and record.unanswered > 0 and get_dht_time() < record.avoided_until

    def __len__(self) -> int:
        now = get_dht_time()
        return sum(now < record.avoided_until for record in self._book.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_time={self.base_time}, banned={len(self)})"


class Connectivity:
    """Which peers answered this node in the last seconds, and which did not.

    Args:
        book: notes since when a peer's silence has been excused.
    """

    def __init__(self, book: PeerBook) -> None:
        self._book = book
        self._loop = asyncio.get_running_loop()
        # Time of the last call to each peer, and whether it was answered; the oldest first.
        self._outcomes: dict[PeerID, tuple[float, bool]] = {}
        self._silent = 0  # how many of them were not answered
        self._in_flight = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._was_late_at = float("-inf")
        self._began_at = self._loop.time()
        self._heard_at: float | None = None
        self._silent_since: float | None = None
        self._silence_noted_at = 0.0
        self._has_asked_again = False
        self.heard = asyncio.Event()
        """Set by each answer that ends a silence."""
        self.came_back = asyncio.Event()
        """Set when a suspect turns out to be alive: it may know more nodes."""

    @property
    def is_silent(self) -> bool:
        """Whether no peer has answered since a call failed."""
        return self._silent_since is not None

    @property
    def is_lost(self) -> bool:
        """Whether the swarm is lost: peers answered earlier, but none has for a while, despite a further call.

        Without the further call, this node might just have been idle after one failure.
        """
        if self._silent_since is None or self._heard_at is None or not self._has_asked_again:
            return False
        return self._loop.time() - self._silent_since >= WINDOW_SECONDS

    @property
    def heard_at(self) -> float:
        """Time of the last answer from any peer, or of this node's start if there was none."""
        return self._began_at if self._heard_at is None else self._heard_at

    # --- calls in flight ----------------------------------------------------------------------------------------------

    def begin_call(self) -> float:
        """Note that a call begins, and watch the loop's lag until :meth:`end_call`; returns the time."""
        self._in_flight += 1
        now = self._loop.time()
        if self._heartbeat is None:
            self._schedule_heartbeat(now)
        return now

    def end_call(self) -> None:
        """Note that a call has ended."""
        self._in_flight -= 1

    def _schedule_heartbeat(self, now: float) -> None:
        self._heartbeat = self._loop.call_later(HEARTBEAT_SECONDS, self._beat, now + HEARTBEAT_SECONDS)

    def _beat(self, due: float) -> None:
        now = self._loop.time()
        if now - due > LATE_SECONDS:
            self._was_late_at = now
        self._heartbeat = None
        if self._in_flight:
            self._schedule_heartbeat(now)

    def close(self) -> None:
        """Stop listening."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def note_answer(self, peer: PeerID) -> None:
        """Note that a peer has answered a call."""
        self._note(peer, answered=True)
        record = self._book.get(peer)
        if record is not None:
            record.excused_since = None
        self._heard_at = self._loop.time()
        if self._silent_since is not None:
            self._silent_since = None
            self.heard.set()

    def note_silence(self, peer: PeerID, asked_at: float) -> bool:
        """Note that a peer has not answered a call; returns whether that counts against it.

        Args:
            peer: the peer that was called.
            asked_at: the time that :meth:`begin_call` returned.
        """
        now = self._loop.time()
        if self._is_late(asked_at, now):
            return False  # the answer may have arrived, unread
        self._note(peer, answered=False)
        if self._silent_since is None:
            self._silent_since, self._silence_noted_at, self._has_asked_again = asked_at, now, False
        elif asked_at >= self._silence_noted_at:
            self._has_asked_again = True
        # A single silent peer never counts as an outage.
        if self._silent < 2 or 2 * self._silent <= len(self._outcomes):
            return True
        record = self._book[peer]
        if record.excused_since is None:
            record.excused_since = asked_at
        return asked_at - record.excused_since >= WINDOW_SECONDS and self.heard_at > record.excused_since

    def _is_late(self, asked_at: float, now: float) -> bool:
        """Whether the loop lagged while the call was in flight, or lags now and the heartbeat could not notice yet."""
        if self._heartbeat is not None and now - self._heartbeat.when() > LATE_SECONDS:
            return True
        return self._was_late_at >= asked_at

    def _note(self, peer: PeerID, *, answered: bool) -> None:
        now = self._loop.time()
        former = self._outcomes.pop(peer, None)
        if former is not None and not former[1]:
            self._silent -= 1
        self._outcomes[peer] = (now, answered)
        self._silent += not answered
        while True:
            oldest = next(iter(self._outcomes))
            at, was_answered = self._outcomes[oldest]
            if at > now - WINDOW_SECONDS:
                return
            del self._outcomes[oldest]
            self._silent -= not was_answered


# --- the calls --------------------------------------------------------------------------------------------------------

__all__ = ["NO_ANSWER", "DHTProtocol", "ValidationError"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

ResponseT = TypeVar("ResponseT", bound=Header)

KEEPERS = Roles.TRAIN | Roles.RELAY
"""Members of a private run that may be nodes, and store records."""

# The errors of a call to a node that is gone, silent, or does not speak this protocol.
NO_ANSWER = (ShoalError, ConnectionError, TimeoutError)
# The errors of a call that heard nothing from the other node: it may be gone, or this machine may be offline or busy.
SILENCE = (ConnectionError, TimeoutError)

# The most attempts of one call, and to call a newcomer back. Only a broken connection leads to a retry, because it may
# be chance. Chosen, like the pause.
ATTEMPTS = 3
SECONDS_BETWEEN_ATTEMPTS = 0.1
# The fraction of the timeout for calling a newcomer back (chosen); the rest lets the answer reach the newcomer in time.
PING_BACK_SHARE = 0.5


class DHTProtocol(ServicerBase):
    """One node's side of the protocol.

    It has many attributes because the parts of a node meet here: its peer, routing table, records, and tasks.

    Args:
        p2p: the peer that calls and is called.
        node_id: this node's id.
        config: the node's settings.
        client_mode: only call, never answer.
        record_validator: decides which records may be stored and believed.
        authorizer: decides which nodes this node talks to; all by default.
    """

    def __init__(
        self,
        p2p: P2P,
        node_id: DHTID,
        config: NodeConfig,
        *,
        client_mode: bool = False,
        record_validator: RecordValidatorBase | None = None,
        authorizer: AuthorizerBase | None = None,
    ) -> None:
        self.p2p, self.node_id, self.config = p2p, node_id, config
        self.client_mode = client_mode
        # The id that others get; ``None`` keeps this peer out of their routing tables.
        self._announced_id: bytes | None = None
        self.is_node = not client_mode and p2p.reachability is not Reachability.CLIENT
        self._is_serving = False
        self.blacklist = Blacklist(config.blacklist_time, config.backoff_rate, p2p.book)
        """Peers that walks skip for a while."""
        self.connectivity = Connectivity(p2p.book)
        self.authorizer = authorizer
        self._gate: MembersOnly | None = None
        self.routing_table = RoutingTable(node_id, config.bucket_size, config.depth_modulo)
        self.routing_table.note_choice(node_id, p2p.peer_id)
        self.records = LocalRecords(config.cache_size, record_validator, node_id, p2p.metrics)
        self._rpc_limit: AbstractAsyncContextManager[Any] = (
            nullcontext() if config.parallel_rpc is None else asyncio.Semaphore(config.parallel_rpc)
        )
        self._contacts = PackedContacts(p2p)
        self._tasks = BackgroundTasks(logger, "a DHT node", handled=NoAccessTokenError)

    @property
    def is_node(self) -> bool:
        """Whether others may call this peer and store records here; set by :class:`~shoal.dht.joining.ServerMode`."""
        return self._announced_id is not None

    @is_node.setter
    def is_node(self, is_node: bool) -> None:
        self._announced_id = self.node_id.to_bytes() if is_node else None

    @property
    def wait_timeout(self) -> float:
        """Seconds after which a call counts as unanswered."""
        return self.config.wait_timeout

    @property
    def stall_after(self) -> float:
        """Seconds after which a walk suspects that an asked node is gone."""
        return self.config.wait_timeout / 4  # three quarters of a second: a few round trips around the world

    @property
    def storage(self) -> DHTLocalStorage:
        """Records that this node was chosen to hold."""
        return self.records.storage

    @property
    def cache(self) -> DHTLocalStorage:
        """Copies of records that others hold."""
        return self.records.cache

    @property
    def record_validator(self) -> CompositeValidator:
        """Decides which records may be stored and believed."""
        return self.records.record_validator

    async def start(self) -> None:
        """Start to answer other nodes, if they can call this one."""
        if self.authorizer is not None:
            await self.authorizer.prepare()
            self._gate = MembersOnly(self.p2p.peer_id, self.authorizer, self_checking=type(self))
            await self._gate.add_p2p_handlers(self.p2p)
            self.p2p.server.gate = self._gate
        if self.is_node:
            await self.serve()

    async def serve(self) -> None:
        """Answer the calls of other nodes from now on."""
        if not self._is_serving:
            self._is_serving = True
            authorizer = self.authorizer
            wrapper = None if authorizer is None else AuthRPCWrapper(self, AuthRole.SERVICER, authorizer)
            await self.add_p2p_handlers(self.p2p, wrapper)

    async def stop_serving(self) -> None:
        """Answer no more calls."""
        if self._is_serving:
            self._is_serving = False
            await self.remove_p2p_handlers(self.p2p)

    async def shutdown(self) -> None:
        """Stop answering, and cancel the background tasks."""
        self._tasks.stop()
        self.connectivity.close()
        await self.stop_serving()
        if self._gate is not None:  # the peer keeps its gate; otherwise it would be open to all when the DHT is gone
            await self._gate.remove_p2p_handlers(self.p2p)
        await self._tasks.close()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in the background for as long as this node lives."""
        return self._tasks.spawn(coroutine)

    # --- learning which nodes are alive -------------------------------------------------------------------------------

    def note_alive(self, node_id: bytes | None, peer: PeerID, *, is_news: bool = True) -> None:
        """Note that a peer has just sent its node id; ``is_news`` as for :meth:`RoutingTable.add_or_update_node`."""
        self.blacklist.register_success(peer)
        if node_id is None:  # in client mode, or it has stepped down
            self._note_absence(peer)
            return
        if not self.p2p.is_reachable(peer):
            return  # no peer could call it
        newcomer = id_of(node_id)
        if self.routing_table.refresh(newcomer, peer, is_news=is_news):
            return
        is_new = peer not in self.routing_table
        if is_new and peer in self.routing_table.peer_id_to_node:  # a suspect
            self.connectivity.came_back.set()
        node_to_check = self.routing_table.add_or_update_node(newcomer, peer, is_news=is_news)
        if node_to_check is not None:
            self.spawn(self._check_alive(*node_to_check))
        if is_new:
            self._welcome(newcomer, peer)

    def _welcome(self, newcomer: DHTID, peer: PeerID) -> None:
        """Give a new neighbor the records that it should hold from now on."""
        due = records_for_newcomer(newcomer, self.storage, self.routing_table, self.config.num_replicas)
        records = [self.records.copy_for_others(*record) for record in due]
        if records:
            self.spawn(self.call_store(peer, records))

    def _note_caller(self, node_id: bytes | None, context: P2PContext, *, is_news: bool = True) -> None:
        """Like :meth:`note_alive`. A peer that may not keep records is no node, whatever it claims."""
        is_keeper = context.roles is ANY_ROLE or context.roles & KEEPERS  # the first is quick, and true in open runs
        self.note_alive(node_id if is_keeper else None, context.remote_id, is_news=is_news)

    def _note_silence(self, peer: PeerID, asked_at: float, *, is_walk: bool) -> None:
        """Note that a peer did not answer, perhaps because this machine is offline or busy."""
        if not self.connectivity.note_silence(peer, asked_at):
            return
        if is_walk:
            self.blacklist.register_failure(peer)
        node_id = self.routing_table.peer_id_to_node.get(peer)
        if node_id is not None and node_id in self.routing_table:
            self.routing_table.suspect(node_id)

    def _note_nonsense(self, peer: PeerID, *, is_walk: bool) -> None:
        """Note that a peer gave no valid answer: it is no node, or belongs to another DHT."""
        if is_walk:
            self.blacklist.register_failure(peer)
        self._note_absence(peer)

    def _note_absence(self, peer: PeerID) -> None:
        """Note that a peer is no node."""
        node_id = self.routing_table.peer_id_to_node.get(peer)
        if node_id is not None:
            del self.routing_table[node_id]

    async def _check_alive(self, node_id: DHTID, peer: PeerID) -> None:
        """Ping a node; the call itself notes the outcome."""
        try:
            response = await self.ping(peer, validate=False)
        except NO_ANSWER:
            return
        finally:
            self.routing_table.bucket_of(node_id).end_check(node_id)
        if response.node_id != node_id.to_bytes() and self.routing_table.get(node_id) == peer:
            del self.routing_table[node_id]

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        peer: PeerID,
        method: str,
        request: Header,
        response_type: type[ResponseT],
        timeout: float,
        *,
        is_trial: bool = False,
    ) -> ResponseT:
        """Call another node, retry if the connection breaks, and note a missing answer.

        Args:
            is_trial: the node may not be callable at all, so learn nothing from a failure.

        Raises:
            NO_ANSWER: one of these.
        """
        now = asyncio.get_running_loop().time
        attempts_left = ATTEMPTS
        is_walk = method != "rpc_ping"
        asked_at = self.connectivity.begin_call()
        try:
            async with self._rpc_limit:
                deadline = now() + timeout
                while True:
                    attempts_left -= 1
                    try:
                        left = max(0.0, deadline - now())
                        response = await self._call_once(peer, method, request, response_type, left)
                        self.connectivity.note_answer(peer)
                        return response
                    except (InterruptedDialError, StreamClosedError) as e:
                        # A store may have been carried out, and a retry of the same record would be refused.
                        if not attempts_left or (isinstance(e, StreamClosedError) and method == "rpc_store"):
                            raise
                        logger.debug("%s at peer %s is tried again: %s", method, peer, e)
        except NO_ANSWER as e:
            has_wrong_role = isinstance(e, NotAMemberError) and e.reason == "wrong role"
            if is_trial or has_wrong_role or isinstance(e, NoAccessTokenError):
                pass
            elif not self.p2p.is_reachable(peer):  # there was no address, so no peer was asked
                self._note_nonsense(peer, is_walk=is_walk)
            elif isinstance(e, SILENCE) and not isinstance(e, NotAMemberError):
                self._note_silence(peer, asked_at, is_walk=is_walk)
            else:
                self.connectivity.note_answer(peer)
                self._note_nonsense(peer, is_walk=is_walk)
            logger.debug("%s at peer %s failed: %s: %s", method, peer, type(e).__name__, e)
            raise
        finally:
            self.connectivity.end_call()

    async def _call_once(
        self, peer: PeerID, method: str, request: Header, response_type: type[ResponseT], timeout: float
    ) -> ResponseT:
        # Fail instead of dialling: that would search the DHT for the address, and the search would call nodes again.
        if not self.p2p.is_reachable(peer):
            raise DialError(f"no address of peer {peer} is known")
        if self.authorizer is not None:
            response: ResponseT = await self._call_member(self.authorizer, peer, method, request, timeout)
            return response
        roles = KEEPERS if method == "rpc_store" else ANY_ROLE
        handle = self.handle_name(method, None)
        return await self.p2p.call(peer, handle, request, response_type, timeout, roles=roles)

    async def _call_member(
        self, authorizer: AuthorizerBase, peer: PeerID, method: str, request: Header, timeout: float
    ) -> Any:
        stub = AuthRPCWrapper(self.get_stub(self.p2p, peer), AuthRole.CLIENT, authorizer)
        response = await getattr(stub, method)(request, timeout)
        if response is None:
            raise DHTError(f"peer {peer} gave an answer without valid authorization")
        return response

    async def ping(
        self, peer: PeerID, *, validate: bool, timeout: float | None = None, is_trial: bool = False
    ) -> PingResponse:
        """Ask a node for its id, and with ``validate`` check that it can call back and that the clocks agree.

        Args:
            peer: the peer to ask.
            validate: whether to check that.
            timeout: seconds, ``wait_timeout`` by default.
            is_trial: a failure counts neither against the peer nor as a sign of an outage.

        Raises:
            NotCallableError: the node cannot call back.
            ValidationError: the clocks do not agree.
            NO_ANSWER: one of these.
        """
        now = asyncio.get_running_loop().time
        asked_at, request = now(), PingRequest(node_id=self._announced_id, validate=validate)
        limit = self.config.wait_timeout if timeout is None else timeout
        announced, arrivals = self.p2p.get_addresses(self.p2p.peer_id), self.p2p.transport.arrivals
        response = await self._call(peer, "rpc_ping", request, PingResponse, limit, is_trial=is_trial)
        self.note_alive(response.node_id, peer, is_news=validate)
        self.p2p.outlook.note_seen(peer, response.seen_at)
        if validate:
            if request.node_id is not None:
                # A peer that claims to have called back although no connection arrived is no witness.
                if not response.available or self.p2p.transport.arrivals > arrivals:
                    self.p2p.outlook.note_called_back(peer, announced, reached=response.available)
                if not response.available:
                    reasons = explain_unreachable(peer, list(map(str, announced)), response.seen_at)
                    raise NotCallableError(": ".join(reasons))
            self._check_clock(peer, response, now() - asked_at)
        return response

    def _check_clock(self, peer: PeerID, response: PingResponse, seconds: float) -> None:
        answered_at, tolerance = get_dht_time(), MAX_DHT_TIME_DISCREPANCY_SECONDS
        if not answered_at - seconds - tolerance <= response.dht_time <= answered_at + tolerance:
            ahead = response.dht_time - (answered_at - seconds / 2)
            raise ValidationError(
                f"clock off by {abs(ahead):.1f} s: peer {peer} is that much {'ahead' if ahead > 0 else 'behind'}, and "
                "other peers do not confirm it: turn on NTP at both"
            )

    async def call_ping(self, peer: PeerID) -> DHTID | None:
        """The id of a peer's node, or ``None`` if it does not answer or is in client mode."""
        try:
            response = await self.ping(peer, validate=False)
        except NO_ANSWER:
            return None
        return None if response.node_id is None else id_of(response.node_id)

    async def call_store(self, peer: PeerID, records: Sequence[NewRecord]) -> list[bool] | None:
        """Ask a node to keep records; returns for each whether it was accepted, or ``None`` without an answer."""
        try:
            return [bool(outcome) for outcome in await self.store_at(peer, records)]
        except NoAccessTokenError:
            raise
        except NO_ANSWER:
            return None

    async def store_at(self, peer: PeerID, records: Sequence[NewRecord]) -> list[Outcome]:
        """Ask a node to keep records, and return what it did with each.

        Raises:
            NO_ANSWER: one of these.
        """
        outcomes: list[Outcome] = []
        for batch in split_into_requests(records):
            request = StoreRequest.of_records(batch, self._announced_id)
            response = await self._call(peer, "rpc_store", request, StoreResponse, self.config.wait_timeout)
            if len(response.refusals) != len(batch):
                self._note_nonsense(peer, is_walk=True)
                raise ProtocolError(f"peer {peer} was asked to keep {len(batch)} records, but answered about others")
            self.note_alive(response.node_id, peer)
            outcomes += response.outcomes()
        return outcomes

    async def call_find(
        self, peer: PeerID, keys: Iterable[DHTID], neighbors: int = 0, **fields: Any
    ) -> FindAnswer | None:
        """Like :meth:`find_at`; returns ``None`` without an answer."""
        try:
            return await self.find_at(peer, keys, neighbors, **fields)
        except NoAccessTokenError:
            raise
        except NO_ANSWER:
            return None

    async def find_at(self, peer: PeerID, keys: Iterable[DHTID], neighbors: int = 0, **fields: Any) -> FindAnswer:
        """Ask a node for records of keys, and for nodes nearer to them.

        Records that the validator refuses count as not found.

        Args:
            peer: the peer to ask.
            keys: at most :data:`~shoal.dht.records.MAX_KEYS_PER_FIND`; further ones are left out.
            neighbors: how many nodes to ask for per key, if more than a node usually returns.
            fields: the other fields of :class:`FindRequest`.

        Raises:
            NO_ANSWER: one of these.
        """
        asked = list(keys)[:MAX_KEYS_PER_FIND]
        packed, count = [key.to_bytes() for key in asked], min(neighbors, MAX_NEIGHBORS)
        request = FindRequest(keys=packed, node_id=self._announced_id, neighbors=count, **fields)
        response = await self._call(peer, "rpc_find", request, FindResponse, self.config.wait_timeout)
        if len(response.results) != len(asked) or len(response.node_ids) != 20 * len(response.contacts):
            self._note_nonsense(peer, is_walk=True)
            raise ProtocolError(f"peer {peer} was asked about {len(asked)} keys, but answered about others")
        self.note_alive(response.node_id, peer)
        raw = response.node_ids
        node_ids = [int.from_bytes(raw[start : start + 20], "big") for start in range(0, len(raw), 20)]
        answer = FindAnswer({}, dict(zip(node_ids, response.contacts, strict=True)), response.node_id)
        is_silent = request.neighbors_only
        for key, result in zip(asked, response.results, strict=True):
            if result.found is not Found.TOO_MUCH or len(asked) == 1:
                answer.records[key] = self.records.read_result(key, result, node_ids)
                continue
            # After it has fallen silent, each further key would take another timeout.
            alone = None if is_silent else await self.call_find(peer, [key], neighbors, **fields)
            if alone is None:
                is_silent = True
            else:
                answer.records.update(alone.records)
                answer.contacts.update(alone.contacts)
        return answer

    # --- answering ----------------------------------------------------------------------------------------------------

    @open_to(ANY_ROLE)
    async def rpc_ping(self, request: PingRequest, context: P2PContext) -> PingResponse:
        """Tell this node's id; call back if asked to."""
        available = False
        if request.node_id is not None and request.validate and context.roles & KEEPERS:
            available = await self._can_call_back(request.node_id, context.remote_id)
        else:
            self._note_caller(request.node_id, context, is_news=False)
        return PingResponse(
            node_id=self._announced_id,
            dht_time=get_dht_time(),
            available=available,
            seen_at=self.p2p.address_seen_of(context.remote_id),
        )

    async def _can_call_back(self, node_id: bytes, peer: PeerID) -> bool:
        """Whether a newcomer can be called. There are several attempts, because one broken connection proves nothing.

        A failure is reported after a fixed time. The newcomer chooses the address, and must not learn from the timing
        whether a port there is closed, filtered, or open for something else.
        """
        if self.p2p.is_hopeless(peer):
            return False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.wait_timeout * PING_BACK_SHARE
        for _ in range(ATTEMPTS):
            try:
                left = max(0.0, deadline - loop.time())
                response = await self.ping(peer, validate=False, timeout=left, is_trial=True)
            except NO_ANSWER:
                await asyncio.sleep(max(0.0, min(SECONDS_BETWEEN_ATTEMPTS, deadline - loop.time())))
            else:
                return response.node_id == node_id
        await asyncio.sleep(max(0.0, deadline - loop.time()))
        return False

    @open_to(KEEPERS)
    async def rpc_store(self, request: StoreRequest, context: P2PContext) -> StoreResponse:
        """Keep records that another node wants to store here."""
        records = request.unpack()
        self._note_caller(request.node_id, context)
        payer = Payer(context.remote_id, self.p2p.host_seen_of(context.remote_id))
        outcomes = [self.records.keep(record, payer) for record in records]
        return StoreResponse.of_outcomes(outcomes, self._announced_id)

    @open_to(ANY_ROLE)
    async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse:
        """Return this node's records of some keys, and the nodes nearest to these keys."""
        self._note_caller(request.node_id, context)
        asker = None if request.node_id is None else id_of(request.node_id)
        asker_host = self.p2p.far_host_of(context.remote_id)
        told: dict[DHTID, int] = {}
        contacts: list[msgspec.Raw] = []
        results: list[FindResult] = []
        wanted = min(request.neighbors, MAX_NEIGHBORS_TOLD // max(1, len(request.keys)))
        count = min(max(self.config.bucket_size, wanted), MAX_NEIGHBORS)
        room, known = MAX_ANSWER_BYTES, HaveSet(request.known)
        for key in map(id_of, request.keys):
            neighbors = self.routing_table.get_nearest_neighbors(key, count, exclude=asker)
            if known:
                neighbors = known.unknown(neighbors)
            for node_id, peer in neighbors:
                if node_id not in told and (contact := self._contacts.pack(peer, asker_host)) is not None:
                    told[node_id] = len(told)
                    contacts.append(contact)
            nearest = [told[node_id] for node_id, _ in neighbors if node_id in told]
            if request.neighbors_only:
                results.append(FindResult(Found.NOTHING, b"", 0.0, nearest))
                continue
            results.append(self.records.answer(key, nearest, room, known, request.most))
            room -= len(results[-1].value)
        return FindResponse(
            results=results,
            node_ids=b"".join([node_id.to_bytes() for node_id in told]),
            contacts=contacts,
            node_id=self._announced_id,
        )
