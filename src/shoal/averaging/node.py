"""An averager inside the event loop: it answers other averagers and runs this one's steps."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging.allreduce import AllReduce, AllReduceSettings, AveragingMode
from shoal.averaging.control import AveragingStage, Gathered, RoundResult, StepControl
from shoal.averaging.group_info import GroupInfo
from shoal.averaging.key_manager import GroupKeyManager
from shoal.averaging.matchmaking import Matchmaking, MatchmakingSettings
from shoal.averaging.protocol import (
    Acknowledged,
    BeginReduce,
    DownloadRequest,
    Invitation,
    JoinRequest,
    RoundMessage,
    RoundStatus,
    StatusReply,
    StatusRequest,
)
from shoal.averaging.round import Round
from shoal.averaging.state_sharing import GetState, StateSharing
from shoal.averaging.tensor_lock import TensorLock
from shoal.clock import get_dht_time, timeout
from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import dtype_name
from shoal.errors import AllreduceException, AveragingError, P2PDaemonError, P2PHandlerError, ProtocolError
from shoal.p2p import P2P, Call, P2PContext, PeerID, ServicerBase, StubBase
from shoal.reactor import cancel_and_wait, run_in_worker
from shoal.serializer import MSGPackSerializer

logger = logging.getLogger(__name__)

DEFAULT_STALL_TIMEOUT = 30.0
"""Seconds of silence after which a member is given up where the user has set no limit."""
MAX_UNKNOWN_ROUNDS = 256
_RETRIABLE = (AveragingError, P2PDaemonError, P2PHandlerError, ProtocolError, asyncio.TimeoutError, TimeoutError)
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


def schema_of(infos: Sequence[CompressionInfo]) -> str:
    """Hash of the shapes and types that all members of a group must share."""
    description = ";".join(f"{info.descriptor.size}:{dtype_name(info.descriptor.dtype)}" for info in infos)
    return hashlib.sha256(description.encode()).hexdigest()


class AveragerNode(ServicerBase):
    """The coroutine side of :class:`~shoal.averaging.DecentralizedAverager`. Made by :meth:`create`, in a loop.

    Args:
        dht_node: the distributed table.
        tensors: what is averaged; changed in place.
        lock: held while the tensors are averaged.
        get_state: what newcomers download.
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
    ) -> None:
        self.p2p, self.tensors, self.infos, self.config, self.lock = p2p, list(tensors), list(infos), config, lock
        self.total_size = sum(info.descriptor.numel() for info in infos)
        self.last_round: RoundResult | None = None
        self.last_updated = 0.0
        """DHT time of the last round that changed the tensors."""
        self.keys = GroupKeyManager(dht_node, p2p, config.prefix, config.initial_group_bits, config.target_group_size)
        self.matchmaking = Matchmaking(p2p, self.keys, self._matchmaking_settings(), self._stub)
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
        self._rounds: dict[bytes, asyncio.Future[Round]] = {}
        self._finished_rounds: OrderedDict[bytes, None] = OrderedDict()
        self._tasks: list[asyncio.Task[Any]] = []

    def _matchmaking_settings(self) -> MatchmakingSettings:
        config = self.config
        return MatchmakingSettings(
            target_group_size=config.target_group_size,
            min_group_size=config.min_group_size,
            min_matchmaking_time=config.min_matchmaking_time,
            request_timeout=config.request_timeout,
            mode=config.mode,
            bandwidth=config.bandwidth,
            min_vector_size=config.min_vector_size,
            total_size=self.total_size,
            agreed={
                "shapes and types of tensors": schema_of(self.infos),
                "compression": config.compression.fingerprint,
                "part_size_bytes": str(config.part_size_bytes),
            },
        )

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
        await cancel_and_wait(*self._tasks)
        await self.matchmaking.close()
        if self.config.mode is not AveragingMode.CLIENT:
            await self.remove_p2p_handlers(self.p2p, namespace=self.config.prefix)
            if self.p2p.is_alive:
                await self.state_sharing.withdraw()
        for waiting in self._rounds.values():
            if not waiting.done():
                waiting.set_exception(AllreduceException("this averager was shut down"))
                waiting.exception()  # nobody may be waiting

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
                if not control.allow_retries or left <= pause:
                    raise
                logger.info("averaging round failed and will be tried again: %s", str(e) or type(e).__name__)
                control.began_allreduce = False
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_RETRY_PAUSE)

    async def _attempt(self, control: StepControl) -> Gathered:
        control.stage = AveragingStage.LOOKING_FOR_GROUP
        group = await self.matchmaking.look_for_group(control)
        waiting = self._round_of(group.group_id)
        try:
            control.stage = AveragingStage.AWAITING_TRIGGER
            await control.wait_for_trigger()
            control.stage, control.began_allreduce = AveragingStage.RUNNING_ALLREDUCE, True
            async with self.lock.hold_async(), timeout(self.config.allreduce_timeout):
                control.round = self.last_round = await self._run_allreduce(group, control.weight, waiting)
        except (asyncio.TimeoutError, TimeoutError):
            raise AllreduceException(f"the all-reduce took longer than {self.config.allreduce_timeout} s") from None
        finally:
            self._forget_round(group.group_id)
        self._count(control.round)
        return self._gathered(group)

    async def _run_allreduce(self, group: GroupInfo, weight: float, waiting: asyncio.Future[Round]) -> RoundResult:
        own_index = group.peer_ids.index(self.p2p.peer_id)
        direct = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in self.tensors)
        working = self.tensors if direct else await run_in_worker(_copies_on_cpu, self.tensors)
        config = self.config
        settings = AllReduceSettings(
            config.compression,
            config.part_size_bytes,
            config.averaging_alpha,
            config.sender_timeout,
            config.reducer_timeout,
        )
        current = Round(AllReduce(group, own_index, working, self.infos, settings, weight, self._stub))
        waiting.set_result(current)
        result = await current.run()
        if not direct and config.mode is not AveragingMode.AUX:
            await run_in_worker(_copy_back, working, self.tensors)
        return result

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

    # --- rounds by group id -------------------------------------------------------------------------------------------

    def _round_of(self, group_id: bytes) -> asyncio.Future[Round]:
        if group_id not in self._rounds:
            self._rounds[group_id] = asyncio.get_running_loop().create_future()
        return self._rounds[group_id]

    def _forget_round(self, group_id: bytes) -> None:
        waiting = self._rounds.pop(group_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(AllreduceException("this member has cancelled the round"))
            waiting.exception()  # nobody may be waiting
        self._finished_rounds[group_id] = None
        while len(self._finished_rounds) > MAX_UNKNOWN_ROUNDS:
            self._finished_rounds.popitem(last=False)

    async def _find_round(self, group_id: bytes) -> Round:
        """The round that a sender means; it may be earlier than the leader's message to this member."""
        if group_id in self._finished_rounds:
            raise AllreduceException("this member has finished the round already, or has left it")
        if len(self._rounds) >= MAX_UNKNOWN_ROUNDS:
            raise AllreduceException("this member has too many rounds in flight")
        patience = self.config.sender_timeout + self.config.request_timeout
        async with timeout(None if math.isinf(patience) else patience):
            return await asyncio.shield(self._round_of(group_id))

    # --- what others call ---------------------------------------------------------------------------------------------

    async def rpc_join_group(self, call: Call, context: P2PContext) -> None:
        request = await call.receive(JoinRequest)
        if request is None:
            raise ProtocolError("ended before asking anything")
        await self.matchmaking.answer_join(call, request, context.remote_id)

    async def rpc_invite(self, request: Invitation, context: P2PContext) -> Acknowledged:
        self.matchmaking.answer_invitation(request, context.remote_id)
        return Acknowledged()

    async def rpc_reduce(self, call: Call, context: P2PContext) -> None:
        begin = await call.receive(BeginReduce)
        if begin is None:
            raise ProtocolError("ended before the first part")
        current = await self._find_round(begin.group_id)
        await current.serve_sender(call, begin, context.remote_id)

    async def rpc_complete(self, call: Call, context: P2PContext) -> None:
        hello = await call.receive(RoundMessage)
        if hello is None:
            raise ProtocolError("ended before saying which round")
        current = await self._find_round(hello.group_id)
        await current.serve_member(call, hello, context.remote_id)

    async def rpc_round_status(self, request: StatusRequest, context: P2PContext) -> StatusReply:
        current = self._rounds.get(request.group_id)
        if request.group_id in self._finished_rounds:
            status = RoundStatus.FINISHED
        else:
            status = RoundStatus.RUNNING if current is not None and current.done() else RoundStatus.UNKNOWN
        return StatusReply(status=int(status))

    async def rpc_download_state(self, call: Call, context: P2PContext) -> None:
        await call.receive(DownloadRequest)
        await self.state_sharing.serve(call)


def _copies_on_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for tensor in tensors]


def _copy_back(working: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(working, tensors, strict=True):
            target.copy_(source)
