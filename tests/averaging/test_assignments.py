"""What a coordinator can make a member do at the end of a round."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

from shoal.averaging.messages import Assignment, Commit, Greeting, RoundAlive, RoundMessage
from shoal.averaging.round.finish import Participant

ASSIGNMENTS = 1000


class DeafCoordinator:
    """The member's call to a coordinator that gives one assignment after another, and takes no answers."""

    remote = "coordinator"

    def __init__(self) -> None:
        self.most_tasks, self._said = 0, self._talk()
        self.hears = asyncio.Event()

    def _talk(self):
        yield RoundAlive()
        for _ in range(ASSIGNMENTS):
            yield Assignment()
        yield Commit(weights=[1.0])

    async def receive(self, _: type) -> RoundMessage:
        await asyncio.sleep(0)
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        return next(self._said)

    async def send(self, message: RoundMessage, *_: object, end: bool = False) -> None:
        if not isinstance(message, Greeting):
            await self.hears.wait()


async def test_a_flood_of_assignments_costs_no_memory() -> None:
    allreduce, call = MagicMock(), DeafCoordinator()
    allreduce.settings.sender_timeout, allreduce.settings.quorum = 600.0, None
    allreduce.exchanged = asyncio.Event()
    allreduce.vector.held = [0]
    allreduce.group.peer_ids, allreduce.group.group_size = [call.remote], 1
    allreduce.group.limited = lambda index, weight: weight
    allreduce.book.report.return_value = allreduce.book.own.norms = []
    allreduce.book.own.statement, allreduce.state.members = b"", []
    await Participant(allreduce).run(call)  # type: ignore[arg-type]
    assert call.most_tasks < 10
