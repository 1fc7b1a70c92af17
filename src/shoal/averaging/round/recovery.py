"""Recovery after a death: which averages are missing at which members, and one attempt to deliver them.

If some member holds the average of a part, the coordinator fetches it and passes it on unchanged. If no member holds
it, the coordinator reduces the part again, from the values of all living senders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.messages import PEER_FAILURES, PartKey, RoundKind, RoundMessage, SharedCall
from shoal.averaging.round.parts import Part
from shoal.averaging.round.reducer import PartReducer
from shoal.base.tasks import all_of, cancel_and_wait, first_completed

if TYPE_CHECKING:
    from shoal.averaging.round.exchange import AllReduce


logger = logging.getLogger(__name__)

Ranges = list[tuple[int, int, int]]
"""Ranges of parts: the reducer, the first index, and the index after the last one."""


@dataclass
class Plan:
    """How to fill the gaps of living members."""

    sources: dict[PartKey, int] = field(default_factory=dict)
    """By part: a member that holds its average."""
    again: list[PartKey] = field(default_factory=list)
    """Parts to reduce again, from all living senders."""
    missing: dict[int, Ranges] = field(default_factory=dict)
    """By member: the averages that it lacks."""

    def parts_missing(self, member: int) -> list[PartKey]:
        return [(r, k) for r, start, stop in self.missing.get(member, []) for k in range(start, stop)]


def make_plan(
    parts: Sequence[Sequence[Part]], held: Mapping[int, Sequence[int]], own: int, *, may_reduce: bool = True
) -> Plan:
    """Plan which averages living senders lack, and where these come from.

    Args:
        parts: the parts of each reducer.
        held: by living sender, how many parts of each reducer it holds, from the first one on.
        own: the member that plans; it is preferred as a source.
        may_reduce: whether parts that nobody holds are reduced again; otherwise local values stay.
    """
    plan = Plan()
    if len(held) < 2:  # nobody to average with
        return plan
    for reducer, theirs in enumerate(parts):
        counts = {member: held[member][reducer] for member in sorted(held)}
        lacking = [member for member, count in counts.items() if count < len(theirs)]
        if not lacking:
            continue
        # Averages are held in order, so the member that holds most of them holds all that any member holds.
        most = max(counts.values())
        best = own if counts.get(own) == most else max(counts, key=lambda member: counts[member])
        for index in range(min(counts[member] for member in lacking), len(theirs)):
            if index < most:
                plan.sources[reducer, index] = best
            elif may_reduce:
                plan.again.append((reducer, index))
        for member in lacking:
            plan.missing.setdefault(member, []).append((reducer, counts[member], len(theirs)))
    return plan


class Recovery:
    """One attempt to fill gaps, at the coordinator.

    Args:
        allreduce: the round's exchange of parts.
        plan: what is missing where.
        calls: by member, its call to this coordinator.
        weights: by member, this one included.
    """

    def __init__(
        self, allreduce: AllReduce, plan: Plan, calls: dict[int, SharedCall], weights: dict[int, float]
    ) -> None:
        self._vector, self._own, self._plan, self._calls = allreduce.vector, allreduce.own_index, plan, calls
        roster = allreduce.roster
        senders = [member for member in calls if member in roster.senders]
        parts = [self._vector.parts[reducer][index] for reducer, index in plan.again]
        local = self._vector.sound_values if roster.is_sender else None
        on_not_finite, combiner = roster.seen_not_finite.add, allreduce.book.make_combiner()
        self._reducer = PartReducer(parts, senders, local, self._own, weights, on_not_finite, combiner)
        self._position = {key: position for position, key in enumerate(plan.again)}
        self._senders = senders
        loop = asyncio.get_running_loop()
        self._fetched: dict[PartKey, asyncio.Future[torch.Tensor | None]] = {
            key: loop.create_future() for key in plan.sources
        }
        self._averages: dict[PartKey, torch.Tensor | None] = {}
        self._failed = asyncio.Event()

    def member_failed(self, member: int) -> None:
        """End the attempt if a member that takes part in it has died: the plan counts on its parts."""
        if member in self._calls:
            self._failed.set()

    def is_average(self, key: PartKey) -> bool:
        """Whether an incoming part is a finished average, rather than values to reduce."""
        return key in self._fetched

    def deliver(self, member: int, key: PartKey, values: torch.Tensor | None) -> None:
        """Take a part that a member has sent for this plan."""
        waiting = self._fetched.get(key)
        if waiting is not None and self._plan.sources[key] == member:
            if not waiting.done():
                waiting.set_result(values)
        elif key in self._position:
            self._reducer.deliver(member, self._position[key], values)

    async def run(self) -> bool:
        """Fill the gaps; returns whether all of them are filled."""
        work: list[Coroutine[Any, Any, None]] = [self._serve_member(member) for member in self._calls]
        if self._own in self._plan.missing:
            work.append(self._fill_own())
        everything = asyncio.ensure_future(all_of(*work))
        try:
            await first_completed(asyncio.shield(everything), self._failed.wait())
            if not everything.done() or self._failed.is_set():
                return False
            await everything
            return True
        except PEER_FAILURES as e:  # a member is dying; the handler of its call gives it up
            logger.debug("could not fill all gaps: %r", e)
            return False
        finally:
            await cancel_and_wait(everything)
            await self._reducer.close()

    async def _serve_member(self, member: int) -> None:
        shared = self._calls[member]
        wanted = [key for key, source in self._plan.sources.items() if source == member]
        wanted += self._plan.again if member in self._senders else []
        assignment = RoundMessage(
            kind=RoundKind.ASSIGNMENT, send=_as_ranges(wanted), expect=self._plan.missing.get(member, [])
        )
        await shared.send(assignment)
        for key in self._plan.parts_missing(member):
            average = await self._average(key)
            part = self._vector.parts[key[0]][key[1]]
            await shared.send_part(key, None if average is None else part.returned.compress(average))

    async def _fill_own(self) -> None:
        for key in self._plan.parts_missing(self._own):
            self._vector.take(*key, await self._average(key))

    async def _average(self, key: PartKey) -> torch.Tensor | None:
        if key not in self._averages:
            self._averages[key] = await self.obtain(key)
        return self._averages[key]

    async def obtain(self, key: PartKey) -> torch.Tensor | None:
        """Reduce a part again or fetch its average; ``None``: there is none."""
        if key in self._position:
            return await self._reducer.peek(self._position[key])
        # With alpha below 1 a member mixes the average with its own values at once, so it cannot pass the average on.
        if self._vector.alpha != 1 or key not in self._plan.sources:
            return None
        if self._plan.sources[key] == self._own:
            return self._vector.values(self._vector.parts[key[0]][key[1]]) if self._vector.has_average(*key) else None
        return await asyncio.shield(self._fetched[key])


def _as_ranges(keys: list[PartKey]) -> Ranges:
    """Parts as the fewest ranges, in order."""
    ranges: Ranges = []
    for reducer, index in sorted(keys):
        if ranges and ranges[-1][0] == reducer and ranges[-1][2] == index:
            ranges[-1] = (reducer, ranges[-1][1], index + 1)
        else:
            ranges.append((reducer, index, index + 1))
    return ranges
