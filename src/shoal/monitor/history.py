"""Figures over time in little memory: the last minutes second by second, the last hours and the last day more coarsely.

Each level is a ring of means. A value goes into all levels at once, so nothing is ever moved or computed again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

MAX_NAMES = 48
"""Figures that there can be; more are left out."""
LEVELS = ((1.0, 600), (10.0, 720), (60.0, 1440))
"""Seconds that a point stands for, and the number of points: ten minutes, two hours, and a day."""


class _Ring:
    """Means over periods of one length.

    Args:
        seconds: length of a period.
        points: how many are kept.
        width: number of figures.
    """

    def __init__(self, seconds: float, points: int, width: int) -> None:
        self.seconds, self.points = seconds, points
        self._times = array("d", bytes(8 * points))
        self._columns = [array("d", bytes(8 * points)) for _ in range(width)]
        self._next = self._count = 0
        self._period = -math.inf
        self._sums, self._counts = [0.0] * width, [0] * width

    def widen(self) -> None:
        """There is one more figure, which was not known so far."""
        self._columns.append(array("d", [math.nan]) * self.points)
        self._sums.append(0.0)
        self._counts.append(0)

    def add(self, now: float, values: Sequence[float]) -> None:
        period = now // self.seconds
        if period != self._period:
            self._close()
            self._period = period
        for index, value in enumerate(values):
            if math.isfinite(value):
                self._sums[index] += value
                self._counts[index] += 1

    def _close(self) -> None:
        if math.isinf(self._period):
            return
        at = self._next
        self._times[at] = self._period * self.seconds
        for index, column in enumerate(self._columns):
            column[at] = self._mean(index)
            self._sums[index], self._counts[index] = 0.0, 0
        self._next, self._count = (at + 1) % self.points, min(self._count + 1, self.points)

    def _mean(self, index: int) -> float:
        count = self._counts[index]
        return self._sums[index] / count if count else math.nan

    def columns(self) -> list[list[float]]:
        """Times, and then the values of each figure, the oldest first; the present period comes last."""
        order = [(self._next - self._count + step) % self.points for step in range(self._count)]
        found = [[column[at] for at in order] for column in (self._times, *self._columns)]
        if not math.isinf(self._period):
            for column, value in zip(
                found, [self._period * self.seconds, *map(self._mean, range(len(self._sums)))], strict=True
            ):
                column.append(value)
        return found

    @property
    def nbytes(self) -> int:
        return sum(8 * len(column) for column in (self._times, *self._columns))


class History:
    """Several figures over a day.

    Args:
        names: of the figures that there are from the beginning; others may come.
    """

    def __init__(self, names: Sequence[str], levels: Sequence[tuple[float, int]] = LEVELS) -> None:
        self.names = tuple(names)
        self._rings = [_Ring(seconds, points, len(names)) for seconds, points in levels]

    def add(self, now: float, values: Mapping[str, float]) -> None:
        """Note the present values; those that are missing or not finite leave a gap."""
        for name in [name for name in values if name not in self.names][: MAX_NAMES - len(self.names)]:
            self.names += (name,)
            for ring in self._rings:
                ring.widen()
        row = [values.get(name, math.nan) for name in self.names]
        for ring in self._rings:
            ring.add(now, row)

    @property
    def spans(self) -> list[float]:
        """The seconds that each level reaches back."""
        return [ring.seconds * ring.points for ring in self._rings]

    def columns(self, level: int = 0) -> dict[str, list[float | None]]:
        """The points of one level by name, with ``time`` first; a gap is ``None``."""
        times, *columns = self._rings[level].columns()
        found: dict[str, list[float | None]] = {"time": list(times)}
        for name, column in zip(self.names, columns, strict=True):
            found[name] = [None if math.isnan(value) else value for value in column]
        return found

    @property
    def nbytes(self) -> int:
        """Memory of all points."""
        return sum(ring.nbytes for ring in self._rings)
