"""A group at work: one or more all-reduces, one after another, among the same members."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from shoal.averaging.allreduce import AllReduce, AllReduceSettings, AveragingMode
from shoal.averaging.control import RoundResult
from shoal.averaging.finite import name_not_finite
from shoal.averaging.group_info import GroupInfo
from shoal.averaging.load_balancing import rescale_shares
from shoal.averaging.round import Round, Rounds
from shoal.averaging.vector import RoundVector
from shoal.compression import CompressionInfo
from shoal.p2p import PeerID, StubBase
from shoal.tasks import run_in_worker

MAX_PHASES = 256
LARGE_VECTOR = 2**20
"""To look at so many values takes long enough to do it in a worker."""


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
        self.group, self.weight = group, weight
        self.own_index = group.peer_ids.index(own)
        self._settings, self._rounds, self._get_stub = settings, rounds, get_stub
        self.not_finite: str | None = None
        """Which of this member's tensors has values that are not finite, in words."""
        self.seen_not_finite: set[PeerID] = set()
        """Members that have sent this one values that are not finite."""
        self.told_not_finite: set[PeerID] = set()
        """Members of which others say so."""
        self._phases: list[RoundResult] = []
        self._vectors: list[tuple[Sequence[torch.Tensor], RoundVector]] = []
        """What each phase works on, and how far it is."""
        self._main_weights: list[tuple[float, ...]] = []
        """Of all members, in the phases that have the weights of the step."""

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
        group = dataclasses.replace(self.group, group_id=round_id, shares=shares)
        direct = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        working = tensors if direct else await run_in_worker(_copies_on_cpu, tensors)
        is_spoilt = not await self.check_values(working, infos)  # all of it, before the first byte is sent
        own_weight = 0.0 if is_spoilt else self.weight if weight is None else weight
        allreduce = AllReduce(group, self.own_index, working, infos, settings, own_weight, self._get_stub, is_spoilt)
        self._vectors.append((working, allreduce.vector))
        try:
            result = await self._rounds.run(
                round_id, Round(allreduce), self._failed_members(), linger=settings.sender_timeout
            )
        finally:
            self.seen_not_finite.update(group.peer_ids[member] for member in allreduce.seen_not_finite)
            self.told_not_finite.update(group.peer_ids[member] for member in allreduce.told_not_finite)
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
