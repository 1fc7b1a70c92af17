"""A group at work: rounds among the same members, one after another; and all rounds of an averager, by id."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from shoal.averaging.allreduce.exchange import AllReduce
from shoal.averaging.allreduce.finish import Completion
from shoal.averaging.allreduce.parts import RoundVector, rescale_shares
from shoal.averaging.control import GROUP_ID_BYTES, AveragingMode, GroupInfo, RoundResult
from shoal.averaging.finite import name_not_finite
from shoal.averaging.messages import BeginReduce, RoundKind, RoundMessage, RoundStatus
from shoal.compression import CompressionBase, CompressionInfo
from shoal.errors import AllreduceException, ProtocolError
from shoal.p2p import Call, PeerID, StubBase
from shoal.tasks import all_of, cancel_and_wait, first_completed, run_in_worker

logger = logging.getLogger(__name__)

# Calls for rounds that have not begun here wait for them; a stranger could open any number.
MAX_WAITING_CALLS = 1024
# Rounds that one member may mean before they are known here; an honest one is a phase or two ahead.
MAX_UNKNOWN_ROUNDS = 8
# Whoever calls late for a round that is over is refused at once, if its id is still known.
MAX_REMEMBERED_ROUNDS = 256


@dataclass(frozen=True)
class AllReduceSettings:
    """How a group averages."""

    codec: CompressionBase
    part_size_bytes: int
    alpha: float
    """Local values move by this fraction of the way to the average."""
    sender_timeout: float
    """Seconds without the next part after which a sender is given up."""
    reducer_timeout: float
    """Seconds without the next average after which a reducer is given up."""
    quorum: int | None = None
    """When so many members have sent everything, the others have ``quorum_grace`` seconds left; ``None``: no limit."""
    quorum_grace: float = 0.0


class Round:
    """Exchange of parts, then completion; and what other members call in the meantime."""

    def __init__(self, allreduce: AllReduce) -> None:
        self._allreduce, self._completion = allreduce, Completion(allreduce)
        self._work: asyncio.Future[None] | None = None

    async def run(self, failed_before: Sequence[int] = ()) -> RoundResult:
        """Average; afterwards the tensors hold the result. :meth:`finish` must follow.

        Args:
            failed_before: members that are not waited for, because they failed in an earlier phase.

        Raises:
            AllreduceException: nothing at all was averaged; the tensors are as they were.
        """
        started = asyncio.get_running_loop().time()
        for member in failed_before:
            self._allreduce.roster.fail(member, "failed in an earlier phase")
        # the call to the coordinator first: it takes the connection that is there, so that all hear of the end together
        self._work = work = asyncio.ensure_future(all_of(self._complete(), self._allreduce.run()))
        try:
            await first_completed(asyncio.shield(work), self._allreduce.roster.all_complete.wait())
            if work.done():
                work.result()
        except BaseException:
            await cancel_and_wait(work)
            raise
        return self._allreduce.result(asyncio.get_running_loop().time() - started)

    async def _complete(self) -> None:
        try:
            await self._completion.run()
        finally:
            self._allreduce.end()

    async def finish(self, linger: float) -> None:
        """End politely; the result is there, and the tensors are not touched any more.

        Args:
            linger: seconds for which members that were late may come for the result.
        """
        if self._work is None:
            return
        try:
            await asyncio.wait([self._work])
            if self._allreduce.roster.closed_early:
                await asyncio.sleep(linger)
        finally:
            await cancel_and_wait(self._work)

    async def serve_sender(self, call: Call, begin: BeginReduce, sender: PeerID) -> None:
        """A member sends the parts that this one reduces."""
        await self._allreduce.serve(call, begin, sender)

    async def serve_member(self, call: Call, hello: RoundMessage, member: PeerID) -> None:
        """A member takes this one for the coordinator.

        Raises:
            ProtocolError: it is no member, or breaks the protocol.
        """
        peers = self._allreduce.group.peer_ids
        if hello.kind != RoundKind.HELLO or member not in peers or not 0 <= hello.weight < math.inf:
            raise ProtocolError("not the greeting of a member of this round")
        await self._completion.serve(call, hello, peers.index(member))


class Rounds:
    """The rounds in which this averager takes part, by id. Calls of other members may come before the round begins.

    The id of a round is the id of its group and the number of its phase.
    """

    def __init__(self) -> None:
        self._running: dict[bytes, Round] = {}
        # Calls that are earlier than the round, by its id, and whose they are.
        self._waiting: dict[bytes, dict[asyncio.Future[Round], PeerID]] = {}
        # Rounds whose result is there, until they have ended politely.
        self._lingering: dict[bytes, tuple[Round, asyncio.Task[None]]] = {}
        # Ids of rounds, and of groups that this averager has left.
        self._finished: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting) + len(self._lingering)

    async def run(
        self, round_id: bytes, current: Round, failed_before: Sequence[int] = (), linger: float = 0.0
    ) -> RoundResult:
        """Run a round while others can find it, and members that are late for it so many seconds longer.

        Raises:
            AllreduceException: nothing was averaged.
        """
        self._running[round_id] = current
        for call in self._waiting.get(round_id, ()):
            if not call.done():
                call.set_result(current)
        try:
            return await current.run(failed_before)
        finally:
            del self._running[round_id]
            self._remember(round_id)
            self._lingering[round_id] = current, asyncio.ensure_future(self._finish(round_id, current, linger))

    async def _finish(self, round_id: bytes, current: Round, linger: float) -> None:
        try:
            await current.finish(linger)
        finally:
            self._lingering.pop(round_id, None)

    def leave_group(self, group_id: bytes) -> None:
        """No further round will begin in this group."""
        for round_id, calls in self._waiting.items():
            if round_id.startswith(group_id):
                self._refuse(calls, "this member has left the group")
        self._remember(group_id)

    async def close(self) -> None:
        """No further round will begin at all."""
        for calls in self._waiting.values():
            self._refuse(calls, "this averager was shut down")
        await cancel_and_wait(*[task for _, task in self._lingering.values()])

    def _refuse(self, calls: Iterable[asyncio.Future[Round]], reason: str) -> None:
        for call in calls:
            if not call.done():
                call.set_exception(AllreduceException(reason))

    def _remember(self, finished_id: bytes) -> None:
        self._finished[finished_id] = None
        while len(self._finished) > MAX_REMEMBERED_ROUNDS:
            self._finished.popitem(last=False)

    def _is_finished(self, round_id: bytes) -> bool:
        return round_id in self._finished or round_id[:GROUP_ID_BYTES] in self._finished

    async def find(self, round_id: bytes, caller: PeerID, patience: float) -> Round:
        """The round that another member means.

        Args:
            caller: that member.
            patience: seconds to wait for its beginning here.

        Raises:
            AllreduceException: it is over, or there are too many calls for rounds that do not exist.
            TimeoutError: it did not begin.
        """
        if round_id in self._running:
            return self._running[round_id]
        if round_id in self._lingering:
            return self._lingering[round_id][0]
        if self._is_finished(round_id):
            raise AllreduceException("this member has finished the round already, or has left it")
        if sum(map(len, self._waiting.values())) >= MAX_WAITING_CALLS:
            raise AllreduceException("too many calls wait for rounds that this member does not know")
        unknown = [known_id for known_id, calls in self._waiting.items() if caller in calls.values()]
        if len(unknown) >= MAX_UNKNOWN_ROUNDS and round_id not in unknown:
            raise AllreduceException(f"{caller} means {len(unknown)} rounds already that this member does not know")
        call: asyncio.Future[Round] = asyncio.get_running_loop().create_future()
        calls = self._waiting.setdefault(round_id, {})
        calls[call] = caller
        try:
            async with asyncio.timeout(None if math.isinf(patience) else patience):
                return await call
        finally:
            del calls[call]
            if not calls:
                self._waiting.pop(round_id, None)

    def status(self, round_id: bytes) -> RoundStatus:
        """How far a round is here."""
        if round_id in self._running:
            return RoundStatus.RUNNING
        return RoundStatus.FINISHED if self._is_finished(round_id) else RoundStatus.UNKNOWN


# The phase is the last byte of a round's id.
MAX_PHASES = 256
# Looking at so many values takes long enough to be done in a worker.
LARGE_VECTOR = 2**20


class GroupSession:
    """What a step does in the group that was found for it.

    Most averagers do one all-reduce of their tensors. Others do several, such as PowerSGD, where what is averaged
    second depends on the first average: all members call :meth:`all_reduce` equally often, with tensors of the same
    shapes. A member that failed in one phase is not waited for in the next ones.

    Args:
        own: this peer.
        weight: of this member's values.
        rounds: where other members find the phases.
        get_stub: makes a stub of the averager protocol for a member.
    """

    def __init__(
        self,
        group: GroupInfo,
        own: PeerID,
        weight: float,
        settings: AllReduceSettings,
        rounds: Rounds,
        get_stub: Callable[[PeerID], StubBase],
    ) -> None:
        self.group, self.own_index = group, group.peer_ids.index(own)
        self.weight = group.limited(self.own_index, weight)
        if self.weight < weight:
            logger.info(
                "in this round %g of this peer's weight of %g count: who leads it has not seen this peer bring so much "
                "before. From the next round on it will count more",
                self.weight,
                weight,
            )
        self._settings, self._rounds, self._get_stub = settings, rounds, get_stub
        self.not_finite: str | None = None
        """Which of this member's tensors has values that are not finite, in words."""
        self.seen_not_finite: set[PeerID] = set()
        """Members that have sent this one values that are not finite."""
        self.told_not_finite: set[PeerID] = set()
        """Members of which others say so."""
        self._phases: list[RoundResult] = []
        # What each phase works on, and how far it is.
        self._vectors: list[tuple[Sequence[torch.Tensor], RoundVector]] = []
        # The weights of all members, in the phases that have those of the step.
        self._main_weights: list[tuple[float, ...]] = []

    @property
    def mode(self) -> AveragingMode:
        """What this member does in the group."""
        return AveragingMode(self.group.modes[self.own_index])

    def show_gathered(self, gathered: Sequence[bytes]) -> None:
        """Let the result of the step contain this instead of what the members gave, which was not all for the user.

        Args:
            gathered: for each member, serialized.
        """
        self.group = dataclasses.replace(self.group, gathered=tuple(gathered))

    @property
    def result(self) -> RoundResult:
        """What came of all phases together: a member that failed in one failed; the smallest share counts."""
        assert self._phases, "no all-reduce has been run in this group"
        failed = {peer for phase in self._phases for peer in phase.failed_peers}
        not_finite = {peer for phase in self._phases for peer in phase.not_finite_peers}
        return RoundResult(
            group_id=self.group.group_id,
            peers=self.group.peer_ids,
            failed_peers=tuple(peer for peer in self.group.peer_ids if peer in failed),
            weights=tuple(map(min, zip(*(self._main_weights or [self._phases[0].weights]), strict=True))),
            share_averaged=min(phase.share_averaged for phase in self._phases),
            auxiliaries=self._phases[0].auxiliaries,
            late=any(phase.late for phase in self._phases),
            duration=sum(phase.duration for phase in self._phases),
            not_finite_peers=tuple(peer for peer in self.group.peer_ids if peer in not_finite),
        )

    async def check_values(self, tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]) -> bool:
        """Whether all values of this member are finite; if not, its weight in this step is 0 from now on.

        :meth:`all_reduce` does that with its tensors: others, from which these are made, may be checked before.
        """
        if self.mode is AveragingMode.AUX:  # has none
            return True
        is_large = sum(tensor.numel() for tensor in tensors) > LARGE_VECTOR
        bad = await run_in_worker(name_not_finite, tensors, infos) if is_large else name_not_finite(tensors, infos)
        if bad is not None:
            self.weight, self.not_finite = 0.0, self.not_finite or bad
        return bad is None

    async def all_reduce(
        self,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo] | None = None,
        alpha: float | None = None,
        weight: float | None = None,
    ) -> RoundResult:
        """Replace tensors by their weighted mean over the members.

        Args:
            tensors: of the same shapes and types in all members; changed in place, unless this member is an auxiliary.
            infos: one for each tensor, for the codec.
            alpha: move values by this fraction of the way to the mean; default: as the averager is set.
            weight: of this member's values in this phase; default: as in the step. If some of the values are not
                finite, it is 0.

        Raises:
            AllreduceException: nothing was averaged, the tensors are as they were.
        """
        phase = len(self._phases)
        assert phase < MAX_PHASES, f"a step has at most {MAX_PHASES} phases"
        infos = infos or [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
        settings = self._settings if alpha is None else dataclasses.replace(self._settings, alpha=alpha)
        round_id = self.group.group_id + bytes([phase])
        shares = rescale_shares(self.group.shares, sum(tensor.numel() for tensor in tensors))
        group = dataclasses.replace(self.group, shares=shares)
        direct = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        working = tensors if direct else await run_in_worker(_copies_on_cpu, tensors)
        # All of it, before the first byte is sent.
        is_spoilt = not await self.check_values(working, infos)
        own_weight = 0.0 if is_spoilt else self.weight if weight is None else weight
        allreduce = AllReduce(
            round_id, group, self.own_index, working, infos, settings, own_weight, self._get_stub, is_spoilt
        )
        self._vectors.append((working, allreduce.vector))
        try:
            result = await self._rounds.run(
                round_id, Round(allreduce), self._failed_members(), linger=settings.sender_timeout
            )
        finally:
            roster = allreduce.roster
            self.seen_not_finite.update(group.peer_ids[member] for member in roster.seen_not_finite)
            self.told_not_finite.update(group.peer_ids[member] for member in roster.told_not_finite)
        self._phases.append(result)
        if weight is None:
            self._main_weights.append(result.weights)
        if not direct and self.mode is not AveragingMode.AUX:
            self._vectors.append((tensors, allreduce.vector))
            await run_in_worker(_copy_back, working, tensors)
        return result

    def share_averaged(self, tensors: Sequence[torch.Tensor]) -> float:
        """Which share of the values of some of these tensors holds an average by now, also if a phase was cut short."""
        wanted = set(map(id, tensors))
        return max(
            (vector.share_averaged for each, vector in self._vectors if wanted & set(map(id, each))), default=0.0
        )

    def _failed_members(self) -> list[int]:
        failed = {peer for phase in self._phases for peer in phase.failed_peers}
        return [index for index, peer in enumerate(self.group.peer_ids) if peer in failed]


def _copies_on_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for tensor in tensors]


def _copy_back(working: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(working, tensors, strict=True):
            target.copy_(source)
