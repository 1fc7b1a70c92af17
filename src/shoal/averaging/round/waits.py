"""How long members wait for one member alone: time that the round would have saved without it.

Each member measures its own waits, and reports them at the end of the round. The coordinator tells all members the same
numbers, so that all draw the same conclusions. Otherwise some would wait for a slow member in the next round, and
others would not let it in.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

NOTABLE_SECONDS = 1.0
"""Shorter waits are not reported (chosen), so that short rounds can end without the coordinator."""


class Missing(Enum):
    """What a member still owes."""

    PARTS = auto()
    AVERAGES = auto()
    REPORT = auto()


class Waits:
    """A stopwatch for each member. It runs while that member, and no other, owes something.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By kind of debt: the member that is waited for alone.
        self._alone: dict[Missing, int] = {}
        self._since = clock()
        self.seconds: dict[int, float] = {}
        """By position of a member: the wait that this one has measured."""
        self._for_report: dict[int, float] = {}
        # By reporting member: its waits.
        self._reports: dict[int, dict[int, float]] = {}
        self.agreed: dict[int, float] = {}
        """The waits that the coordinator has told all members."""

    def miss(self, members: Collection[int], what: Missing) -> None:
        """Note that from now on these members, and no others, owe this."""
        alone = next(iter(members)) if len(members) == 1 else None
        if alone == self._alone.get(what):
            return
        now = self._clock()
        for member in {*self._alone.values()}:
            is_for_report = self._alone == {Missing.REPORT: member}
            seconds = self._for_report if is_for_report else self.seconds
            seconds[member] = seconds.get(member, 0.0) + now - self._since
        self._since = now
        if alone is None:
            self._alone.pop(what, None)
        else:
            self._alone[what] = alone

    @property
    def notable(self) -> dict[int, float]:
        """The waits that are long enough to report."""
        return {member: seconds for member, seconds in self.seconds.items() if seconds >= NOTABLE_SECONDS}

    def hear(self, reporter: int, seconds: dict[int, float]) -> None:
        """Take another member's report of its waits."""
        self._reports[reporter] = seconds

    def agree(self, own: int, reducers: Sequence[int]) -> None:
        """At the coordinator: conclude how long the group has waited for each member.

        This is the lower median of what the other reducers have reported, because only reducers know whose parts were
        missing. The coordinator adds its wait for the last report, because no other member waits for that.

        Args:
            own: its position.
            reducers: positions of members that reduce parts.
        """
        self.miss((), Missing.REPORT)
        told = self._reports | {own: self.seconds}
        reports = {reducer: told[reducer] for reducer in reducers if reducer in told}
        named = {member for report in reports.values() for member in report} | self._for_report.keys()
        for member in sorted(named):
            said = [report.get(member, 0.0) for reporter, report in reports.items() if reporter != member]
            seconds = (statistics.median_low(said) if said else 0.0) + self._for_report.get(member, 0.0)
            if seconds >= NOTABLE_SECONDS:
                self.agreed[member] = seconds
