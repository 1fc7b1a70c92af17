"""The second half of a round: make sure that every member has every average, and finish what the dead have left undone.

From the beginning of the round each member keeps a call open to the *coordinator*, the first member that can be
connected to. Its end is how a death becomes known at once; messages now and then show that a silent member still lives.
When a member has exchanged all its parts it reports how many averages it holds from each reducer. When all living
members have reported, the coordinator either commits the round, or lets them fill the gaps:

- a part whose average some member already holds is fetched from it and passed on as it is;
- a part that nobody holds is reduced again from all living members, by the coordinator.

Then all of them report again. So all survivors end with the same values for every part. If the coordinator dies, the
next member in order takes over; members that have left the round by then say that it was committed.

With a quorum the round does not wait for everybody. When enough members have sent everything, the others get a while
longer; then the coordinator goes on as if those that are late were dead, but keeps the result for them. A coordinator
that is late itself resigns.
"""

from __future__ import annotations

import asyncio
import logging

from shoal.averaging.allreduce import AllReduce
from shoal.averaging.calls import PEER_FAILURES, REDIAL_PAUSE, reason_of
from shoal.averaging.coordination import Coordination
from shoal.averaging.following import Following, Resigned
from shoal.averaging.protocol import RoundMessage
from shoal.errors import DialError, StreamClosedError
from shoal.p2p import Call
from shoal.tasks import first_completed

logger = logging.getLogger(__name__)

_MAX_FOLLOW_ATTEMPTS = 3


class Completion:
    """Brings one round to its end. Lives as long as the round.

    Args:
        allreduce: the round's exchange of parts.
    """

    def __init__(self, allreduce: AllReduce) -> None:
        self.allreduce = allreduce
        self._following, self._coordination = Following(allreduce), Coordination(allreduce)
        self._quorum = allreduce.settings.quorum

    @property
    def closed_early(self) -> bool:
        """The round was over before all members had delivered."""
        return self._coordination.closed_early

    async def serve(self, call: Call, hello: RoundMessage, member: int) -> None:
        """Hold the call of a member that takes this one for the coordinator."""
        await self._coordination.serve(call, hello, member)

    async def run(self) -> None:
        """Return when every living member that is not late has every average that could be saved."""
        try:
            await self._run()
        finally:
            self._coordination.close()

    async def _run(self) -> None:
        for candidate in self.allreduce.coordinators:
            if candidate == self.allreduce.own_index:
                if await self._coordinate_unless_late():
                    return
            elif self._is_worth_following(candidate) and await self._follow_unless_silent(candidate):
                if not self.allreduce.late:  # members that could not reach the coordinator
                    await self._coordination.run(wait_for_absent=False)
                return
        await self.allreduce.exchanged.wait()

    async def _coordinate_unless_late(self) -> bool:
        """Coordinate the round; returns whether that was this member's to do, rather than to follow the others."""
        try:
            await self._coordination.run(wait_for_absent=True)
        except Resigned:
            is_late = True
        else:  # it comes alone: perhaps the others have finished, and have the result for it
            has_results = any(self.allreduce.vector.held)
            is_late = self._quorum is not None and bool(self.allreduce.failed) and not has_results
        if is_late:
            await self.allreduce.abandon()
        return not is_late

    def _is_worth_following(self, candidate: int) -> bool:
        """One that has failed may still have the result of a round that did not wait for this member."""
        is_late = candidate in self.allreduce.failed
        return not self.allreduce.silent[candidate].is_set() and (not is_late or self._quorum is not None)

    async def _follow_unless_silent(self, coordinator: int) -> bool:
        """If several fall silent, nobody waits for one after the other."""
        following = asyncio.ensure_future(self._follow(coordinator))
        await first_completed(following, self.allreduce.silent[coordinator].wait())
        return not following.cancelled() and following.result()

    async def _follow(self, coordinator: int) -> bool:
        """Take part under a coordinator; returns whether the round was committed."""
        reason, loop = "", asyncio.get_running_loop()
        deadline = loop.time() + self.allreduce.settings.sender_timeout
        for attempt in range(_MAX_FOLLOW_ATTEMPTS):
            await asyncio.sleep(attempt * REDIAL_PAUSE)
            if loop.time() >= deadline:
                break
            try:
                async with self.allreduce.get_stub(self.allreduce.group.peer_ids[coordinator]).rpc_complete() as call:
                    await self._following.run(call)
                    await call.send_end()
                return True
            except Resigned as e:
                self._coordination.closed_early, reason = True, str(e)  # it is going to ask for the result
                break
            except (StreamClosedError, DialError) as e:  # a connection may break without a death: try once more
                reason = reason_of(e)
            except PEER_FAILURES as e:
                reason = reason_of(e)
                break
        self.allreduce.member_failed(coordinator, reason)
        return False
