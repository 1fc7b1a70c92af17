"""How long a member waits for another one alone: time that the round would not have taken without it."""

from __future__ import annotations

from collections.abc import Callable, Collection


class Waits:
    """A stopwatch for each member. It runs while only that member's parts are missing, or only its averages.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The member that is waited for alone, with its parts and with its averages.
        self._alone: dict[bool, int] = {}
        self._since = clock()
        self.seconds: dict[int, float] = {}
        """By position of a member."""

    def miss(self, members: Collection[int], *, averages: bool) -> None:
        """From now on these members are missing, with their averages or with their parts."""
        alone = next(iter(members)) if len(members) == 1 else None
        if alone == self._alone.get(averages):
            return
        now = self._clock()
        for member in {*self._alone.values()}:
            self.seconds[member] = self.seconds.get(member, 0.0) + now - self._since
        self._since = now
        if alone is None:
            del self._alone[averages]
        else:
            self._alone[averages] = alone
