"""An averager inside the event loop: it runs this averager's steps and answers the calls of others.

A step finds a group (:mod:`shoal.averaging.groups`), waits for its trigger, locks the tensors, and averages in the
group (:mod:`shoal.averaging.round`). If that fails before any tensor has changed, the step tries again. Tensors
with different tags are averaged in lanes of their own, which do not wait for each other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from shoal.averaging.arguments import AveragerConfig
from shoal.averaging.control import AveragingMode, AveragingStage, Gathered, GroupInfo, RoundResult, StepControl
from shoal.averaging.groups.keys import GroupKeyManager
from shoal.averaging.groups.matchmaking import Matchmaking
from shoal.averaging.groups.memory import UNTRUE
from shoal.averaging.groups.settings import MatchmakingSettings, Trust
from shoal.averaging.messages import (
    CALL_FAILURES,
    PEER_FAILURES,
    BeginReduce,
    Code,
    DownloadRequest,
    Greeting,
    Invitation,
    JoinReply,
    JoinRequest,
    RoundMessage,
    RoundOver,
    StatusReply,
    StatusRequest,
)
from shoal.averaging.round.finish import Round
from shoal.averaging.round.session import ActiveRounds, GroupSession, RoundIsCommitted
from shoal.averaging.round.traffic import stripes_for
from shoal.averaging.state.donor import StateSharing
from shoal.averaging.state.download import GetState, OwnedState
from shoal.averaging.state.newcomer import DownloadOptions, StateDownloads
from shoal.averaging.tensor_lock import TensorLock
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom, one_line, words_of
from shoal.base.serializer import MSGPackSerializer
from shoal.base.tasks import cancel_and_wait
from shoal.compression import CompressionInfo
from shoal.compression.base import dtype_name, is_stand_in, zeros_like_all
from shoal.errors import AllreduceException, AveragingError, ProtocolError
from shoal.p2p import P2P, Call, P2PContext, PeerID, ServicerBase, StubBase, patient

logger = logging.getLogger(__name__)

# A rough number (float32), used only to guess how many connections a round will use.
BYTES_PER_VALUE = 4

_RETRIABLE = (AveragingError, *CALL_FAILURES)
# The most seconds before a step tries again (chosen).
_MAX_RETRY_PAUSE = 1.0


Average = Callable[[GroupSession, Sequence[torch.Tensor], Sequence[CompressionInfo]], Awaitable[None]]


async def average_once(
    session: GroupSession, tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]
) -> None:
    """The usual step: one all-reduce of the averaged tensors."""
    await session.all_reduce(tensors, infos)


class Lane:
    """The tensors that are averaged under one tag, and the search for groups for them."""

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
        self.indices, self._all_tensors = indices, tensors
        self.infos = [infos[i] for i in indices]
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
                "aggregation": "mean" if config.aggregation is None else config.aggregation.fingerprint,
                "quorum": "none" if config.quorum is None else f"{config.quorum}, {config.quorum_grace:g} s of grace",
                **config.agreement,
            },
        )
        self.matchmaking = Matchmaking(p2p, self.keys, settings, get_stub, trust, leave_group)
        self.is_spoilt = False
        """Some values of this peer were not finite when it last averaged."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of this lane. Other tensors may replace them between two rounds."""
        return [self._all_tensors[index] for index in self.indices]


def _auxiliaries(group: GroupInfo) -> list[PeerID]:
    return [peer for peer, mode in zip(group.peer_ids, group.modes, strict=True) if mode == AveragingMode.AUX]


def schema_of(infos: Sequence[CompressionInfo]) -> str:
    """A hash of the shapes, types and roles that all members of a group must share."""
    description = ";".join(
        f"{info.descriptor.size}:{dtype_name(info.descriptor.dtype)}:{info.role.name}" for info in infos
    )
    return hashlib.sha256(description.encode()).hexdigest()


