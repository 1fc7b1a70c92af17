"""What the standard library has for iterators, for asynchronous ones."""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

from shoal.tasks import cancel_and_wait

T = TypeVar("T")
R = TypeVar("R")

anext = builtins.anext


async def iter_as_aiter(iterable: Iterable[T]) -> AsyncIterator[T]:
    """The items of an ordinary iterable."""
    for item in iterable:
        yield item


async def as_aiter(*items: T) -> AsyncIterator[T]:
    """The given items."""
    for item in items:
        yield item


async def azip(*iterables: AsyncIterable[Any]) -> AsyncGenerator[tuple[Any, ...], None]:
    """Tuples of items at the same place, until the shortest iterable ends."""
    iterators = [iterable.__aiter__() for iterable in iterables]
    while iterators:
        try:
            row = [await builtins.anext(iterator) for iterator in iterators]
        except StopAsyncIteration:
            return
        yield tuple(row)


async def achain(*iterables: AsyncIterable[T]) -> AsyncIterator[T]:
    """The items of one iterable after another."""
    for iterable in iterables:
        async for item in iterable:
            yield item


async def aenumerate(iterable: AsyncIterable[T], start: int = 0) -> AsyncIterator[tuple[int, T]]:
    """The items with their numbers."""
    number = start
    async for item in iterable:
        yield number, item
        number += 1


async def asingle(iterable: AsyncIterable[T]) -> T:
    """The only item.

    Raises:
        ValueError: there is none, or there are several.
    """
    items = []
    async for item in iterable:
        items.append(item)
        if len(items) > 1:
            raise ValueError("expected exactly one item, got more")
    if not items:
        raise ValueError("expected exactly one item, got none")
    return items[0]


async def aiter_with_timeout(iterable: AsyncIterable[T], timeout: float | None) -> AsyncIterator[T]:
    """The same items, but none may take longer than ``timeout`` seconds.

    Raises:
        TimeoutError: one did.
    """
    iterator = iterable.__aiter__()
    while True:
        try:
            async with asyncio.timeout(timeout):
                item = await builtins.anext(iterator)
        except StopAsyncIteration:
            return
        yield item


async def attach_event_on_finished(iterable: AsyncIterable[T], event: asyncio.Event) -> AsyncIterator[T]:
    """The same items; the event is set when there are no more, when one failed, or when nobody wants them any more."""
    try:
        async for item in iterable:
            yield item
    finally:
        event.set()


async def amap_in_executor(
    function: Callable[..., R],
    *iterables: AsyncIterable[Any],
    max_prefetch: int = 1,
    executor: Executor | None = None,
) -> AsyncIterator[R]:
    """Apply a blocking function to items at the same place, in threads; results come in the order of the items.

    Args:
        function: called with one item of each iterable.
        max_prefetch: how many calls may run ahead of the one whose result is awaited.
        executor: where it runs; the loop's own by default.

    Raises:
        ValueError: ``max_prefetch`` is negative.
        Exception: whatever the function or an iterable raises, in its turn.
    """
    if max_prefetch < 0:
        raise ValueError(f"max_prefetch must be at least 0, got {max_prefetch}")
    loop = asyncio.get_running_loop()
    rows = azip(*iterables)
    running: deque[asyncio.Future[R]] = deque()
    fetching: asyncio.Future[tuple[Any, ...]] | None = None
    exhausted = False
    try:
        while running or not exhausted:
            if fetching is None and not exhausted and len(running) <= max_prefetch:
                fetching = asyncio.ensure_future(builtins.anext(rows))
            waiting = [future for future in (fetching, running[0] if running else None) if future is not None]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if fetching is not None and fetching.done():
                done, fetching = fetching, None
                try:
                    running.append(loop.run_in_executor(executor, function, *done.result()))
                except StopAsyncIteration:
                    exhausted = True
                except Exception as e:  # its turn comes after the results that are still to come
                    exhausted = True
                    running.append(loop.create_future())
                    running[-1].set_exception(e)
            elif running:
                yield await running.popleft()
    finally:
        if fetching is not None:
            await cancel_and_wait(fetching)
        await cancel_and_wait(*running)
        await rows.aclose()
