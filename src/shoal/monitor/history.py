"""Figures over time in little memory: the last minutes second by second, the last hours and the last day more coarsely.

Each level has means over periods of one length. A value goes into all levels at once, so nothing is moved or recomputed
later.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence

MAX_NAMES = 48
"""The most figures; more are left out. Chosen: a day then takes about a megabyte."""
LEVELS = ((1.0, 600), (10.0, 720), (60.0, 1440))
"""Seconds per point, and the number of points: ten minutes, two hours, and a day. Chosen."""


class _Level:
    """Means over periods of one length.

    Args:
        seconds: length of a period.
        points: how many periods to keep.
    """

    def __init__(self, seconds: float, points: int) -> None:
        self.seconds = seconds
        self.rows: deque[array[float]] = deque(maxlen=points)
        """For each period, its beginning and then the means of the figures that existed then."""
        self._period = -math.inf
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, now: float, values: Sequence[float]) -> None:
        period = now // self.seconds
        if period != self._period:
            self.rows.extend(self.present())
            self._period, self._sums, self._counts = period, [], []
        new = len(values) - len(self._sums)
        self._sums += [0.0] * new
        self._counts += [0] * new
        for index, value in enumerate(values):
            if math.isfinite(value):
                self._sums[index] += value
                self._counts[index] += 1

    def present(self) -> list[array[float]]:
        """The row of the present period, if there is one."""
        if math.isinf(self._period):
            return []
        means = (total / count if count else math.nan for total, count in zip(self._sums, self._counts, strict=True))
        return [array("d", [self._period * self.seconds, *means])]


class History:
    """Several figures over a day.

    Args:
        names: of the figures that exist from the beginning; others may be added.
    """

    def __init__(self, names: Sequence[str], levels: Sequence[tuple[float, int]] = LEVELS) -> None:
        self.names = tuple(names)
        self.spans = [seconds * points for seconds, points in levels]
        """The seconds that each level reaches back."""
        self._levels = [_Level(seconds, points) for seconds, points in levels]

    def add(self, now: float, values: Mapping[str, float]) -> None:
        """Add the present values; missing values, and those that are not finite, leave a gap."""
        self.names += tuple([name for name in values if name not in self.names][: MAX_NAMES - len(self.names)])
        row = [values.get(name, math.nan) for name in self.names]
        for level in self._levels:
            level.add(now, row)

    def columns(self, level: int = 0) -> dict[str, list[float | None]]:
        """The points of one level by name, the oldest first, with ``time`` before all others; a gap is ``None``."""
        rows = [*self._levels[level].rows, *self._levels[level].present()]

        def column(index: int) -> list[float | None]:
            values = [row[index] if index < len(row) else math.nan for row in rows]
            return [None if math.isnan(value) else value for value in values]

        return {name: column(index) for index, name in enumerate(("time", *self.names))}

    @property
    def nbytes(self) -> int:
        """Memory of all points."""
        return sum(8 * len(row) for level in self._levels for row in level.rows)
