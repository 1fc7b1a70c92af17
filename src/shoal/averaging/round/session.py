"""Rounds of a group, one after another; and all rounds of an averager, by id.

A step runs one or more phases in the group that was found for it (:class:`GroupSession`). Each phase is a
:class:`Round`: an exchange of parts, then its completion. :class:`ActiveRounds` finds the round for a call of another
member, even if the call comes before the round starts here or after it has its result.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shoal.averaging.arguments import AveragerConfig
from shoal.averaging.control import GROUP_ID_BYTES, AveragingMode, GroupInfo, RoundResult
from shoal.averaging.finite import name_not_finite
from shoal.averaging.messages import RoundStatus
from shoal.averaging.round.combining import share_norms
from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.finish import Round
from shoal.averaging.round.parts import RoundVector, rescale_shares
from shoal.averaging.round.state import RoundMember, RoundState
from shoal.base.tasks import cancel_and_wait, run_in_worker
from shoal.compression import CompressionInfo
from shoal.errors import AllreduceException
from shoal.p2p import PeerID, StubBase
from shoal.peers.scores import PeerScores

logger = logging.getLogger(__name__)

# The most calls that wait for rounds that have not begun here (chosen), so that strangers cannot fill the memory.
MAX_WAITING_CALLS = 1024
# The most unknown rounds for which one peer may wait here. Chosen: an honest member is a phase or two ahead.
MAX_UNKNOWN_ROUNDS = 8
# The number of finished rounds whose ids are kept, so that late calls for them are refused at once (chosen).
MAX_REMEMBERED_ROUNDS = 256


class RoundIsCommitted(AllreduceException):
    """A call came too late for a round that has ended with a result."""


class ActiveRounds:
    """The rounds in which this averager takes part, by id. Calls of other members may come before a round begins.

    The id of a round is the id of its group followed by the number of its phase.

    Args:
        is_of_use: tells whether to keep a peer's early calls when there are too many calls.
        most_kept: the number of groups whose results are kept for late members; each takes as much memory as the
            tensors.
    """

    def __init__(self, is_of_use: Callable[[PeerID], bool] = lambda peer: False, most_kept: int = 2) -> None:
        self._is_of_use, self._most_kept = is_of_use, most_kept
        self.running: dict[bytes, Round] = {}
        """Rounds that have no result yet."""
        # By round id: the calls that wait for the round to begin here, and their callers.
        self._waiting: dict[bytes, dict[asyncio.Future[Round], PeerID]] = {}
        self.lingering: dict[bytes, tuple[Round, asyncio.Task[None]]] = {}
        """Rounds that have their result but still serve other members."""
        self.finished: OrderedDict[bytes, bool] = OrderedDict()
        """Ids of rounds and groups that this averager has left, and whether they were committed, as far as it knows."""

    def __len__(self) -> int:
        return len(self.running) + len(self._waiting) + len(self.lingering)

    async def run(
        self, round_id: bytes, current: Round, failed_before: Sequence[int] = (), linger: float = 0.0
    ) -> RoundResult:
        """Run a round that others can find by its id, late members until ``linger`` seconds after its end.

        Raises:
            AllreduceException: nothing was averaged.
        """
        self.running[round_id] = current
        for call in self._waiting.get(round_id, ()):
            if not call.done():
                call.set_result(current)
        try:
            return await current.run(failed_before)
        finally:
            del self.running[round_id]
            self._remember(round_id, is_committed=current.is_committed)
            self.lingering[round_id] = current, asyncio.ensure_future(self._finish(round_id, current, linger))
            groups = [*dict.fromkeys(each[:GROUP_ID_BYTES] for each in self.lingering)]
            for each, (earlier, _) in self.lingering.items():
                if each[:GROUP_ID_BYTES] in groups[: -self._most_kept]:
                    earlier.is_outdated.set()

    async def _finish(self, round_id: bytes, current: Round, linger: float) -> None:
        try:
            await current.finish(linger)
        finally:
            if round_id in self.finished:
                self.finished[round_id] = current.is_committed
            self.lingering.pop(round_id, None)

    def leave_group(self, group_id: bytes) -> None:
        """Note that no further round will begin in this group; calls that wait for one are refused."""
        for round_id, calls in self._waiting.items():
            if round_id.startswith(group_id):
                self._refuse(calls, "this member has left the group")
        self._remember(group_id)

    async def close(self) -> None:
        """Refuse all waiting calls and end lingering rounds, because no further round will begin."""
        for calls in self._waiting.values():
            self._refuse(calls, "this averager was shut down")
        await cancel_and_wait(*[task for _, task in self.lingering.values()])

    def _refuse(self, calls: Iterable[asyncio.Future[Round]], reason: str) -> None:
        for call in calls:
            if not call.done():
                call.set_exception(AllreduceException(reason))

    def _remember(self, finished_id: bytes, *, is_committed: bool = False) -> None:
        self.finished[finished_id] = is_committed
        while len(self.finished) > MAX_REMEMBERED_ROUNDS:
            self.finished.popitem(last=False)

    def _is_finished(self, round_id: bytes) -> bool:
        return round_id in self.finished or round_id[:GROUP_ID_BYTES] in self.finished

    async def find(self, round_id: bytes, caller: PeerID, patience: float) -> Round:
        """The round that another member means; waits for it if it has not begun here.

        Args:
            caller: the member that has called.
            patience: seconds to wait for the beginning of the round.

        Raises:
            RoundIsCommitted: the round is over, with a result.
            AllreduceException: the round is over without a result, or too many calls wait for unknown rounds.
            TimeoutError: the round did not begin in time.
        """
        if round_id in self.running:
            return self.running[round_id]
        if round_id in self.lingering:
            return self.lingering[round_id][0]
        if self.finished.get(round_id):
            raise RoundIsCommitted("this member has finished the round already")
        if self._is_finished(round_id):
            raise AllreduceException("this member has finished the round already, or has left it")
        unknown = [known_id for known_id, calls in self._waiting.items() if caller in calls.values()]
        if len(unknown) >= MAX_UNKNOWN_ROUNDS and round_id not in unknown:
            raise AllreduceException(f"{caller} already waits for {len(unknown)} rounds that this member does not know")
        if sum(map(len, self._waiting.values())) >= MAX_WAITING_CALLS:
            self._give_up_longest_waiting()
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

    def _give_up_longest_waiting(self) -> None:
        """Refuse the stranger that has waited longest, or raise an error. Calls for real rounds wait only briefly."""
        waiting = ((call, peer) for calls in self._waiting.values() for call, peer in calls.items())
        refused = next((call for call, peer in waiting if not call.done() and not self._is_of_use(peer)), None)
        if refused is None:
            raise AllreduceException("too many calls wait for rounds that this member does not know")
        self._refuse([refused], "too many calls wait for rounds that this member does not know")

    def status(self, round_id: bytes) -> RoundStatus:
        """The status of a round at this member."""
        if round_id in self.running:
            return RoundStatus.RUNNING
        if self.finished.get(round_id) or round_id in self.lingering:
            return RoundStatus.FINISHED
        return RoundStatus.LEFT if self._is_finished(round_id) else RoundStatus.UNKNOWN


# Derived: the phase is the last byte of a round's id.
MAX_PHASES = 256
# Vectors with more values than this are processed in a worker, so that they do not block the event loop (chosen).
LARGE_VECTOR = 2**20


class GroupSession:
    """What a step does in the group that was found for it.

    Most averagers run one all-reduce of their tensors. Others run several, one per phase: the second phase of PowerSGD,
    for example, depends on the average of the first. All members call :meth:`all_reduce` equally often, with tensors of
    the same shapes. If a member fails in one phase, the later ones do not wait for it.

    Args:
        group: as agreed.
        own: this peer.
        weight: this member's weight.
        settings: how the group averages.
        rounds: where other members find the phases.
        get_stub: makes a stub of the averager protocol for a member.
        sign: signs with this peer's key.
        accuse: called with a member that has lied, and what it has lied about; perhaps after the session is over.
        note_stuck: called with a stuck coordinator and the seconds that this member waited for it; perhaps after the
            session is over.
    """

    def __init__(
        self,
        group: GroupInfo,
        own: PeerID,
        weight: float,
        settings: AveragerConfig,
        rounds: ActiveRounds,
        get_stub: Callable[[PeerID], StubBase],
        sign: Callable[[bytes], bytes],
        accuse: Callable[[PeerID, str], None],
        note_stuck: Callable[[PeerID, float], object] = lambda coordinator, seconds: None,
    ) -> None:
        self.group, self.own_index = group, group.peer_ids.index(own)
        self.weight = group.limited(self.own_index, weight)
        self._settings, self._rounds, self._get_stub = settings, rounds, get_stub
        self._sign, self._accuse, self._note_stuck = sign, accuse, note_stuck
        self.not_finite: str | None = None
        """Describes this member's first tensor with values that are not finite; ``None``: all values are finite."""
        self._is_cut_short = False
        self._began_at = math.nan
        self._phases: list[RoundResult] = []
        # By phase: the status of the members, also if the phase failed.
        self._states: list[RoundState] = []
        # By phase: its tensors, and the vector that knows how much of them is averaged.
        self._vectors: list[tuple[Sequence[torch.Tensor], RoundVector]] = []
        # The weights of all members, for each phase that uses the weights of the step.
        self._main_weights: list[tuple[float, ...]] = []

    @property
    def mode(self) -> AveragingMode:
        """The mode of this member in the group."""
        return AveragingMode(self.group.modes[self.own_index])

    def show_gathered(self, gathered: Sequence[bytes]) -> None:
        """Replace the gathered values by those that the user may see, without the data for internal use.

        Args:
            gathered: one serialized value for each member.
        """
        self.group = dataclasses.replace(self.group, gathered=tuple(gathered))

    def _members(self) -> Iterator[RoundMember]:
        """All members, once for each phase."""
        return (member for state in self._states for member in state.members)

    @property
    def seen_not_finite(self) -> set[PeerID]:
        """Members that have sent this one values that are not finite."""
        return {member.peer_id for member in self._members() if member.sent_not_finite}

    @property
    def told_not_finite(self) -> set[PeerID]:
        """Members that others accuse of having sent values that are not finite."""
        return {member.peer_id for member in self._members() if member.told_not_finite}

    @property
    def result(self) -> RoundResult:
        """The result of all phases together."""
        assert self._phases, "no all-reduce has been run in this group"
        return RoundResult.of_phases(self._phases, self._main_weights or [self._phases[0].weights])

    async def check_values(self, tensors: Sequence[torch.Tensor], infos: Sequence[CompressionInfo]) -> bool:
        """Whether all values of this member are finite; if not, its weight in this step becomes 0.

        :meth:`all_reduce` checks its own tensors. Call this for other tensors from which those are computed.
        """
        if self.mode is AveragingMode.AUX:  # an auxiliary has no values of its own
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
        weight: float | None = None,
    ) -> RoundResult:
        """Replace tensors by their weighted mean over the members.

        Args:
            tensors: of the same shapes and types in all members; changed in place, unless this member is an auxiliary.
            infos: one for each tensor, for the codec.
            weight: this member's weight in this phase; default: its weight in the step. If some of the values are not
                finite, the weight is 0.

        Raises:
            AllreduceException: nothing was averaged; the tensors are as they were.
        """
        phase = len(self._phases)
        assert phase < MAX_PHASES, f"a step has at most {MAX_PHASES} phases"
        if not self._vectors:
            self._began_at = asyncio.get_running_loop().time()
        infos = infos or [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
        round_id = self.group.group_id + bytes([phase])
        shares = rescale_shares(self.group.shares, sum(tensor.numel() for tensor in tensors))
        group = dataclasses.replace(self.group, shares=shares)
        direct = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        working = tensors if direct else await run_in_worker(_copies_on_cpu, tensors)
        # All values are checked before the first byte is sent, so that no member contributes to only some parts.
        is_spoilt = not await self.check_values(working, infos)
        own_weight = 0.0 if is_spoilt else self.weight if weight is None else weight
        allreduce = AllReduce(
            round_id,
            group,
            self.own_index,
            working,
            infos,
            self._settings,
            own_weight,
            self._get_stub,
            is_spoilt,
            accuse=lambda member, what: self._accuse(group.peer_ids[member], what),
        )
        await self._claim_norms(allreduce)
        self._vectors.append((working, allreduce.vector))
        self._states.append(allreduce.state)
        current = Round(allreduce, self._note_stuck)
        result = await self._rounds.run(round_id, current, self._failed_members(), linger=self._settings.sender_timeout)
        self._phases.append(result)
        if weight is None:
            self._main_weights.append(result.weights)
        if not direct and self.mode is not AveragingMode.AUX:
            self._vectors.append((tensors, allreduce.vector))
            await run_in_worker(_copy_back, working, tensors)
        return result

    async def _claim_norms(self, allreduce: AllReduce) -> None:
        """Announce the norms of this member's shares, if the rule needs them. Call this before anything is sent."""
        if allreduce.book.is_needed_of(self.own_index):
            is_large = sum(allreduce.group.shares) > LARGE_VECTOR
            arguments = allreduce.vector, self.own_index
            norms = await run_in_worker(share_norms, *arguments) if is_large else share_norms(*arguments)
            allreduce.book.claim(self.own_index, norms, self._sign)

    def share_averaged(self, tensors: Sequence[torch.Tensor]) -> float:
        """The share of the values that holds an average by now, from 0 to 1, even if a phase was cut short.

        Args:
            tensors: the result is the largest share among the phases that work on any of these.
        """
        wanted = set(map(id, tensors))
        return max(
            (vector.share_averaged for each, vector in self._vectors if wanted & set(map(id, each))), default=0.0
        )

    def let_go(self) -> None:
        """Release the tensors, because the step is over."""
        self._vectors = [([], vector) for _, vector in self._vectors]

    def blame_slow_members(self) -> None:
        """Blame members for a round that ran out of time: the senders for which this member waited as a reducer.

        If there are none, blame the reducers whose averages had not arrived. Otherwise these, too, waited for senders.
        """
        self._is_cut_short = True
        for state in self._states:
            holding_up = [member for member in state.members if member.holds_up]
            for member in holding_up or [member for member in state.members if member.cut_off]:
                member.seen_failing, member.withheld_at = True, asyncio.get_running_loop().time()

    def tell(self, behaviour: PeerScores) -> None:
        """Report to ``behaviour`` how each of the other members has performed."""
        if self._vectors:
            others = [peer for index, peer in enumerate(self.group.peer_ids) if index != self.own_index]
            # With a small vector, some members have a share but get no part. These have proven nothing.
            reducers = {
                peer
                for _, vector in self._vectors
                for peer, parts in zip(self.group.peer_ids, vector.parts, strict=True)
                if parts
            }
            seconds = asyncio.get_running_loop().time() - self._began_at
            failing = {member.peer_id for member in self._members() if member.seen_failing}
            waited = {m.peer_id: m.withheld_at - self._began_at for m in self._members() if m.withheld_at is not None}
            behaviour.note_round(others, failing, reducers, waited, seconds)
            for peer in {member.peer_id for member in self._members() if member.holds_up and self._is_cut_short}:
                behaviour.note_delay(peer, seconds)

    def _failed_members(self) -> list[int]:
        failed = {peer for phase in self._phases for peer in phase.failed_peers}
        return [index for index, peer in enumerate(self.group.peer_ids) if peer in failed]


def _copies_on_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for tensor in tensors]


def _copy_back(working: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(working, tensors, strict=True):
            target.copy_(source)
