"""What a member sends to several others over long links, kept in step, so that all of it ends together.

All its connections share one uplink, and TCP does not share it equally. When only some of the others have something
left to come, the connections to them are too few, and too slow to speed up, to fill the link: it is half idle in the
end, while the round takes as long as the last of them. So nobody who gets ahead is sent more until the rest catch up.
Who makes no progress at all is not waited for, and every connection carries something now and then, or the other side
would take this one for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

# A member is ahead if it has this much less left to receive than the one that has most left (0.08: eight percent less).
# A smaller lead would hold back all members but one, and the connections to that one alone cannot fill the link.
MAX_LEAD = 0.08
# Nobody waits for a member that has not taken the next piece for so many seconds.
STALLED_SECONDS = 0.5
# For how long a connection is held back before it may send another piece.
MAX_WAIT_SECONDS = 1.0


class Pace:
    """Of one member in one round."""

    def __init__(self) -> None:
        self._runners: list[Runner] = []

    def add(self, share_left: Callable[[], float]) -> Runner:
        """From now on something is sent to one more of the others.

        Args:
            share_left: tells which share of that is left.
        """
        self._runners.append(Runner(self, share_left))
        return self._runners[-1]

    def least_left(self) -> float:
        """Who has less left is ahead."""
        stalled_since = asyncio.get_running_loop().time() - STALLED_SECONDS
        moving = [each.share_left() for each in self._runners if each.moved_at > stalled_since]
        return (1 - MAX_LEAD) * max(moving, default=0.0)

    def wake(self) -> None:
        """Let the connections to those go on that are not ahead any more."""
        waiting = [runner for runner in self._runners if runner.waiting]
        # This is called for each piece.
        least_left = self.least_left() if waiting else 0.0
        for runner in waiting:
            if runner.share_left() >= least_left:
                runner.go_on()


class Runner:
    """What is sent to one of the others, over any number of connections."""

    def __init__(self, pace: Pace, share_left: Callable[[], float]) -> None:
        self._pace, self.share_left = pace, share_left
        self.moved_at = asyncio.get_running_loop().time()
        self.waiting: list[asyncio.Future[None]] = []
        """Connections that are held back."""

    def note_progress(self) -> None:
        """It has been sent the next piece, or will get no more."""
        self.moved_at = asyncio.get_running_loop().time()
        self._pace.wake()

    def go_on(self) -> None:
        """Let every connection send one piece more, at least."""
        for turn in self.waiting:
            if not turn.done():
                turn.set_result(None)
        self.waiting = []

    async def wait_for_others(self) -> None:
        """Wait while it is ahead of them, but not too long."""
        if self.share_left() >= self._pace.least_left():
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_WAIT_SECONDS):
                    await turn
        finally:
            with suppress(ValueError):  # it has been woken
                self.waiting.remove(turn)
