"""Futures that threads wait for and coroutines await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from shoal.base.reactor import AwaitableFuture, MPFuture, Portal

pytestmark = pytest.mark.oldest


async def test_a_coroutine_awaits_what_a_thread_sets() -> None:
    future: MPFuture[int] = MPFuture()
    threading.Thread(target=future.set_result, args=(42,)).start()
    assert await future == 42
    assert future.result() == 42
    assert await future == 42


async def test_errors_reach_the_coroutine() -> None:
    future: MPFuture[int] = MPFuture()
    future.set_exception(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        await future


async def test_cancelling_goes_both_ways() -> None:
    future: MPFuture[int] = MPFuture()
    waiting = asyncio.ensure_future(future)
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    another: MPFuture[int] = MPFuture()
    task = asyncio.create_task(asyncio.wait_for(another, 0.01))
    with pytest.raises(TimeoutError):
        await task
    assert another.cancelled()


def test_waiting_in_a_thread_has_a_limit() -> None:
    future: MPFuture[int] = MPFuture()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0.001)


def test_a_result_is_set_once() -> None:
    future: MPFuture[int] = MPFuture()
    seen: list[int] = []
    future.add_done_callback(lambda done: seen.append(done.result()))
    future.set_result(1)
    future.add_done_callback(lambda done: seen.append(done.result()))
    assert seen == [1, 1]
    with pytest.raises(concurrent.futures.InvalidStateError):
        future.set_result(2)
    with pytest.raises(concurrent.futures.InvalidStateError):
        future.set_exception(KeyError())
    assert not future.cancel()
    MPFuture.reset_backend()
    assert future.result() == 1


async def test_another_loop_awaits_what_the_background_loop_does() -> None:
    """What facades hand out when they are asked for a future."""
    portal = Portal("test")

    async def work() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def fail() -> None:
        raise KeyError("in the loop")

    future = portal.submit(work())
    assert isinstance(future, AwaitableFuture)
    assert await future == "shoal-reactor"
    with pytest.raises(KeyError, match="in the loop"):
        await portal.submit(fail())
    portal.close(1.0)


def test_cancelling_a_future_cancels_its_coroutine() -> None:
    portal = Portal("test")
    began, ended = threading.Event(), threading.Event()

    async def wait_for_ever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = portal.submit(wait_for_ever())
    assert began.wait(10)
    assert future.cancel()
    assert ended.wait(10)
    done, _ = concurrent.futures.wait([future], timeout=10)
    assert done == {future}
    portal.close(1.0)


def test_a_coroutine_that_cancels_itself_cancels_its_future() -> None:
    portal = Portal("test")

    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        portal.submit(give_up()).result(10)
    portal.close(1.0)


def test_waiting_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than one slice, shorter than one, and errors that look like the end of one."""
    monkeypatch.setattr("shoal.base.reactor.SECONDS_AT_A_TIME", 0.001)
    future: AwaitableFuture[int] = AwaitableFuture()
    for seconds in (0, 0.0005, 0.01, -1):
        with pytest.raises(TimeoutError):
            future.result(seconds)
    timer = threading.Timer(0.05, future.set_result, [7])
    timer.start()
    assert future.result() == future.result(0) == 7
    timer.join()
    failed: AwaitableFuture[int] = AwaitableFuture()
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        failed.result(60)
