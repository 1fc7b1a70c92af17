"""The three calls between nodes (ping, store, find): asking, answering, and learning from both which nodes live."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shoal.access.badges import ANY_ROLE, Roles
from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time
from shoal.dht.authorization import AuthorizerBase, AuthRole, AuthRPCWrapper, MembersOnly
from shoal.dht.connectivity import Connectivity
from shoal.dht.have_set import HaveSet
from shoal.dht.local_records import LocalRecords
from shoal.dht.quotas import Payer
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
    NewRecord,
    PackedContacts,
    PingRequest,
    PingResponse,
    StoreRequest,
    StoreResponse,
    split_into_requests,
)
from shoal.dht.routing import DHTID, RoutingTable, id_of
from shoal.dht.server_mode import NO_ANSWER, ServerMode
from shoal.dht.storage import Blacklist, DHTLocalStorage
from shoal.dht.validation import RecordValidatorBase
from shoal.errors import (
    DHTError,
    DialError,
    InterruptedDialError,
    NoAccessTokenError,
    NotAMemberError,
    NotCallableError,
    StreamClosedError,
    ValidationError,
)
from shoal.net.service import open_to
from shoal.p2p import P2P, Header, P2PContext, PeerID, ServicerBase
from shoal.p2p.joining import explain_unreachable

if TYPE_CHECKING:
    from shoal.dht.node import NodeConfig

__all__ = ["NO_ANSWER", "DHTProtocol", "ValidationError"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEEPERS = Roles.TRAIN | Roles.RELAY
"""Members of a private run that may be nodes, and store records."""
ResponseT = TypeVar("ResponseT", bound=Header)

# What a call raises when it heard nothing from the other node: the node may be gone, or this machine offline or busy.
SILENCE = (ConnectionError, TimeoutError)

# The fraction of the waiting time after which a walk goes on without waiting for a node that has not answered yet.
STALL_SHARE = 0.25
# A node is asked again only if the connection broke, because chance may have caused that.
CALL_ATTEMPTS = 3


class DHTProtocol(ServicerBase):
    """One node's side of the protocol.

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
        self.p2p, self.node_id, self._packed_id = p2p, node_id, node_id.to_bytes()
        self.blacklist = Blacklist(config.blacklist_time, config.backoff_rate)
        """Peers that walks skip for a while."""
        self.reception = Connectivity()
        self.came_back = asyncio.Event()
        """Set when a suspect has given a sign of life: it may know more nodes."""
        self.authorizer = authorizer
        self._gate: MembersOnly | None = None
        self.wrapper: AuthRPCWrapper | None = None
        """Checks the calls of others, if there is an authorizer."""
        self.routing_table = RoutingTable(node_id, config.bucket_size, config.depth_modulo)
        self.routing_table.note_choice(node_id, p2p.peer_id)
        self.records = LocalRecords(config.cache_size, record_validator, node_id, p2p.metrics)
        self.bucket_size, self.num_replicas = config.bucket_size, config.num_replicas
        self.wait_timeout = config.wait_timeout
        self.client_mode = client_mode
        self._rpc_limit: AbstractAsyncContextManager[Any] = (
            nullcontext() if config.parallel_rpc is None else asyncio.Semaphore(config.parallel_rpc)
        )
        self._contacts = PackedContacts(p2p)
        # A dictionary and not a set: it keeps the order, so that the same seed gives the same run.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._is_shut_down = False
        self.seat = ServerMode(self, client_mode=client_mode)

    @property
    def is_node(self) -> bool:
        """This peer is in the table at present: others may call it, and keep records here."""
        return self.seat.is_node

    @property
    def _announced_id(self) -> bytes | None:
        """What others are told; ``None`` keeps this peer out of their routing tables."""
        return self._packed_id if self.seat.is_node else None

    @property
    def stall_after(self) -> float:
        """Seconds after which a walk suspects that a node it has asked is gone."""
        return self.wait_timeout * STALL_SHARE

    @property
    def storage(self) -> DHTLocalStorage:
        """Records that this node was chosen to hold."""
        return self.records.storage

    @property
    def cache(self) -> DHTLocalStorage:
        """Copies of records that others hold."""
        return self.records.cache

    @property
    def record_validator(self) -> RecordValidatorBase | None:
        """Decides which records may be stored and believed."""
        return self.records.record_validator

    async def start(self) -> None:
        """Begin to answer other nodes, as far as they can call this one."""
        authorizer = self.authorizer
        if authorizer is not None:
            await authorizer.prepare()
            gate = MembersOnly(self.p2p.peer_id, authorizer, self_checking=type(self))
            await gate.add_p2p_handlers(self.p2p)
            self.p2p.close_to_strangers(gate)
            self._gate = gate
            self.wrapper = AuthRPCWrapper(self, AuthRole.SERVICER, authorizer)
        await self.seat.start()

    async def shutdown(self) -> None:
        """Stop answering, and cancel the background tasks."""
        self._is_shut_down = True
        self.reception.close()
        await self.seat.close()
        if self._gate is not None:  # the peer keeps its gate, or it would be open to all after the DHT is gone
            await self._gate.remove_p2p_handlers(self.p2p)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self) -> None:
        """Wait until it is clear how others can call this peer, now that the first ones have tried."""
        if not self.client_mode:
            await self.p2p.outlook.settle()
            self.seat.look()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in the background for as long as this node lives."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._on_task_done)
        if self._is_shut_down:
            task.cancel()
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, NoAccessTokenError):  # which those who wait are told
            logger.error("a background task of a DHT node failed", exc_info=error)

    # --- learning which nodes are alive -------------------------------------------------------------------------------

    def note_alive(self, node_id: bytes | None, peer: PeerID, *, is_news: bool = True) -> None:
        """A peer has just told its node id; ``is_news`` as for :meth:`RoutingTable.add_or_update_node`."""
        self.blacklist.register_success(peer)
        if node_id is None:  # in client mode, or it has stepped down
            self._note_absence(peer)
            return
        if not self.p2p.is_reachable(peer):
            return  # nobody could call it
        newcomer = id_of(node_id)
        if self.routing_table.refresh(newcomer, peer, is_news=is_news):
            return
        is_new = peer not in self.routing_table
        if is_new and peer in self.routing_table.peer_id_to_node:  # a suspect
            self.came_back.set()
        node_to_check = self.routing_table.add_or_update_node(newcomer, peer, is_news=is_news)
        if node_to_check is not None:
            self.spawn(self._check_alive(*node_to_check))
        if is_new:
            self.seat.welcome(newcomer, peer)

    def _note_caller(self, node_id: bytes | None, context: P2PContext, *, is_news: bool = True) -> None:
        """Like :meth:`note_alive`. A peer that may not keep records is no node, whatever it says."""
        is_keeper = context.roles is ANY_ROLE or context.roles & KEEPERS  # in open runs all are, and this is quick
        self.note_alive(node_id if is_keeper else None, context.remote_id, is_news=is_news)

    def _note_silence(self, peer: PeerID, asked_at: float, *, is_walk: bool) -> None:
        """A peer did not answer, perhaps for reasons that lie with this machine."""
        if not self.reception.note_silence(peer, asked_at):
            return
        if is_walk:
            self.blacklist.register_failure(peer)
        node_id = self.routing_table.peer_id_to_node.get(peer)
        if node_id is not None and node_id in self.routing_table:
            self.routing_table.suspect(node_id)

    def _note_nonsense(self, peer: PeerID, *, is_walk: bool) -> None:
        """A peer gave no sensible answer: it is no node, or belongs to another table."""
        if is_walk:
            self.blacklist.register_failure(peer)
        self._note_absence(peer)

    def _note_absence(self, peer: PeerID) -> None:
        """A peer is no node."""
        node_id = self.routing_table.peer_id_to_node.get(peer)
        if node_id is not None:
            del self.routing_table[node_id]

    async def _check_alive(self, node_id: DHTID, peer: PeerID) -> None:
        """Ask a node for a sign of life; the call itself notes the outcome."""
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
        attempts_left = CALL_ATTEMPTS
        is_walk = method != "rpc_ping"
        asked_at = self.reception.begin_call()
        try:
            async with self._rpc_limit:
                deadline = now() + timeout
                while True:
                    attempts_left -= 1
                    try:
                        left = max(0.0, deadline - now())
                        response = await self._call_once(peer, method, request, response_type, left)
                        self.reception.note_answer(peer)
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
            elif not self.p2p.is_reachable(peer):  # there was no address, so nobody was asked
                self._note_nonsense(peer, is_walk=is_walk)
            elif isinstance(e, SILENCE) and not isinstance(e, NotAMemberError):
                self._note_silence(peer, asked_at, is_walk=is_walk)
            else:
                self.reception.note_answer(peer)
                self._note_nonsense(peer, is_walk=is_walk)
            logger.debug("%s at peer %s failed: %s: %s", method, peer, type(e).__name__, e)
            raise
        finally:
            self.reception.end_call()

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
            is_trial: do not hold a failure against the peer, nor take it for a sign of an outage.

        Raises:
            NotCallableError: the node cannot call back.
            ValidationError: the clocks do not agree.
            NO_ANSWER: one of these.
        """
        now = asyncio.get_running_loop().time
        asked_at, request = now(), PingRequest(node_id=self._announced_id, validate=validate)
        limit = self.wait_timeout if timeout is None else timeout
        announced, arrivals = self.p2p.get_addresses(self.p2p.peer_id), self.p2p.transport.arrivals
        response = await self._call(peer, "rpc_ping", request, PingResponse, limit, is_trial=is_trial)
        self.note_alive(response.node_id, peer, is_news=validate)
        self.p2p.outlook.note_seen(peer, response.seen_at)
        if validate:
            if request.node_id is not None:
                # Who says that it has called back, although nobody has come, is no witness.
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
        accepted: list[bool] = []
        for batch in split_into_requests(records):
            request = StoreRequest.of_records(batch, self._announced_id)
            try:
                response = await self._call(peer, "rpc_store", request, StoreResponse, self.wait_timeout)
            except NoAccessTokenError:
                raise
            except NO_ANSWER:
                return None
            if len(response.accepted) != len(batch):
                self._note_nonsense(peer, is_walk=True)
                return None
            self.note_alive(response.node_id, peer)
            accepted += response.accepted
        return accepted

    async def call_find(
        self, peer: PeerID, keys: Iterable[DHTID], neighbors: int = 0, **fields: Any
    ) -> FindAnswer | None:
        """Ask a node for records of keys, and for nodes nearer to them. Returns ``None`` if it does not answer.

        ``neighbors`` is the number of nodes to ask for per key, if more than a node usually tells. Records that the
        validator refuses count as not found. Other ``fields`` are those of :class:`FindRequest`.
        """
        asked = list(keys)[:MAX_KEYS_PER_FIND]
        packed, count = [key.to_bytes() for key in asked], min(neighbors, MAX_NEIGHBORS)
        request = FindRequest(keys=packed, node_id=self._announced_id, neighbors=count, **fields)
        try:
            response = await self._call(peer, "rpc_find", request, FindResponse, self.wait_timeout)
        except NoAccessTokenError:
            raise
        except NO_ANSWER:
            return None
        if len(response.results) != len(asked) or len(response.node_ids) != 20 * len(response.contacts):
            self._note_nonsense(peer, is_walk=True)
            return None
        self.note_alive(response.node_id, peer)
        raw = response.node_ids
        node_ids = [int.from_bytes(raw[start : start + 20], "big") for start in range(0, len(raw), 20)]
        answer = FindAnswer({}, dict(zip(node_ids, response.contacts, strict=True)), response.node_id)
        is_silent = request.neighbors_only
        for key, result in zip(asked, response.results, strict=True):
            if result.found is not Found.TOO_MUCH or len(asked) == 1:
                answer.records[key] = self.records.read_result(key, result, node_ids)
                continue
            # Once it has fallen silent, each other key would take a timeout more.
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
            available = await self.seat.can_call_back(request.node_id, context.remote_id)
        else:
            self._note_caller(request.node_id, context, is_news=False)
        return PingResponse(
            node_id=self._announced_id,
            dht_time=get_dht_time(),
            available=available,
            seen_at=self.p2p.address_seen_of(context.remote_id),
        )

    @open_to(KEEPERS)
    async def rpc_store(self, request: StoreRequest, context: P2PContext) -> StoreResponse:
        """Keep records that another node wants to store here."""
        records = request.unpack()
        self._note_caller(request.node_id, context)
        payer = Payer(context.remote_id, self.p2p.host_seen_of(context.remote_id))
        accepted = [self.records.keep(record, payer) for record in records]
        return StoreResponse(accepted=accepted, node_id=self._announced_id)

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
        count = min(max(self.bucket_size, wanted), MAX_NEIGHBORS)
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
