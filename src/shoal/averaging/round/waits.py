"""How long members wait for another one alone: time that the round would not have taken without it.

Each member measures what it sees, and reports it at the end of the round. The coordinator tells all members the same
numbers, so that all draw the same conclusions. Otherwise some would wait for a slow member in the next round, and the
others would not let it in.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

NOTABLE_SECONDS = 1.0
"""Shorter waits are not told: rounds that take no longer end without the coordinator's word."""


class Missing(Enum):
    """What is missing of a member."""

    PARTS = auto()
    AVERAGES = auto()
    REPORT = auto()


class Waits:
    """A stopwatch for each member. It runs while something is missing of that member, and of no other one.

    Args:
        clock: tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The member that is waited for alone, with each of its duties.
        self._alone: dict[Missing, int] = {}
        self._since = clock()
        self.seconds: dict[int, float] = {}
        """By position of a member, as this one has seen it."""
        self._for_report: dict[int, float] = {}
        # By the member that reports.
        self._reports: dict[int, dict[int, float]] = {}
        self.agreed: dict[int, float] = {}
        """The same as all members were told."""

    def miss(self, members: Collection[int], what: Missing) -> None:
        """From now on something is missing of these members, and of no others."""
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
        """Those of its waits that a member reports."""
        return {member: seconds for member, seconds in self.seconds.items() if seconds >= NOTABLE_SECONDS}

    def hear(self, reporter: int, seconds: dict[int, float]) -> None:
        """Another member reports how long it has waited."""
        self._reports[reporter] = seconds

    def agree(self, own: int, reducers: Sequence[int]) -> None:
        """At the coordinator: conclude how long the group has waited for each member.

        That is as long as more than half of the others say, of those that reduce and have reported: only these know of
        whom parts were missing. For the last report only the coordinator has waited.

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
