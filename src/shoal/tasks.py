"""Running coroutines: several together, until the first is done, until they have really ended, in a worker thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines together; the failure of one cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def run_in_worker(function: Callable[..., T], *args: Any) -> T:
    """Run heavy tensor work (above about a millisecond) outside the loop; a virtual-time loop runs it inline."""
    try:
        future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    except RuntimeError:
        # The interpreter is on its way out and takes no new work for threads.
        return function(*args)
    return await future


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> bool:
    """Cancel tasks and wait until all of them have really ended; their errors are theirs.

    Returns:
        Whether all of them ended by being cancelled.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return all(task.cancelled() for task in tasks)


async def await_cancelled(awaitable: Awaitable[Any]) -> bool:
    """Wait until a task or future has ended, and tell whether it was cancelled; its errors are its own."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # it has been seen
    return task.cancelled()


async def first_completed(*awaitables: Awaitable[Any], timeout: float | None = None) -> None:
    """Wait until one of several awaitables is done or the time is up; what is left is cancelled."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def enter_asynchronously(context: AbstractContextManager[T, Any]) -> AsyncIterator[T]:
    """Enter a context whose ``__enter__`` may block, without blocking the loop; it is left in the loop's thread.

    Any number of coroutines may wait: each has a thread of its own while it does, because the few threads of an
    executor might all wait for locks whose holders are in the queue behind them. A lock that knows its owner, such as
    ``threading.RLock``, does not work: it is taken in another thread than released.
    """
    entered: concurrent.futures.Future[T] = concurrent.futures.Future()
    threading.Thread(target=_enter, args=(context, entered), name="shoal-enter", daemon=True).start()
    try:
        value = await asyncio.wrap_future(entered)
    except asyncio.CancelledError:
        # It was entered at the same moment.
        if not entered.cancel() and entered.exception() is None:
            context.__exit__(None, None, None)
        raise
    with ExitStack() as stack:
        stack.push(context)
        yield value


def _enter(context: AbstractContextManager[T, Any], entered: concurrent.futures.Future[T]) -> None:
    try:
        value = context.__enter__()
    except BaseException as e:
        if entered.set_running_or_notify_cancel():
            entered.set_exception(e)
        return
    if entered.set_running_or_notify_cancel():
        entered.set_result(value)
    else:  # nobody waits for it any more
        context.__exit__(None, None, None)
