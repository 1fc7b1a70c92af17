"""The computing thread of a device: it does the work of all pools, one batch or job at a time."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from shoal.serving.task_pool import TaskPool, TaskPoolBase

logger = logging.getLogger(__name__)

# Seconds that the end waits for the batch in progress. Chosen.
END_SECONDS = 5.0


class Module(Protocol):
    """Something that computes, and the pools of its work."""

    module: torch.nn.Module

    def get_pools(self) -> Sequence[TaskPoolBase]:
        """Where its work waits."""


class Runtime(threading.Thread):
    """Does the work of pools, the most urgent pool first. One thread: it is started like any other.

    Args:
        module_backends: whose pools are served, by name.
        prefetch_batches: accepted for compatibility, like ``sender_threads``.
        device: modules and batches are moved there; ``None``: they stay.
        stats_report_interval: seconds between two logs of statistics; ``None``: no statistics.
        pools: further pools.
    """

    def __init__(
        self,
        module_backends: Mapping[str, Module],
        prefetch_batches: int = 64,
        sender_threads: int = 1,
        device: torch.device | str | None = None,
        stats_report_interval: float | None = None,
        *,
        pools: Iterable[TaskPoolBase] = (),
    ) -> None:
        super().__init__(name="shoal-runtime", daemon=True)
        self.module_backends = module_backends
        self.device = None if device is None else torch.device(device)
        self.pools = (*(pool for backend in module_backends.values() for pool in backend.get_pools()), *pools)
        self.ready = threading.Event()
        """Set once it works."""
        self.stats_report_interval = stats_report_interval
        self._bell, self._is_ending = threading.Event(), False
        self._numbers = itertools.count()
        self._worker: threading.Thread | None = None
        self._has_ended = threading.Event()

    def move_modules(self) -> None:
        """Move all modules to the device."""
        for backend in self.module_backends.values():
            if self.device is not None:
                backend.module.to(self.device)

    def run(self) -> None:
        """Work until :meth:`shutdown`, in a thread of its own after ``start``, or in that of the caller."""
        self._worker = threading.current_thread()
        self.move_modules()
        for pool in self.pools:
            pool.set_bell(self._bell)
        stats = StatsReporter(self.stats_report_interval) if self.stats_report_interval else None
        if stats is not None:
            stats.start()
        self.ready.set()
        try:
            while not self._is_ending:
                self._bell.clear()
                name, size = self._do_next()
                if size and stats is not None:
                    stats.report_stats(name, size)
        finally:
            if stats is not None:
                stats.stop()
            for pool in self.pools:
                pool.shutdown()
            self._has_ended.set()

    def _do_next(self) -> tuple[str, int]:
        """Do the most urgent work, or wait until there is some; returns its pool's name and the number of rows."""
        times = [(pool.ready_at(), pool) for pool in self.pools]
        now = time.monotonic()
        ready = [pool for at, pool in times if at <= now]
        if not ready:
            soonest = min((at for at, _ in times), default=math.inf)
            self._bell.wait(None if soonest == math.inf else soonest - now)
            return "", 0
        pool = min(ready, key=lambda each: each.priority)
        return pool.name, pool.run_next(self._process)

    def _process(self, pool: TaskPool, *batch: torch.Tensor) -> tuple[Sequence[torch.Tensor], int]:
        if self.device is not None:
            batch = tuple(each.to(self.device) for each in batch)
        outputs, size = self.process_batch(pool, next(self._numbers), *batch)
        return [each.cpu() for each in outputs], size

    def process_batch(self, pool: TaskPool, batch_index: int, *batch: torch.Tensor) -> tuple[Any, int]:
        """Compute one batch; subclasses may do more.

        Returns:
            The tensors of the result, and the number of rows.
        """
        return pool.process_func(*batch), len(batch[0])

    def shutdown(self) -> None:
        """Finish the batch in progress, and fail all that waits. Idempotent."""
        self._is_ending = True
        self._bell.set()
        worker = self._worker
        if worker is not None and worker.is_alive() and worker is not threading.current_thread():
            self._has_ended.wait(END_SECONDS)
        for pool in self.pools:
            pool.shutdown()


class StatsReporter(threading.Thread):
    """Periodically logs what was computed.

    Args:
        report_interval: in seconds.
    """

    def __init__(self, report_interval: float) -> None:
        super().__init__(name="shoal-statistics", daemon=True)
        self.report_interval = report_interval
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._batches: Counter[str] = Counter()
        self._examples: Counter[str] = Counter()

    def report_stats(self, pool_name: str, batch_size: int) -> None:
        """Count a batch."""
        with self._lock:
            self._batches[pool_name] += 1
            self._examples[pool_name] += batch_size

    def run(self) -> None:
        while not self._stopped.wait(self.report_interval):
            with self._lock:
                batches, self._batches = self._batches, Counter()
                examples, self._examples = self._examples, Counter()
            seconds = self.report_interval
            logger.info("Processed %d batches in last %g seconds:", batches.total(), seconds)
            for name, count in batches.items():
                rows = examples[name]
                logger.info(
                    "%s: %d batches (%.2f batches/s), %d examples (%.2f examples/s), avg batch size %.2f",
                    name,
                    count,
                    count / seconds,
                    rows,
                    rows / seconds,
                    rows / count,
                )

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self.is_alive():
            self.join(END_SECONDS)
