"""Blocking context managers in coroutines, and waiting."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.base.tasks import cancel_and_wait, enter_asynchronously, wait_at_most

pytestmark = pytest.mark.oldest


@pytest.mark.parametrize(
    "make_lock",
    [
        threading.Lock,
        pytest.param(  # the first lock of this kind starts a process that cleans up after this one
            multiprocessing.get_context("spawn").Lock, marks=pytest.mark.leaves_something
        ),
    ],
    ids=["thread", "process"],
)
async def test_many_coroutines_take_turns_with_two_locks(make_lock: Any) -> None:
    """More of them than any pool has threads, and each holds one lock while it waits for the other."""
    first, second = make_lock(), make_lock()
    inside = finished = 0

    async def work() -> None:
        nonlocal inside, finished
        async with enter_asynchronously(first):
            await asyncio.sleep(0)
            async with enter_asynchronously(second):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1
        finished += 1

    await asyncio.gather(*(work() for _ in range(100)))
    assert finished == 100
    assert first.acquire(timeout=1)
    assert second.acquire(timeout=1)


async def test_the_loop_goes_on_while_a_coroutine_waits() -> None:
    lock = threading.Lock()
    lock.acquire()

    async def wait() -> None:
        async with enter_asynchronously(lock):
            pass

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    lock.release()
    await waiting
    assert not lock.locked()


async def test_who_gives_up_does_not_get_the_lock() -> None:
    lock = threading.Lock()
    lock.acquire()

    async def wait() -> None:
        async with enter_asynchronously(lock):
            raise AssertionError("nobody released it")

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0.01)
    assert await cancel_and_wait(waiting)
    lock.release()
    assert lock.acquire(timeout=10)  # the waiting thread may have had it for a moment
    lock.release()


async def test_cancelled_at_any_moment_the_lock_is_free_in_the_end() -> None:
    lock = threading.Lock()

    async def hold() -> None:
        async with enter_asynchronously(lock):
            await asyncio.sleep(0)

    for patience in range(200):
        task = asyncio.ensure_future(hold())
        for _ in range(patience % 20):
            await asyncio.sleep(0)
        await cancel_and_wait(task)
    assert lock.acquire(timeout=10)
    lock.release()


async def test_values_and_errors_pass() -> None:
    @contextmanager
    def context(events: list[str]) -> Iterator[str]:
        events.append(f"entered in another thread: {threading.current_thread() is not threading.main_thread()}")
        try:
            yield "value"
        except KeyError:
            events.append("a KeyError, which ends here")

    events: list[str] = []
    async with enter_asynchronously(context(events)) as value:
        assert value == "value"
        raise KeyError
    assert events == ["entered in another thread: True", "a KeyError, which ends here"]
    with pytest.raises(ValueError, match="through"):
        async with enter_asynchronously(context(events)):
            raise ValueError("through")

    @contextmanager
    def broken() -> Iterator[None]:
        raise OSError("cannot be entered")
        yield

    with pytest.raises(OSError, match="cannot be entered"):
        async with enter_asynchronously(broken()):
            pass


async def test_an_event_or_the_end_of_the_time() -> None:
    event = asyncio.Event()
    assert not await wait_at_most(event, 0.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_at_most(event, 50.0)
    assert await wait_at_most(event, 50.0)
