"""Recovery after a death: one attempt to deliver the averages that members lack.

If some member holds the average of a part, the coordinator fetches it and passes it on unchanged. If no member holds
it, the coordinator reduces the part again, from the values of all living senders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import torch

from shoal.averaging.messages import PEER_FAILURES, Assignment, PartKey, Ranges, SharedCall
from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.reducer import PartReducer
from shoal.averaging.round.state import Plan
from shoal.base.tasks import all_of, cancel_and_wait, first_completed

logger = logging.getLogger(__name__)


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
        state = allreduce.state
        senders = [member for member in calls if state.members[member].is_sender]
        parts = [self._vector.parts[reducer][index] for reducer, index in plan.again]
        local = self._vector.sound_values if state.own.is_sender else None
        combiner = allreduce.book.make_combiner()
        self._reducer = PartReducer(parts, senders, local, self._own, weights, allreduce.note_not_finite, combiner)
        self._position = {key: position for position, key in enumerate(plan.again)}
        self._senders = senders
        loop = asyncio.get_running_loop()
        self._fetched: dict[PartKey, asyncio.Future[torch.Tensor | None]] = {
            key: loop.create_future() for key in plan.sources
        }
        self._averages: dict[PartKey, torch.Tensor | None] = {}
        self._failed = asyncio.Event()

    def call_off(self) -> None:
        """End the attempt: a member that takes part in it has died, and the plan counts on its parts."""
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
        await shared.send(Assignment(_as_ranges(wanted), self._plan.missing.get(member, [])))
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
