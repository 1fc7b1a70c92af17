"""Work of several callers on one computing thread: what is merged, what comes first, and what one bad request costs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

import shoal.serving.runtime
from shoal.errors import BusyError, ReactorError
from shoal.serving.runtime import Runtime
from shoal.serving.task_pool import FinalError, JobPool, TaskPool, TaskPoolBase
from tests.test_reactor import in_forked_child, needs_fork

SOON = 10.0


class Doubling:
    """Doubles a batch, unless it has a negative value, and keeps the sizes of the batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, batch: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.sizes.append(len(batch))
        if (batch < 0).any():
            raise ValueError("a negative value")
        return (2 * batch, *others)


@contextlib.contextmanager
def running(*pools: TaskPoolBase, **kwargs: Any) -> Iterator[Runtime]:
    runtime = Runtime({}, pools=pools, **kwargs)
    runtime.start()
    assert runtime.ready.wait(SOON)
    try:
        yield runtime
    finally:
        runtime.shutdown()


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_waiting_requests_become_one_batch() -> None:
    double = Doubling()
    pool = TaskPool(double, max_batch_size=4, name="p")
    futures = [pool.submit_task(rows(*range(count)), torch.arange(count)) for count in (1, 2, 3)]
    with running(pool):
        for count, future in zip((1, 2, 3), futures, strict=True):
            values, others = future.result(SOON)
            assert values.equal(2 * rows(*range(count)))
            assert others.equal(torch.arange(count))
    assert double.sizes == [3, 3]  # the third one has no room in the first batch


def test_requests_of_other_shapes_are_not_merged() -> None:
    double = Doubling()
    pool = TaskPool(double, max_batch_size=9, name="p")
    short, long, last = (pool.submit_task(torch.ones(1, width)) for width in (1, 2, 1))
    with running(pool):
        assert [each.result(SOON)[0].shape[1] for each in (short, long, last)] == [1, 2, 1]
    assert double.sizes == [2, 1]


def test_bad_request_harms_no_other() -> None:
    pool = TaskPool(Doubling(), max_batch_size=9, name="p")
    good, bad, also_good = (pool.submit_task(rows(value)) for value in (1, -1, 2))
    with running(pool):
        assert good.result(SOON)[0].item() == 2
        assert also_good.result(SOON)[0].item() == 4
        with pytest.raises(ValueError, match="negative"):
            bad.result(SOON)
        assert pool.submit_task(rows(3)).result(SOON)[0].item() == 6


