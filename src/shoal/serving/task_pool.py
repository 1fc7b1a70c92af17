"""Work that waits for the computing thread of a :class:`~shoal.serving.runtime.Runtime`.

A :class:`TaskPool` merges requests of several callers into batches, a :class:`JobPool` runs functions one by one.
Both can be used from any thread and loop: the futures that they return can be awaited, and cancelling one takes it out
of the queue.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shoal.base.reactor import AwaitableFuture
from shoal.errors import BusyError, ReactorError

logger = logging.getLogger(__name__)
T = TypeVar("T")

Outputs = tuple[torch.Tensor, ...]
Process = Callable[..., tuple[Sequence[torch.Tensor], int]]
"""Takes a pool and the tensors of a batch; returns the tensors of the result and the number of rows."""
Signature = tuple[tuple[torch.Size, torch.dtype], ...]
"""Sizes of one row of each tensor, and their types: requests that agree in this can be merged."""


class FinalError(RuntimeError):
    """A batch failed after it had taken effect, so its requests cannot be tried again."""


class TaskPoolBase(ABC):
    """Work of one kind.

    Args:
        name: shown in logs and statistics.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._bell: threading.Event | None = None

    @property
    @abstractmethod
    def priority(self) -> float:
        """Of the pools that are ready, the one with the smallest number is next."""

    @abstractmethod
    def ready_at(self) -> float:
        """The time of :func:`time.monotonic` from which there is something to do; infinity if there is nothing."""

    @abstractmethod
    def run_next(self, process: Process) -> int:
        """Do what is next, and return for how many rows; called by the computing thread only."""

    @abstractmethod
    def _end_waiting(self) -> list[AwaitableFuture[Any]]:
        """Empty the queue, and return what has waited."""

    def set_bell(self, bell: threading.Event) -> None:
        """Set this event whenever there is something new to do."""
        self._bell = bell
        bell.set()

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.set()

    def _refusal(self) -> ReactorError | None:
        return ReactorError(f"{self.name} is shut down") if self._is_shut_down else None

    def shutdown(self) -> None:
        """Fail everything that waits, and take nothing more. Idempotent."""
        with self._lock:
            self._is_shut_down = True
            waiting = self._end_waiting()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ReactorError(f"{self.name} is shut down"))


class Task:
    """One request of a :class:`TaskPool`."""

    __slots__ = ("args", "future", "signature", "submitted_at")

    def __init__(self, args: Sequence[torch.Tensor]) -> None:
        self.args = args
        self.future: AwaitableFuture[Outputs] = AwaitableFuture()
        self.submitted_at = time.monotonic()
        self.signature: Signature = tuple((each.shape[1:], each.dtype) for each in args)

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.args[0])


class _Mergeable:
    """Requests that can be merged, in order of arrival."""

    def __init__(self) -> None:
        self.tasks: dict[Task, None] = {}
        self.rows = 0

    @property
    def oldest(self) -> Task:
        return next(iter(self.tasks))


