"""Helpers that run coroutines together, wait for them or cancel them, and do blocking work in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines together; if one fails, the others are cancelled."""
    if len(work) == 1:  # it needs no task of its own
        return await work[0]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


class TaskSet:
    """Tasks that run until they end or are cancelled together. They keep their order, so that simulations repeat."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter([*self._tasks])

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """A task has ended."""
        self._tasks.pop(task, None)

    async def wait(self) -> None:
        """Wait until all present tasks have ended; their errors are not raised here."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        await cancel_and_wait(*self._tasks)


class BackgroundTasks(TaskSet):
    """Tasks that live as long as their owner. Their errors are logged, except the kinds that callers handle.

    Args:
        log: gets the errors.
        owner: the owner in words, for the log.
        handled: errors that are not logged.
    """

    def __init__(self, log: logging.Logger, owner: str, handled: type[Exception] | tuple[()] = ()) -> None:
        super().__init__()
        self._log, self._owner, self._handled = log, owner, handled
        self._is_closed = False

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in the background; after :meth:`close` it is cancelled at once."""
        task = self.start(coroutine)
        if self._is_closed:
            task.cancel()
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        super()._forget(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._handled):
            self._log.error("a background task of %s failed", self._owner, exc_info=error)

    def stop(self) -> None:
        """From now on, cancel each task that is spawned."""
        self._is_closed = True

    async def close(self) -> None:
        """Cancel all tasks but the calling one, and wait until they have ended."""
        self.stop()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_in_worker(function: Callable[..., T], *args: Any) -> T:
    """Run heavy tensor work (above about a millisecond) outside the loop; a virtual-time loop runs it inline."""
    try:
        future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    except RuntimeError:
        # The interpreter is shutting down and accepts no new work for threads.
        return function(*args)
    return await future


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> bool:
    """Cancel tasks and wait until all of them have really ended; their errors are not raised here.

    Returns:
        Whether all of them were cancelled.
    """
    for task in tasks:
        task.cancel()
    running = [task for task in tasks if not task.done()]
    if running:
        await asyncio.gather(*running, return_exceptions=True)
    for task in tasks:
        mark_retrieved(task)
    return all(task.cancelled() for task in tasks)


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Let asyncio log no error of a future that is done: nobody waits for it any more."""
    if not future.cancelled():
        future.exception()


async def await_cancelled(awaitable: Awaitable[Any]) -> bool:
    """Wait until a task or future has ended, and return whether it was cancelled; its error is not raised here."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.wait([task])
    mark_retrieved(task)
    return task.cancelled()


def has_succeeded(future: asyncio.Future[Any]) -> bool:
    """Whether there is a result."""
    return future.done() and not future.cancelled() and future.exception() is None


async def first_completed(*awaitables: Awaitable[Any], timeout: float | None = None) -> None:
    """Wait until one of several awaitables is done or the time is up; the others are cancelled."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*tasks)


async def wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set or the time is up; returns whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


@asynccontextmanager
async def enter_asynchronously(context: AbstractContextManager[T, Any]) -> AsyncIterator[T]:
    """Enter a context whose ``__enter__`` may block, without blocking the loop. It exits in the loop's thread.

    Any number of coroutines may wait, each in a thread of its own. An executor would not do: its few threads might all
    wait for locks whose holders are queued behind them. A lock that knows its owner, such as ``threading.RLock``, does
    not work here, because one thread takes it and another one releases it.
    """
    entered: concurrent.futures.Future[T] = concurrent.futures.Future()
    threading.Thread(target=_enter, args=(context, entered), name="shoal-enter", daemon=True).start()
    try:
        value = await asyncio.wrap_future(entered)
    except asyncio.CancelledError:
        # The context may have been entered just before the cancellation: leave it again.
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
    else:  # the caller was cancelled: leave the context again
        context.__exit__(None, None, None)
