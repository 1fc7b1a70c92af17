"""The pace of a member that sends to several others: a receiver that is ahead waits for the rest.

All connections of a member share one uplink, and TCP does not share it equally. Some receivers would be done early. The
few connections to the rest cannot fill the link and speed up slowly, so the link would be half idle, and the round
takes as long as its last receiver. So a receiver that is ahead is held back until the others catch up. Nobody waits for
a receiver that makes no progress at all, or to which connections have broken. And a connection that is held back still
carries something now and then, or the other side would take this one for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

# A member is ahead if it has this much less left to receive than the one that has most left (0.08: eight percent less).
# A smaller lead would hold back all members but one, and the connections to that one alone cannot fill the link.
MAX_LEAD = 0.08
# Nobody waits for a receiver to which no piece could be sent for so many seconds.
STALLED_SECONDS = 0.5
# A connection is held back for at most so many seconds before it may send another piece.
MAX_WAIT_SECONDS = 1.0


class FlowControl:
    """Keeps the receivers of one member in step. Lives for one round."""

    def __init__(self) -> None:
        self._runners: list[Runner] = []

    def add(self, share_left: Callable[[], float]) -> Runner:
        """Add a receiver.

        Args:
            share_left: tells which share of its data has not been sent yet, from 0 to 1.
        """
        self._runners.append(Runner(self, share_left))
        return self._runners[-1]

    def least_left(self) -> float:
        """The limit: a receiver that has a smaller share left is ahead."""
        stalled_since = asyncio.get_running_loop().time() - STALLED_SECONDS
        moving = [each.share_left() for each in self._runners if each.is_waited_for and each.moved_at > stalled_since]
        return (1 - MAX_LEAD) * max(moving, default=0.0)

    def wake(self) -> None:
        """Let connections go on whose receivers are not ahead any more."""
        waiting = [runner for runner in self._runners if runner.waiting]
        # This runs for every piece, so the limit is computed only if a connection waits.
        least_left = self.least_left() if waiting else 0.0
        for runner in waiting:
            if runner.share_left() >= least_left:
                runner.go_on()


class Runner:
    """One receiver in a pace: what is sent to it, over any number of connections."""

    def __init__(self, pace: FlowControl, share_left: Callable[[], float]) -> None:
        self._pace, self.share_left = pace, share_left
        self.moved_at = asyncio.get_running_loop().time()
        self.is_waited_for = True
        self.waiting: list[asyncio.Future[None]] = []
        """Connections that are held back."""

    def note_progress(self) -> None:
        """Note that the receiver got the next piece, or will get no more."""
        self.moved_at = asyncio.get_running_loop().time()
        self._pace.wake()

    def fall_behind(self) -> None:
        """Note that the connections to the receiver have broken: nobody waits for it any more.

        New connections are slow at first. If the others waited for them, the link would be half idle until then.
        """
        self.is_waited_for = False
        self._pace.wake()

    def go_on(self) -> None:
        """Let every waiting connection send at least one more piece."""
        for turn in self.waiting:
            if not turn.done():
                turn.set_result(None)
        self.waiting = []

    async def wait_for_others(self) -> None:
        """Wait while this receiver is ahead of the others, but at most ``MAX_WAIT_SECONDS``."""
        if self.share_left() >= self._pace.least_left():
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(MAX_WAIT_SECONDS):
                    await turn
        finally:
            with suppress(ValueError):  # go_on has taken it off the list
                self.waiting.remove(turn)
