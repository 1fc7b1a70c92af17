"""The calls of two members of a round, and how they begin anew: a broken connection is not a death.

All calls between the two belong to one *generation*. When one of them breaks before its time, the member that notices
it cuts all others, because they take the same way, and begins the next generation::

    sender ── BeginReduce: the generation, and which parts and averages, or slices, have not come here ──► reducer
    sender ◄── Resume: which parts and averages have not come there ── reducer

From then on both send what the other one lacks, and nothing else. The lists are made when all older calls have ended,
so nothing comes twice, and nothing is lost. Who hears of a newer generation from the other member follows at once; a
call of an older one is cut. If both make calls, each begins its own ones anew.

A reducer can only wait for a sender to call again. It asks whether the sender lives, and tells it what is broken: if
its machine answers that the program is gone, the sender has failed at once, as it has if it answers that it has given
the reducer up. Otherwise it has ``RESUME_SECONDS`` to come back, and ``RETURN_SECONDS`` if it answers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from shoal.averaging.redialling import REDIAL_PAUSE, RESUME_SECONDS
from shoal.averaging.round.traffic import Traffic
from shoal.averaging.round.watchdog import MemberCalls
from shoal.base.tasks import cancel_and_wait
from shoal.errors import ShoalError, StreamClosedError
from shoal.p2p import StubBase

# The exchange of two members begins anew at most so often in one round.
MAX_RESUMES = 16


class Superseded(ShoalError):
    """The calls of a generation were cut because the next one begins."""


class Pair:
    """The calls between this member and another one.

    Args:
        traffic: what travels on them.
        is_awaited: tells whether the other member still has parts to deliver here.
    """

    def __init__(self, traffic: Traffic, is_awaited: Callable[[], bool]) -> None:
        self.traffic, self._is_awaited = traffic, is_awaited
        self.generation = 0
        """How often the calls have begun anew."""
        self.lost = -1
        """The newest generation of which a call has broken."""
        self.returned = asyncio.Event()
        """The other member has made a call of a newer generation than the lost one."""
        self.is_calling = False
        """This member makes calls to the other one, and makes them again if they break."""
        self._came_at = -math.inf
        self.lines = MemberCalls()
        """The calls of both."""
        self.link = MemberCalls()
        """The call with which one of both follows the other one as its coordinator."""
        # What is done on the calls of the present generation.
        self._work: dict[asyncio.Future[None], None] = {}
        self._cutting: asyncio.Future[None] | None = None

    def dial_anew(self, stub: StubBase, stripes: int) -> None:
        """Let no call go over the former connections; where relays arrange new ones, dial all that are needed now.

        Args:
            stub: calls the other member.
            stripes: the number of calls that this member will make to it, if it makes any.
        """
        if not self.lines.are_arranged:
            stub.dial_anew()
        else:  # one is for the question whether the other member lives, which comes first
            stub.replace_arranged(1 + (stripes if self.is_calling else 0))

    def note_life(self, *, comes_anew: bool) -> None:
        """The other member lives.

        Args:
            comes_anew: it shows that over a new connection, while another one has broken.
        """
        now = asyncio.get_running_loop().time()
        self.traffic.heard_at, self._came_at = now, now if comes_anew else self._came_at

    def has_come_after(self, moment: float) -> bool:
        return self._came_at > moment

    def is_heard(self) -> bool:
        heard_at = max(self.traffic.heard_at, self.lines.heard_at, self.link.heard_at)
        return heard_at > asyncio.get_running_loop().time() - RESUME_SECONDS

    async def run(self, generation: int, work: Coroutine[Any, Any, None]) -> None:
        """Do something on a call of a generation; it is cut when the next generation begins.

        Raises:
            Superseded: it was cut.
        """
        if generation != self.generation:
            work.close()
            raise Superseded("the exchange goes on over other connections")
        task = asyncio.ensure_future(work)
        self._work[task] = None
        try:
            await asyncio.wait([task])
        finally:
            await cancel_and_wait(task)
            self._work.pop(task, None)
        if task.cancelled():
            raise Superseded("the exchange goes on over other connections")
        task.result()

    def advance(self, generation: int) -> None:
        """Cut all calls, unless they are of this generation or of a newer one."""
        if generation > self.generation:
            self.generation = generation
            self._cutting = asyncio.ensure_future(self._cut([*self._work], self._cutting))

    async def _cut(self, work: list[asyncio.Future[None]], before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await before
        await cancel_and_wait(*work)
        self.traffic.begin_anew(own=self.is_calling, others=self._is_awaited())

    async def settle(self) -> int:
        """Wait until all calls of older generations have ended; returns the generation whose calls may begin."""
        while True:
            generation = self.generation
            if self._cutting is not None:
                await asyncio.shield(self._cutting)
            if generation == self.generation:
                return generation

    async def keep_calling(
        self, make_calls: Callable[[int], Coroutine[Any, Any, None]], on_break: Callable[[int], bool]
    ) -> None:
        """Make calls to the other member; make them again in the next generation when they break.

        Args:
            make_calls: makes the calls of a generation, and returns when they have ended.
            on_break: called with the generation of which a call has broken; returns whether to go on. It must have
                begun the next generation then.

        Raises:
            P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError: the other member failed.
        """
        self.is_calling = True
        try:
            while True:
                generation = await self.settle()
                try:
                    await self.run(generation, make_calls(generation))
                    return
                except Superseded:
                    continue
                except StreamClosedError:
                    if not on_break(generation):
                        raise
                    if generation:  # not the first break: perhaps the way to the other member does not work yet
                        await asyncio.sleep(REDIAL_PAUSE)
        finally:
            self.is_calling = False

    async def close(self) -> None:
        """Begin nothing more."""
        if self._cutting is not None:
            await cancel_and_wait(self._cutting)