def test_batch_that_has_had_an_effect_is_not_tried_again() -> None:
    sizes: list[int] = []

    def fail(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes.append(len(batch))
        raise FinalError("too late")

    pool = TaskPool(fail, max_batch_size=9, name="p")
    futures = [pool.submit_task(rows(1)) for _ in range(2)]
    with running(pool):
        for future in futures:
            with pytest.raises(FinalError, match="too late"):
                future.result(SOON)
    assert sizes == [2]


@pytest.mark.parametrize("batch", [(), (torch.empty(0, 2),), (torch.ones(5, 2),), (torch.ones(2), torch.ones(3))])
def test_impossible_batch_fails_at_once(batch: tuple[torch.Tensor, ...]) -> None:
    pool = TaskPool(Doubling(), max_batch_size=4, name="p")
    with pytest.raises(ValueError, match="p: a batch"):
        pool.submit_task(*batch).result(timeout=0)  # nothing runs that could answer later


def test_short_batch_leaves_at_its_timeout() -> None:
    double = Doubling()
    pool = TaskPool(double, max_batch_size=9, name="p", min_batch_size=4, timeout=0.02)
    with running(pool):
        assert pool.submit_task(rows(1)).result(SOON)[0].item() == 2
    assert double.sizes == [1]


def test_batch_waits_for_its_minimum() -> None:
    double = Doubling()
    pool = TaskPool(double, max_batch_size=9, name="p", min_batch_size=3)
    with running(pool):
        first = pool.submit_task(rows(1))
        pool.submit_task(rows(1, 2)).result(SOON)
        assert first.result(SOON)[0].item() == 2
    assert double.sizes == [3]


def test_cancelled_request_is_not_computed() -> None:
    double = Doubling()
    pool = TaskPool(double, max_batch_size=9, name="p", min_batch_size=2)
    cancelled = pool.submit_task(rows(1, 1))
    assert cancelled.cancel()
    assert len(pool) == 0
    with running(pool):
        pool.submit_task(rows(1, 2)).result(SOON)
    assert double.sizes == [2]


def test_full_pool_refuses() -> None:
    pool = TaskPool(Doubling(), max_batch_size=9, name="p", pool_size=1)
    pool.submit_task(rows(1))
    with pytest.raises(BusyError, match="try again later"):
        pool.submit_task(rows(1)).result(timeout=0)


def test_smallest_priority_comes_first() -> None:
    order: list[str] = []

    def note(name: str) -> Any:
        return lambda batch: order.append(name) or (batch,)

    pools = [TaskPool(note(name), max_batch_size=1, name=name) for name in ("a", "b")]
    pools[1].priority = 0.5
    futures = [pool.submit_task(rows(1)) for pool in pools for _ in range(2)]
    with running(*pools):
        for future in futures:
            future.result(SOON)
    # b was set to be first; then the pool comes first whose last request is the oldest.
    assert order == ["b", "a", "a", "b"]


def test_shut_down_runtime_fails_what_waits() -> None:
    pool, jobs = TaskPool(Doubling(), max_batch_size=9, name="p", min_batch_size=2), JobPool("jobs")
    with running(pool, jobs):
        waiting = pool.submit_task(rows(1))
    for future in (waiting, pool.submit_task(rows(1)), jobs.submit(int)):
        with pytest.raises(ReactorError, match="is shut down"):
            future.result(timeout=0)


@needs_fork
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_child_does_not_wait_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.serving.runtime, "END_SECONDS", 1e6)
    with running() as runtime:

        def in_child(sender: Any) -> None:
            runtime.shutdown()
            sender.send("done")

        assert in_forked_child(in_child) == "done"


async def test_jobs_run_in_order_of_priority() -> None:
    jobs, order = JobPool("jobs"), list[int]()
    submitted = [jobs.submit(order.append, number, priority=priority) for number, priority in enumerate((1, 0, 1, 0))]
    cancelled = jobs.submit(order.append, 4, priority=-1)
    cancelled.cancel()
    thread = jobs.submit(threading.current_thread, priority=2)
    with running(jobs) as runtime:
        await asyncio.gather(*submitted)
        assert await thread is runtime
        with pytest.raises(ZeroDivisionError):
            await jobs.submit(lambda: 1 // 0)
    assert order == [1, 3, 0, 2]
    with pytest.raises(CancelledError):
        cancelled.result(timeout=0)


def test_statistics_say_what_was_computed(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "avg batch size" in record.getMessage():
                told.set()

    pool, watch = TaskPool(Doubling(), max_batch_size=9, name="e.0_forward"), Watch()
    logger = logging.getLogger("shoal.serving.runtime")
    logger.addHandler(watch)
    try:
        with caplog.at_level(logging.INFO, logger.name), running(pool, stats_report_interval=0.25):
            pool.submit_task(rows(1, 2, 3)).result(SOON)
            assert told.wait(SOON)
    finally:
        logger.removeHandler(watch)
    assert "Processed 1 batches in last 0.25 seconds:" in caplog.messages
    expected = "e.0_forward: 1 batches (4.00 batches/s), 3 examples (12.00 examples/s), avg batch size 3.00"
    assert expected in caplog.messages


def test_subclass_sees_every_batch() -> None:
    seen: list[tuple[str, int]] = []

    class Watching(Runtime):
        def process_batch(self, pool: TaskPool, batch_index: int, *batch: torch.Tensor) -> tuple[Any, int]:
            seen.append((pool.name, batch_index))
            return super().process_batch(pool, batch_index, *batch)

    pool = TaskPool(Doubling(), max_batch_size=9, name="p")
    runtime = Watching({}, pools=[pool])
    runtime.start()
    for _ in range(2):
        pool.submit_task(rows(1)).result(SOON)
    runtime.shutdown()
    assert seen == [("p", 0), ("p", 1)]