class AveragerNode(ServicerBase):
    """The coroutine side of :class:`~shoal.averaging.DecentralizedAverager`. Made and used inside a loop.

    Args:
        p2p: this peer.
        dht_node: the DHT.
        tensors: the tensors to average; changed in place. While the lock is held, other tensors of the same shapes may
            replace those in the list.
        infos: one for each tensor.
        config: the options.
        lock: held while the tensors are averaged.
        get_state: returns the state that newcomers download.
        average: averages in a group that was found.
        get_part: returns a part of the state by its name, or ``None`` to refuse it.
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
        get_part: Callable[[bytes], OwnedState | None] = lambda part: None,
    ) -> None:
        self.p2p, self.tensors, self.infos, self.config, self.lock = p2p, tensors, list(infos), config, lock
        self.average = average
        """Averages in a group that was found."""
        self.last_round: RoundResult | None = None
        self.last_updated = 0.0
        """DHT time of the last round that changed the tensors."""
        self.trust = Trust()
        """How far this peer trusts others, see :meth:`believe`."""
        self.rounds = ActiveRounds(p2p.behaviour.has_delivered, most_kept=2 * max(1, len(config.tags)))
        """The rounds in which this averager takes part."""
        self.lanes = {
            tag: Lane(
                tag, indices, tensors, infos, config, p2p, dht_node, self.stub, self.trust, self.rounds.leave_group
            )
            for tag, indices in (config.tags or {"": range(len(infos))}).items()
        }
        self._lane_of_prefix = {config.lane_prefix(tag): lane for tag, lane in self.lanes.items()}
        vector_bytes = sum(info.descriptor.numel() * info.descriptor.dtype.itemsize for info in infos)
        key = f"{config.prefix}.all_averagers"
        self.state_sharing = StateSharing(p2p, dht_node, key, config, get_state, get_part, self.trust)
        """Gives the state to others."""
        downloads = DownloadOptions(
            # A state may hold much more than the averaged tensors, such as optimizer statistics.
            max_bytes=16 * vector_bytes + 2**30,
            chunk_timeout=config.chunk_timeout,
            agreement=config.agreement,
            is_one_state=config.target_group_size is None,
            rate=config.state_download_rate,
        )
        self.state_downloads = StateDownloads(p2p, dht_node, key, self.stub, downloads, self.trust)
        """Gets the states of others."""
        self._warn_seldom = Seldom(logger.warning)
        self._tasks: list[asyncio.Task[Any]] = []
        # A dictionary as an ordered set, so that every run of a simulation cancels in the same order.
        self.connecting: dict[asyncio.Task[None], None] = {}
        """Tasks that make connections ahead of a round."""

    @property
    def group_bits(self) -> str:
        """The bucket of the only lane, or of the first one."""
        return next(iter(self.lanes.values())).keys.group_bits

    def believe(self, trust: Trust) -> None:
        """Use this trust from the next search on, for a group or for donors."""
        self.trust = self.state_sharing.trust = self.state_downloads.trust = trust
        for lane in self.lanes.values():
            lane.matchmaking.believe(trust)

    def stub(self, peer: PeerID) -> StubBase:
        """A stub with which this averager calls another one."""
        return self.get_stub(self.p2p, peer, namespace=self.config.prefix)

    async def start(self) -> None:
        """Start to answer other averagers.

        Raises:
            P2PDaemonError: this peer runs another averager with the same prefix.
        """
        rule = self.config.aggregation
        if rule is not None and rule.ignores_weights:
            logger.info("%s: every member counts the same, however many samples it has", rule.fingerprint)
        if self.config.mode is not AveragingMode.CLIENT:
            await self.add_p2p_handlers(self.p2p, namespace=self.config.prefix)
            self._tasks.append(asyncio.ensure_future(self.state_sharing.declare_forever()))

    async def close(self) -> None:
        """Stop serving others, and withdraw the records of this averager from the DHT."""
        # Remove the handlers first, because the next averager with this prefix may already be starting.
        if self.config.mode is not AveragingMode.CLIENT:
            await self.remove_p2p_handlers(self.p2p, namespace=self.config.prefix)
        await cancel_and_wait(*self._tasks, *self.connecting)
        await asyncio.gather(*[lane.matchmaking.close() for lane in self.lanes.values()])
        if self.config.mode is not AveragingMode.CLIENT and self.p2p.is_alive:
            await self.state_sharing.withdraw()
        await self.rounds.close()

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
            self.p2p.metrics.last_failure = words_of(e)
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
                # Some tensors already hold averages. A second round would average them with old values of others.
                is_changed = isinstance(e, AllreduceException) and e.share_averaged > 0
                if not control.allow_retries or is_changed or left <= pause:
                    raise
                logger.info("averaging round failed and will be tried again: %s", words_of(e))
                control.began_allreduce, control.stage = False, AveragingStage.LOOKING_FOR_GROUP
                control.on_loss()
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
            session = self.session(group, lane, control.weight)
            try:
                async with self.lock.hold_async(lane.indices):
                    await self._average_in(session, lane)
            finally:
                session.tell(self.p2p.behaviour)
                session.let_go()
                self._report_not_finite(session, lane)
        finally:
            self.rounds.leave_group(group.group_id)
        control.round = self.last_round = dataclasses.replace(session.result, absent=group.absent)
        lane.matchmaking.former_members.note_round(group, control.round.failed_peers, self.p2p.peer_id)
        self._count(control.round)
        return self._gathered(session.group)

    async def _average_in(self, session: GroupSession, lane: Lane) -> None:
        """Average in a group, within the time limit for the whole all-reduce.

        Raises:
            AllreduceException: it failed; ``share_averaged`` of the error tells how much has changed anyway.
        """
        tensors = lane.tensors
        if any(map(is_stand_in, tensors)):
            # This peer only helps: it has withdrawn from the round, or it is an auxiliary. The others need not wait.
            tensors, session.weight = zeros_like_all(tensors), 0.0
        try:
            async with asyncio.timeout(self.config.allreduce_timeout):
                await self.average(session, tensors, lane.infos)
        except _RETRIABLE as e:
            is_late = isinstance(e, TimeoutError)
            if is_late:
                session.blame_slow_members()
            reason = f"the all-reduce took longer than {self.config.allreduce_timeout} s" if is_late else str(e)
            share = session.share_averaged(tensors)
            if share:
                reason += f"; {100 * share:.1f} % of the values were averaged before, so it is not tried again"
            failure = AllreduceException(reason or type(e).__name__)
            failure.share_averaged = share
            raise failure from e

    def _report_not_finite(self, session: GroupSession, lane: Lane) -> None:
        """Warn of values that were left out of averages, and refuse the peers that have sent them."""
        # Warn of own values once, until they are finite again.
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
        aux = _auxiliaries(group)
        for peer in lane.matchmaking.refusals.note(session.seen_not_finite, told, group.peer_ids, aux):
            self.p2p.metrics.troubles["values that are not finite"] += 1
            logger.warning(
                "peer %s sent NaN or infinite values: they are left out, and it is refused for a while. Its owner "
                "should update shoal or check the machine",
                peer,
            )

    def _note_untrue(self, group: GroupInfo, lane: Lane, peer: PeerID, what: str) -> None:
        """Refuse a member that has lied about its values for a while, and log a warning."""
        if peer == self.p2p.peer_id:
            return
        self.p2p.metrics.members_untrue += 1
        if lane.matchmaking.refusals.note({peer}, (), group.peer_ids, _auxiliaries(group), UNTRUE):
            logger.warning(
                "%s %s. Its false values are left out, and it is refused for a while: either it lies on purpose, or "
                "its machine is broken",
                peer,
                what,
            )

    def _connect_ahead(self, group: GroupInfo, lane: Lane) -> None:
        """Make the connections of the round before its trigger, because this takes a while over long links."""
        for peer, share in zip(group.peer_ids, group.shares, strict=True):
            if share and peer != self.p2p.peer_id:
                parts = share * BYTES_PER_VALUE // self.config.part_size_bytes
                stripes = stripes_for(self.p2p.round_trip_to(peer), parts)
                # One connection more than the number of stripes, for the calls that carry no parts.
                task = asyncio.ensure_future(self._connect(peer, stripes + 1))
                self.connecting[task] = None
                task.add_done_callback(self.connecting.pop)

    async def _connect(self, peer: PeerID, connections: int) -> None:
        try:
            await self.p2p.prepare(peer, connections)
        except PEER_FAILURES as e:
            logger.debug("could not connect to %s ahead of the round: %r", peer, e)

    def session(self, group: GroupInfo, lane: Lane, weight: float) -> GroupSession:
        """The session for a step in a group that was found."""
        sign, accuse = self.p2p.identity.sign, functools.partial(self._note_untrue, group, lane)
        stuck = self.p2p.behaviour.note_stuck
        return GroupSession(group, self.p2p.peer_id, weight, self.config, self.rounds, self.stub, sign, accuse, stuck)

    def _count(self, result: RoundResult) -> None:
        self.last_updated = get_dht_time()
        metrics = self.p2p.metrics
        metrics.rounds_succeeded += 1
        metrics.seconds_averaging += result.duration
        metrics.members_lost += len(result.failed_peers)
        metrics.members_lost_by_cause.update(cause.name.lower().replace("_", " ") for cause in result.causes.values())
        if result.failed_peers:
            logger.info(
                "averaged %.1f %% of the vector; failed members: %s",
                100 * result.share_averaged,
                ", ".join(f"{peer} ({cause.name.lower()})" for peer, cause in result.causes.items()),
            )
        if result.left_out_peers:
            logger.info(
                "some averages of the round lack the values of members that a reducer could not reach: %s",
                ", ".join(map(str, result.left_out_peers)),
            )

    def _gathered(self, group: GroupInfo) -> Gathered:
        gathered: Gathered = {}
        for peer, blob in zip(group.peer_ids, group.gathered, strict=True):
            try:
                gathered[peer] = MSGPackSerializer.loads(blob)
            except ValueError as e:
                self._warn_seldom("could not read the gathered value of %s: %s", peer, one_line(str(e)), about=peer)
                gathered[peer] = None
        return gathered

    # --- what others call ---------------------------------------------------------------------------------------------
    # These calls have no general time limit, because they wait for other peers, too. Searches, rounds and downloads
    # have limits of their own.

    @patient
    async def rpc_join_group(self, call: Call, context: P2PContext) -> None:
        request = await call.receive(JoinRequest)
        if request is None:
            raise ProtocolError("ended before its request")
        lane = self._lane_of(request.group_key)
        if lane is None:
            await call.send(JoinReply(code=Code.NOT_LOOKING_FOR_GROUP), end=True)
        else:
            await lane.matchmaking.answer_join(call, request, context.remote_id)

    @patient
    async def rpc_invite(self, call: Call, context: P2PContext) -> None:
        invitation = await call.receive(Invitation)
        lane = None if invitation is None else self._lane_of(invitation.group_key)
        if invitation is not None and lane is not None:
            await lane.matchmaking.answer_invitation(call, invitation)

    def _lane_of(self, group_key: str) -> Lane | None:
        return self._lane_of_prefix.get(group_key.partition(".")[0])

    @patient
    async def rpc_reduce(self, call: Call, context: P2PContext) -> None:
        begin = await call.receive(BeginReduce)
        if begin is None:
            raise ProtocolError("ended before the first part")
        current = await self._find_round(call, begin.round_id)
        await current.allreduce.serve(call, begin, context.remote_id)

    async def _find_round(self, call: Call, round_id: bytes) -> Round:
        patience, call.is_premature = self.config.sender_timeout + self.config.request_timeout, True
        current = await self.rounds.find(round_id, call.remote, patience)
        call.is_premature = False
        return current

    @patient
    async def rpc_complete(self, call: Call, context: P2PContext) -> None:
        greeting = await call.receive(RoundMessage)
        if not isinstance(greeting, Greeting):
            raise ProtocolError("ended before its greeting, or sent something else first")
        try:
            current = await self._find_round(call, greeting.round_id)
        except RoundIsCommitted:
            await call.send(RoundOver(), end=True)
        else:
            await current.serve(call, greeting, context.remote_id)

    async def rpc_round_status(self, request: StatusRequest, context: P2PContext) -> StatusReply:
        current = self.rounds.running.get(request.round_id)
        has_given_up = current is not None and current.allreduce.hear_question(request, context.remote_id)
        is_waiting = current is not None and current.is_waiting
        has_left = current is not None and current.follows_another_than(context.remote_id)
        return StatusReply(int(self.rounds.status(request.round_id)), has_given_up, is_waiting, has_left)

    @patient
    async def rpc_download_state(self, call: Call, context: P2PContext) -> None:
        request = await call.receive(DownloadRequest)
        await self.state_sharing.serve(call, DownloadRequest() if request is None else request)
