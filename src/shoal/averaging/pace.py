"""What a member sends to several others over long links, kept in step, so that all of it ends together.

All its connections share one uplink, and TCP does not share it equally. When only some of the others have something
left to come, the connections to them are too few, and too slow to speed up, to fill the link: it is half idle in the
end, while the round takes as long as the last of them. So nobody who gets ahead is sent more until the rest catch up.
Who makes no progress at all is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from shoal.clock import timeout

MAX_LEAD = 0.05
"""Who has so much less left than the one who has most left, as a share of that, is ahead."""
STALLED_SECONDS = 0.5
"""Who has not got the next piece for so long is not waited for."""


class Pace:
    """Of one member in one round."""

    def __init__(self) -> None:
        self.runners: list[Runner] = []
        self.progress = asyncio.Event()
        """Set for a moment when those that are ahead may go on."""

    def add(self, share_left: Callable[[], float]) -> Runner:
        """From now on something is sent to one more of the others.

        Args:
            share_left: tells which share of that is left.
        """
        self.runners.append(Runner(self, share_left))
        return self.runners[-1]


class Runner:
    """What is sent to one of the others, over any number of connections."""

    def __init__(self, pace: Pace, share_left: Callable[[], float]) -> None:
        self._pace, self.share_left = pace, share_left
        self._moved_at = asyncio.get_running_loop().time()

    def note_progress(self) -> None:
        """It has been sent the next piece, or will get no more."""
        self._moved_at = asyncio.get_running_loop().time()
        if not self.share_left() or not self._is_ahead():
            self._pace.progress.set()
            self._pace.progress.clear()

    async def wait_for_others(self) -> None:
        """Wait while it is ahead of them."""
        while self._is_ahead():
            with suppress(asyncio.TimeoutError, TimeoutError):
                async with timeout(STALLED_SECONDS):
                    await self._pace.progress.wait()

    def _is_ahead(self) -> bool:
        stalled_since = asyncio.get_running_loop().time() - STALLED_SECONDS
        moving = (each.share_left() for each in self._pace.runners if each._moved_at > stalled_since)
        return self.share_left() < (1 - MAX_LEAD) * max(moving, default=0.0)
