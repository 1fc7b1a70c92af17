"""An averager inside the event loop: it answers other averagers and runs this one's steps."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.averaging.allreduce.exchange import stripes_for
from shoal.averaging.allreduce.session import AllReduceSettings, GroupSession, Round, Rounds
from shoal.averaging.control import AveragingMode, AveragingStage, Gathered, GroupInfo, RoundResult, StepControl
from shoal.averaging.groups.candidates import MatchmakingSettings, Trust
from shoal.averaging.groups.keys import GroupKeyManager
from shoal.averaging.groups.matchmaking import Matchmaking
from shoal.averaging.messages import (
    CALL_FAILURES,
    PEER_FAILURES,
    BeginReduce,
    Code,
    DownloadRequest,
    Invitation,
    JoinReply,
    JoinRequest,
    RoundMessage,
    StatusReply,
    StatusRequest,
)
from shoal.averaging.state.donor import StateSharing
from shoal.averaging.state.download import GetState
from shoal.averaging.tensor_lock import TensorLock
from shoal.clock import get_dht_time
from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import dtype_name
from shoal.errors import AllreduceException, AveragingError, ProtocolError
from shoal.p2p import P2P, Call, P2PContext, PeerID, ServicerBase, StubBase
from shoal.serializer import MSGPackSerializer
from shoal.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

# A rough number, for guessing how many connections a round is going to use.
BYTES_PER_VALUE = 4
# Seconds of silence after which a member is given up where the user has set no limit.
DEFAULT_STALL_TIMEOUT = 30.0

_RETRIABLE = (AveragingError, *CALL_FAILURES)
_MAX_RETRY_PAUSE = 1.0


@dataclass
class AveragerConfig:
    """Everything that an averager is told, with defaults resolved."""

    prefix: str
    target_group_size: int | None
    """A group is closed at this size; ``None`` = no limit."""
    min_group_size: int
    initial_group_bits: str
    min_matchmaking_time: float
    request_timeout: float
    allreduce_timeout: float | None
    """Seconds for one all-reduce as a whole; ``None`` = as long as it makes progress."""
    sender_timeout: float
    reducer_timeout: float
    chunk_timeout: float
    averaging_alpha: float
    part_size_bytes: int
    compression: CompressionBase
    state_compression: CompressionBase
    bandwidth: float | None
    min_vector_size: int
    mode: AveragingMode
    declare_state_period: float
    quorum: int | None = None
    """When so many members have delivered, the round waits ``quorum_grace`` seconds for the others, and no longer."""
    quorum_grace: float = 3.0
    phases: str = "one"
    """What is done in a group, in words; the same in all members."""
    tags: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Indices of the tensors that are averaged under each tag; empty = all of them, without a tag."""

    def lane_prefix(self, tag: str) -> str:
        """Name space of the keys under which averagers look for groups."""
        return f"{self.prefix}:{tag}" if tag else self.prefix


def check_tags(tags: Mapping[str, Sequence[int]], count: int) -> dict[str, tuple[int, ...]]:
    """Tags as given, after checking them.

    Raises:
        ValueError: a name or an index is not valid, or a tensor has two tags.
    """
    owner: dict[int, str] = {}
    for tag, indices in tags.items():
        if not tag or "." in tag or ":" in tag:
            raise ValueError(f"a tag is a name without dots and colons, got {tag!r}")
        for index in indices:
            if not 0 <= index < count:
                raise ValueError(f"tag {tag!r} names tensor {index}, but there are {count} averaged tensors")
            if index in owner:
                raise ValueError(f"tensor {index} has two tags, {owner[index]!r} and {tag!r}: give it one")
            owner[index] = tag
    return {tag: tuple(indices) for tag, indices in tags.items()}


def resolve_timeouts(chunk: float | None, sender: float | None, reducer: float | None) -> tuple[float, float]:
    """Time limits for senders and reducers, in seconds.

    Raises:
        ValueError: they contradict each other.
    """
    sender = chunk if sender is None else sender
    if reducer is not None and (sender is None or reducer <= sender):
        raise ValueError(
            f"reducer_timeout {reducer} must be longer than sender_timeout {sender}: a reducer may wait that long for "
            "senders itself"
        )
    sender = DEFAULT_STALL_TIMEOUT if sender is None else sender
    return sender, 2 * sender if reducer is None else reducer


Average = Callable[[GroupSession, Sequence[torch.Tensor], Sequence[CompressionInfo]], Awaitable[None]]


