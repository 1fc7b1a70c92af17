"""How fast something is processed, as an exponential moving average of the time per item."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PerformanceEMA:
    """Running estimate of samples per second.

    Args:
        alpha: weight of the newest measurement, from 0 to 1.
        eps: smallest time per sample that is believed, in seconds.
        paused: begin with the clock stopped.
        clock: source of time in seconds.
    """

    def __init__(
        self, alpha: float = 0.1, eps: float = 1e-20, paused: bool = False, *, clock: Callable[[], float] | None = None
    ) -> None:
        self.alpha, self.eps, self.num_updates = alpha, eps, 0
        self.ema_seconds_per_sample = 0.0
        """The average without correction for its start at zero."""
        self.samples_per_second = eps
        self.paused = paused
        self._clock = clock if clock is not None else time.perf_counter
        self._timestamp = self._clock()
        self._lock = threading.Lock()

    def update(self, task_size: float, interval: float | None = None) -> float:
        """Take note that some samples have been processed.

        Args:
            task_size: how many samples.
            interval: how long they took, in seconds; default: the time since the previous update.

        Returns:
            The new estimate, in samples per second.

        Raises:
            AssertionError: nothing was processed, or the clock is paused and no interval is given.
        """
        assert task_size > 0, f"task_size must be positive, got {task_size}"
        if interval is None:
            assert not self.paused, "the clock is paused: give the interval"
            now = self._clock()
            interval, self._timestamp = max(0.0, now - self._timestamp), now
        self.ema_seconds_per_sample = self.alpha * interval / task_size + (1 - self.alpha) * self.ema_seconds_per_sample
        self.num_updates += 1
        self.samples_per_second = 1 / max(self.seconds_per_sample, self.eps)
        return self.samples_per_second

    @property
    def seconds_per_sample(self) -> float:
        """The average, corrected for its start at zero."""
        if self.num_updates == 0:
            return 0.0
        return self.ema_seconds_per_sample / (1 - (1 - self.alpha) ** self.num_updates)

    def reset_timer(self) -> None:
        """The next interval begins now."""
        self._timestamp = self._clock()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside this context does not count."""
        was_paused, self.paused = self.paused, True
        elapsed = self._clock() - self._timestamp
        try:
            yield
        finally:
            self._timestamp = self._clock() - elapsed
            self.paused = was_paused

    @contextmanager
    def update_threadsafe(self, task_size: float) -> Iterator[None]:
        """Measure a task that may run at the same time as others: what they do together counts once."""
        start = self._clock()
        yield
        with self._lock:
            self.update(task_size, interval=max(0.0, self._clock() - max(start, self._timestamp)))
            self._timestamp = self._clock()

    def __repr__(self) -> str:
        return f"PerformanceEMA({self.samples_per_second:.3g} samples/s after {self.num_updates} updates)"