class TaskPool(TaskPoolBase):
    """Merges requests into batches along dimension 0, and splits the results. Only requests of equal shapes are merged.

    A batch that fails is tried again request by request, so that one bad request harms no other.

    Args:
        process_func: computes a batch: takes tensors, and returns a tuple of tensors with the same number of rows.
        max_batch_size: the most rows of a batch, and so of a request.
        name: shown in logs and statistics.
        min_batch_size: a batch waits until it has this many rows,
        timeout: or for this many seconds; ``None``: without a limit.
        pool_size: the most requests that wait; ``None``: any number.
        prefetch_batches: accepted for compatibility, like ``daemon`` and ``start``: a pool has no process of its own.
    """

    priority: float = 1.0
    """1 at first; after a batch, the arrival time of its last request, so that the pool that has waited longest is
    next. It can be set."""

    def __init__(
        self,
        process_func: Callable[..., Sequence[torch.Tensor]],
        max_batch_size: int,
        name: str,
        min_batch_size: int = 1,
        timeout: float | None = None,
        pool_size: int | None = None,
        prefetch_batches: int = 1,
        daemon: bool = True,
        start: bool = False,
    ) -> None:
        if not 1 <= min_batch_size <= max_batch_size:
            raise ValueError(f"1 <= min_batch_size <= max_batch_size must hold, got {min_batch_size}, {max_batch_size}")
        super().__init__(name)
        self.process_func = process_func
        self.min_batch_size, self.max_batch_size = min_batch_size, max_batch_size
        self.timeout, self.pool_size = timeout, pool_size
        self._queues: dict[Signature, _Mergeable] = {}

    def __len__(self) -> int:
        """The number of requests that wait."""
        with self._lock:
            return sum(len(queue.tasks) for queue in self._queues.values())

    def submit_task(self, *args: torch.Tensor) -> AwaitableFuture[Outputs]:
        """Queue a request; errors come with the future."""
        task = Task(args)
        error = self._mistake(args) or self._add(task)
        if error is not None:
            task.future.set_exception(error)
        else:
            task.future.add_done_callback(functools.partial(self._forget, task))
            self._ring()
        return task.future

    def _mistake(self, args: Sequence[torch.Tensor]) -> ValueError | None:
        sizes = {len(each) if each.ndim else 0 for each in args}
        if len(sizes) != 1 or sizes == {0}:
            return ValueError(
                f"{self.name}: a batch needs at least one row, and the same number in each tensor: got {sizes}"
            )
        if max(sizes) > self.max_batch_size:
            return ValueError(
                f"{self.name}: a batch of {max(sizes)} rows is too large: allowed are {self.max_batch_size}"
            )
        return None

    def _add(self, task: Task) -> Exception | None:
        with self._lock:
            if self.pool_size is not None and sum(len(each.tasks) for each in self._queues.values()) >= self.pool_size:
                return BusyError(f"{self.name}: {self.pool_size} requests wait already: try again later")
            if (refusal := self._refusal()) is None:
                queue = self._queues.setdefault(task.signature, _Mergeable())
                queue.tasks[task] = None
                queue.rows += task.size
            return refusal

    def _forget(self, task: Task, future: object) -> None:
        """Take a request out of the queue, if it is still there: its caller may have left."""
        with self._lock:
            self._remove(task)

    def _remove(self, task: Task) -> None:
        queue = self._queues.get(task.signature)
        if queue is not None and task in queue.tasks:
            del queue.tasks[task]
            queue.rows -= task.size
            if not queue.tasks:
                del self._queues[task.signature]

    def _ready_at(self, queue: _Mergeable) -> float:
        if queue.rows >= self.min_batch_size:
            return queue.oldest.submitted_at
        return math.inf if self.timeout is None else queue.oldest.submitted_at + self.timeout

    def ready_at(self) -> float:
        with self._lock:
            return min(map(self._ready_at, self._queues.values()), default=math.inf)

    def take_batch(self) -> list[Task]:
        """The requests of the next batch, which are no longer in the queue; none if nothing is ready."""
        with self._lock:
            ready = [queue for queue in self._queues.values() if self._ready_at(queue) <= time.monotonic()]
            if not ready:
                return []
            queue, batch, rows = min(ready, key=self._ready_at), [], 0
            for task in [*queue.tasks]:
                if rows + task.size > self.max_batch_size:
                    break
                self._remove(task)
                if task.future.set_running_or_notify_cancel():
                    batch.append(task)
                    rows += task.size
        return batch

    def run_next(self, process: Process) -> int:
        batch = self.take_batch()
        if not batch:
            return 0
        self.priority = batch[-1].submitted_at
        try:
            results = self._run(batch, process)
        except Exception as e:
            logger.warning("%s: a batch of %d requests failed: %s: %s", self.name, len(batch), type(e).__name__, e)
            logger.debug("%s", self.name, exc_info=True)
            if len(batch) == 1 or isinstance(e, FinalError):
                for task in batch:
                    task.future.set_exception(e)
                return sum(task.size for task in batch)
            for task in batch:
                try:
                    task.future.set_result(self._run([task], process)[0])
                except Exception as e:
                    task.future.set_exception(e)
        else:
            for task, result in zip(batch, results, strict=True):
                task.future.set_result(result)
        return sum(task.size for task in batch)

    def _run(self, batch: Sequence[Task], process: Process) -> list[Outputs]:
        sizes = [task.size for task in batch]
        with torch.no_grad():
            columns = zip(*(task.args for task in batch), strict=True)
            merged = [torch.cat(column) if len(column) > 1 else column[0].detach() for column in columns]
        outputs, _ = process(self, *merged)
        for output in outputs:
            if not output.ndim or len(output) != sum(sizes):
                raise RuntimeError(f"{self.name} has returned {tuple(output.shape)} for a batch of {sum(sizes)} rows")
        if len(batch) == 1:
            return [tuple(outputs)]
        # Copies, so that a small result that is kept for long does not keep the whole batch.
        rows = [[each.clone() for each in torch.split(output, sizes)] for output in outputs]
        return list(zip(*rows, strict=True)) if rows else [()] * len(batch)

    def _end_waiting(self) -> list[AwaitableFuture[Any]]:
        waiting = [task.future for queue in self._queues.values() for task in queue.tasks]
        self._queues.clear()
        return waiting


_Job = tuple[float, int, AwaitableFuture[Any], Callable[[], Any]]


class JobPool(TaskPoolBase):
    """Runs functions in the computing thread, one after another."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._jobs: list[_Job] = []
        self._numbers = itertools.count()

    def submit(self, function: Callable[..., T], *args: Any, priority: float = 0.0) -> AwaitableFuture[T]:
        """Queue a call of a function.

        Args:
            priority: those with a smaller number are first, those with the same in order.

        Returns:
            A future with the result or the error of the function. Cancelling it helps as long as the job waits.
        """
        future: AwaitableFuture[T] = AwaitableFuture()
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                job: _Job = (priority, next(self._numbers), future, functools.partial(function, *args))
                heapq.heappush(self._jobs, job)
        if refusal is not None:
            future.set_exception(refusal)
        self._ring()
        return future

    @property
    def priority(self) -> float:
        with self._lock:
            return self._jobs[0][0] if self._jobs else math.inf

    def ready_at(self) -> float:
        return 0.0 if self._jobs else math.inf

    def run_next(self, process: Process) -> int:
        with self._lock:
            if not self._jobs:
                return 0
            _, _, future, function = heapq.heappop(self._jobs)
        if not future.set_running_or_notify_cancel():
            return 0
        try:
            result = function()
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(result)
        return 1

    def _end_waiting(self) -> list[AwaitableFuture[Any]]:
        waiting = [future for _, _, future, _ in self._jobs]
        self._jobs.clear()
        return waiting