async def average_once(
    session: GroupSession, tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]
) -> None:
    """The usual step: one all-reduce of the averaged tensors."""
    await session.all_reduce(tensors, infos)


class Lane:
    """What is averaged under one tag, and the search for groups for it. Lanes do not wait for each other."""

    def __init__(
        self,
        tag: str,
        indices: Sequence[int],
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        config: AveragerConfig,
        p2p: P2P,
        dht_node: Any,
        get_stub: Callable[[PeerID], StubBase],
        trust: Trust,
        leave_group: Callable[[bytes], None],
    ) -> None:
        self.indices = indices
        self.tensors, self.infos = [tensors[i] for i in indices], [infos[i] for i in indices]
        prefix = config.lane_prefix(tag)
        self.keys = GroupKeyManager(dht_node, prefix, config.initial_group_bits, config.target_group_size, p2p)
        settings = MatchmakingSettings(
            target_group_size=config.target_group_size,
            min_group_size=config.min_group_size,
            min_matchmaking_time=config.min_matchmaking_time,
            request_timeout=config.request_timeout,
            mode=config.mode,
            bandwidth=config.bandwidth,
            min_vector_size=config.min_vector_size,
            total_size=sum(info.descriptor.numel() for info in self.infos),
            agreed={
                "shapes, types and roles of tensors": schema_of(self.infos),
                "compression": config.compression.fingerprint,
                "part_size_bytes": str(config.part_size_bytes),
                "phases": config.phases,
                "quorum": "none" if config.quorum is None else f"{config.quorum}, {config.quorum_grace:g} s of grace",
            },
        )
        self.matchmaking = Matchmaking(p2p, self.keys, settings, get_stub, trust, leave_group)
        self.is_spoilt = False
        """Values of this peer were not finite when it averaged last."""


def schema_of(infos: Sequence[CompressionInfo]) -> str:
    """Hash of the shapes, types and roles that all members of a group must share."""
    description = ";".join(
        f"{info.descriptor.size}:{dtype_name(info.descriptor.dtype)}:{info.role.name}" for info in infos
    )
    return hashlib.sha256(description.encode()).hexdigest()


