"""Filling gaps after a death: which parts are missing where, and one attempt to get them there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.averaging.allreduce.parts import Part
from shoal.averaging.allreduce.reducer import PartReducer
from shoal.averaging.calls import PEER_FAILURES, Line, PartKey
from shoal.averaging.messages import RoundKind, RoundMessage
from shoal.tasks import all_of, cancel_and_wait, first_completed

if TYPE_CHECKING:
    from shoal.averaging.allreduce.exchange import AllReduce

logger = logging.getLogger(__name__)

Ranges = list[tuple[int, int, int]]
"""Parts of a reducer: the reducer, the first one, the end."""


@dataclass
class Plan:
    """How the gaps of living members are filled."""

    sources: dict[PartKey, int] = field(default_factory=dict)
    """Averages that exist, and who holds them."""
    again: list[PartKey] = field(default_factory=list)
    """Parts that have to be reduced again, from all living senders."""
    missing: dict[int, Ranges] = field(default_factory=dict)
    """What each member lacks."""

    def parts_missing(self, member: int) -> list[PartKey]:
        return [(r, k) for r, start, stop in self.missing.get(member, []) for k in range(start, stop)]


def make_plan(parts: Sequence[Sequence[Part]], held: Mapping[int, Sequence[int]], own: int) -> Plan:
    """What living senders lack, and where it comes from.

    Args:
        parts: of each reducer.
        held: how many of them each living sender holds.
        own: the member that plans; it is preferred as a source.
    """
    plan = Plan()
    if len(held) < 2:  # nobody to average with
        return plan
    for reducer, theirs in enumerate(parts):
        counts = {member: held[member][reducer] for member in sorted(held)}
        lacking = [member for member, count in counts.items() if count < len(theirs)]
        if not lacking:
            continue
        most = max(counts.values())
        best = own if counts.get(own) == most else max(counts, key=lambda member: counts[member])
        for index in range(min(counts[member] for member in lacking), len(theirs)):
            if index < most:
                plan.sources[reducer, index] = best
            else:
                plan.again.append((reducer, index))
        for member in lacking:
            plan.missing.setdefault(member, []).append((reducer, counts[member], len(theirs)))
    return plan


class Recovery:
    """One attempt to fill gaps, at the coordinator."""

    def __init__(self, allreduce: AllReduce, plan: Plan, lines: dict[int, Line], weights: dict[int, float]) -> None:
        self._vector, self._own, self._plan, self._lines = allreduce.vector, allreduce.own_index, plan, lines
        roster = allreduce.roster
        senders = [member for member in lines if member in roster.senders]
        parts = [self._vector.parts[reducer][index] for reducer, index in plan.again]
        local = self._vector.sound_values if roster.is_sender else None
        self._reducer = PartReducer(parts, senders, local, self._own, weights, roster.seen_not_finite.add)
        self._position = {key: position for position, key in enumerate(plan.again)}
        self._senders = senders
        loop = asyncio.get_running_loop()
        self._fetched: dict[PartKey, asyncio.Future[torch.Tensor | None]] = {
            key: loop.create_future() for key in plan.sources
        }
        self._averages: dict[PartKey, torch.Tensor | None] = {}
        self._failed = asyncio.Event()

    def member_failed(self, member: int) -> None:
        """A member of this attempt is dead: the attempt is over."""
        if member in self._lines:
            self._failed.set()

    def is_average(self, key: PartKey) -> bool:
        """Whether a part that comes is an average that its sender holds."""
        return key in self._fetched

    def deliver(self, member: int, key: PartKey, values: torch.Tensor | None) -> None:
        """A part has come."""
        waiting = self._fetched.get(key)
        if waiting is not None and self._plan.sources[key] == member:
            if not waiting.done():
                waiting.set_result(values)
        elif key in self._position:
            self._reducer.deliver(member, self._position[key], values)

    async def run(self) -> bool:
        """Fill the gaps; returns whether all of them are filled."""
        work: list[Coroutine[Any, Any, None]] = [self._serve_member(member) for member in self._lines]
        if self._own in self._plan.missing:
            work.append(self._fill_own())
        everything = asyncio.ensure_future(all_of(*work))
        try:
            await first_completed(asyncio.shield(everything), self._failed.wait())
            if not everything.done() or self._failed.is_set():
                return False
            await everything
            return True
        except PEER_FAILURES as e:  # a member that is dying: its handler notices, too
            logger.debug("could not fill all gaps: %r", e)
            return False
        finally:
            await cancel_and_wait(everything)

    async def _serve_member(self, member: int) -> None:
        line = self._lines[member]
        wanted = [key for key, source in self._plan.sources.items() if source == member]
        wanted += self._plan.again if member in self._senders else []
        assignment = RoundMessage(
            kind=RoundKind.ASSIGNMENT, send=_as_ranges(wanted), expect=self._plan.missing.get(member, [])
        )
        await line.send(assignment)
        for key in self._plan.parts_missing(member):
            average = await self._average(key)
            part = self._vector.parts[key[0]][key[1]]
            await line.send_part(key, None if average is None else part.compress(average))

    async def _fill_own(self) -> None:
        for key in self._plan.parts_missing(self._own):
            self._vector.take(*key, await self._average(key))

    async def _average(self, key: PartKey) -> torch.Tensor | None:
        if key not in self._averages:
            self._averages[key] = await self._obtain(key)
        return self._averages[key]

    async def _obtain(self, key: PartKey) -> torch.Tensor | None:
        if key in self._position:
            return await self._reducer.peek(self._position[key])
        # Whoever holds the average has already mixed it with its own values.
        if self._vector.alpha != 1:
            return None
        if self._plan.sources[key] == self._own:
            return self._vector.values(self._vector.parts[key[0]][key[1]]) if self._vector.has_average(*key) else None
        return await asyncio.shield(self._fetched[key])


def _as_ranges(keys: list[PartKey]) -> Ranges:
    """Parts as few ranges, in order."""
    ranges: Ranges = []
    for reducer, index in sorted(keys):
        if ranges and ranges[-1][0] == reducer and ranges[-1][2] == index:
            ranges[-1] = (reducer, ranges[-1][1], index + 1)
        else:
            ranges.append((reducer, index, index + 1))
    return ranges