class AveragerNode(ServicerBase):
    """The coroutine side of :class:`~shoal.averaging.DecentralizedAverager`. Made by :meth:`create`, in a loop.

    Args:
        dht_node: the distributed table.
        tensors: what is averaged; changed in place.
        lock: held while the tensors are averaged.
        get_state: what newcomers download.
        average: what a step does in its group.
    """

    def __init__(
        self,
        p2p: P2P,
        dht_node: Any,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        config: AveragerConfig,
        lock: TensorLock,
        get_state: GetState,
        average: Average = average_once,
    ) -> None:
        self.p2p, self.tensors, self.infos, self.config, self.lock = p2p, list(tensors), list(infos), config, lock
        self._average = average
        self.last_round: RoundResult | None = None
        self.last_updated = 0.0
        """DHT time of the last round that changed the tensors."""
        self.trust = Trust()
        """What is known of others; may be changed at any time."""
        self._rounds = Rounds()
        self.lanes = {
            tag: Lane(
                tag, indices, tensors, infos, config, p2p, dht_node, self._stub, self.trust, self._rounds.leave_group
            )
            for tag, indices in (config.tags or {"": range(len(infos))}).items()
        }
        self._lane_of_prefix = {config.lane_prefix(tag): lane for tag, lane in self.lanes.items()}
        vector_bytes = sum(info.descriptor.numel() * info.descriptor.dtype.itemsize for info in infos)
        self.state_sharing = StateSharing(
            p2p,
            dht_node,
            f"{config.prefix}.all_averagers",
            get_state,
            config.state_compression,
            declare_period=config.declare_state_period,
            chunk_timeout=config.chunk_timeout,
            max_bytes=16 * vector_bytes + 2**30,
            get_stub=self._stub,
        )
        self._tasks: list[asyncio.Task[Any]] = []
        # A dictionary keeps the order, so that simulations can be repeated.
        self._connecting: dict[asyncio.Task[None], None] = {}

    @property
    def group_bits(self) -> str:
        """The bucket of the only lane, or of the first one."""
        return next(iter(self.lanes.values())).keys.group_bits

    def _stub(self, peer: PeerID) -> StubBase:
        return self.get_stub(self.p2p, peer, namespace=self.config.prefix)

    async def start(self) -> None:
        """Begin to answer others.

        Raises:
            P2PDaemonError: this peer runs another averager with the same prefix.
        """
        if self.config.mode is not AveragingMode.CLIENT:
            await self.add_p2p_handlers(self.p2p, namespace=self.config.prefix)
            self._tasks.append(asyncio.ensure_future(self.state_sharing.declare_forever()))

    async def close(self) -> None:
        """Stop: withdraw what others know of this averager and serve nobody any more."""
        # At once: the next averager of this name may be on its way.
        if self.config.mode is not AveragingMode.CLIENT:
            await self.remove_p2p_handlers(self.p2p, namespace=self.config.prefix)
        await cancel_and_wait(*self._tasks, *self._connecting)
        await asyncio.gather(*[lane.matchmaking.close() for lane in self.lanes.values()])
        if self.config.mode is not AveragingMode.CLIENT and self.p2p.is_alive:
            await self.state_sharing.withdraw()
        await self._rounds.close()

    # --- a step -------------------------------------------------------------------------------------------------------

    async def run_step(self, control: StepControl) -> None:
        """Work on a step until its control has a result, an exception, or was cancelled."""
        control.bind(asyncio.get_running_loop())
        try:
            result = await self._step_with_retries(control)
        except asyncio.CancelledError:
            control.cancel()
            raise
        except Exception as e:
            self.p2p.metrics.rounds_failed += 1
            if not control.done():
                control.set_exception(e)
        else:
            if not control.done():
                control.set_result(result)
        finally:
            control.stage = AveragingStage.FINISHED

    async def _step_with_retries(self, control: StepControl) -> Gathered:
        pause = 0.05
        while True:
            try:
                return await self._attempt(control)
            except _RETRIABLE as e:
                left = control.deadline - get_dht_time()
                # The input has changed meanwhile.
                is_changed = isinstance(e, AllreduceException) and e.share_averaged > 0
                if not control.allow_retries or is_changed or left <= pause:
                    raise
                logger.info("averaging round failed and will be tried again: %s", str(e) or type(e).__name__)
                control.began_allreduce = False
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_RETRY_PAUSE)

    async def _attempt(self, control: StepControl) -> Gathered:
        control.stage, lane = AveragingStage.LOOKING_FOR_GROUP, self.lanes[control.tag]
        group = await lane.matchmaking.look_for_group(control)
        try:
            control.stage = AveragingStage.AWAITING_TRIGGER
            if not control.triggered:
                self._connect_ahead(group, lane)
            await control.wait_for_trigger()
            control.stage, control.began_allreduce = AveragingStage.RUNNING_ALLREDUCE, True
            session = self._session(group, control.weight)
            try:
                async with self.lock.hold_async(lane.indices):
                    await self._average_in(session, lane)
            finally:
                self._report_not_finite(session, lane)
        finally:
            self._rounds.leave_group(group.group_id)
        control.round = self.last_round = session.result
        self._count(control.round)
        return self._gathered(session.group)

    async def _average_in(self, session: GroupSession, lane: Lane) -> None:
        """What the step does in its group.

        Raises:
            AllreduceException: it failed; the error says whether the tensors have changed nevertheless.
        """
        try:
            async with asyncio.timeout(self.config.allreduce_timeout):
                await self._average(session, lane.tensors, lane.infos)
        except _RETRIABLE as e:
            is_late = isinstance(e, TimeoutError)
            reason = f"the all-reduce took longer than {self.config.allreduce_timeout} s" if is_late else str(e)
            share = session.share_averaged(lane.tensors)
            if share:
                reason += f"; {100 * share:.1f} % of the values were averaged before, so it is not tried again"
            failure = AllreduceException(reason or type(e).__name__)
            failure.share_averaged = share
            raise failure from e

    def _report_not_finite(self, session: GroupSession, lane: Lane) -> None:
        """Say which values were left out of averages: this peer's own, and those of others, who are refused then."""
        # Once, until they are finite again.
        level = logging.DEBUG if lane.is_spoilt else logging.WARNING
        lane.is_spoilt = session.not_finite is not None
        if lane.is_spoilt:
            logger.log(
                level,
                "%s: this peer takes part with weight 0, and gets the average of the others, until its values are "
                "finite. Look at its data, loss and learning rate; with half precision, use shoal.GradScaler",
                session.not_finite,
            )
        told = session.told_not_finite
        group = session.group
        aux = [peer for peer, mode in zip(group.peer_ids, group.modes, strict=True) if mode == AveragingMode.AUX]
        for peer in lane.matchmaking.refusals.note(session.seen_not_finite, told, group.peer_ids, aux):
            logger.warning(
                "left out values of %s: they are NaN or infinite, although peers check theirs before they send them. "
                "It is refused for a while; its owner should update it, or look at its machine",
                peer,
            )

    def _connect_ahead(self, group: GroupInfo, lane: Lane) -> None:
        """Make the connections of the round while there is time: over long links that takes a while."""
        for peer, share in zip(group.peer_ids, group.shares, strict=True):
            if share and peer != self.p2p.peer_id:
                parts = share * BYTES_PER_VALUE // self.config.part_size_bytes
                stripes = stripes_for(self.p2p.round_trip_to(peer), parts)
                # One more for what is not parts.
                task = asyncio.ensure_future(self._connect(peer, stripes + 1))
                self._connecting[task] = None
                task.add_done_callback(self._connecting.pop)

    async def _connect(self, peer: PeerID, connections: int) -> None:
        try:
            await self.p2p.prepare(peer, connections)
        except PEER_FAILURES as e:
            logger.debug("could not connect to %s ahead of the round: %r", peer, e)

    def _session(self, group: GroupInfo, weight: float) -> GroupSession:
        config = self.config
        settings = AllReduceSettings(
            config.compression,
            config.part_size_bytes,
            config.averaging_alpha,
            config.sender_timeout,
            config.reducer_timeout,
            config.quorum,
            config.quorum_grace,
        )
        return GroupSession(group, self.p2p.peer_id, weight, settings, self._rounds, self._stub)

    def _count(self, result: RoundResult) -> None:
        self.last_updated = get_dht_time()
        metrics = self.p2p.metrics
        metrics.rounds_succeeded += 1
        metrics.seconds_averaging += result.duration
        metrics.members_lost += len(result.failed_peers)
        if result.failed_peers:
            logger.info(
                "averaged %.1f %% of the vector; failed members: %s",
                100 * result.share_averaged,
                ", ".join(map(str, result.failed_peers)),
            )

    def _gathered(self, group: GroupInfo) -> Gathered:
        gathered: Gathered = {}
        for peer, blob in zip(group.peer_ids, group.gathered, strict=True):
            try:
                gathered[peer] = MSGPackSerializer.loads(blob)
            except ValueError as e:
                logger.warning("could not read what %s gave to the group: %s", peer, e)
                gathered[peer] = None
        return gathered

    # --- what others call ---------------------------------------------------------------------------------------------

    async def rpc_join_group(self, call: Call, context: P2PContext) -> None:
        request = await call.receive(JoinRequest)
        if request is None:
            raise ProtocolError("ended before asking anything")
        lane = self._lane_of(request.group_key)
        if lane is None:
            await call.send(JoinReply(code=Code.NOT_LOOKING_FOR_GROUP), end=True)
        else:
            await lane.matchmaking.answer_join(call, request, context.remote_id)

    async def rpc_invite(self, call: Call, context: P2PContext) -> None:
        invitation = await call.receive(Invitation)
        lane = None if invitation is None else self._lane_of(invitation.group_key)
        if invitation is not None and lane is not None:
            await lane.matchmaking.answer_invitation(call, invitation)

    def _lane_of(self, group_key: str) -> Lane | None:
        return self._lane_of_prefix.get(group_key.partition(".")[0])

    async def rpc_reduce(self, call: Call, context: P2PContext) -> None:
        begin = await call.receive(BeginReduce)
        if begin is None:
            raise ProtocolError("ended before the first part")
        current = await self._find_round(begin.round_id, context.remote_id)
        await current.serve_sender(call, begin, context.remote_id)

    async def _find_round(self, round_id: bytes, caller: PeerID) -> Round:
        return await self._rounds.find(round_id, caller, self.config.sender_timeout + self.config.request_timeout)

    async def rpc_complete(self, call: Call, context: P2PContext) -> None:
        hello = await call.receive(RoundMessage)
        if hello is None:
            raise ProtocolError("ended before saying which round")
        current = await self._find_round(hello.round_id, context.remote_id)
        await current.serve_member(call, hello, context.remote_id)

    async def rpc_round_status(self, request: StatusRequest, context: P2PContext) -> StatusReply:
        return StatusReply(status=int(self._rounds.status(request.round_id)))

    async def rpc_download_state(self, call: Call, context: P2PContext) -> None:
        await call.receive(DownloadRequest)
        await self.state_sharing.serve(call)
