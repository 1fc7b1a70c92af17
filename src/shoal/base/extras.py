"""Helpers that programs for hivemind use and shoal itself rarely needs: asynchronous iterators, nested structures.

Nested structures are lists, tuples, named tuples and dictionaries inside each other. They can be flattened to the
sequence of their values. Dictionaries are walked in the order of their sorted keys, so equal ones give equal sequences.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from shoal.base.tasks import cancel_and_wait

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_MAX_MSG_SIZE = 2**22
"""The most bytes of a message in hivemind, by which its users split their data. shoal's messages may be larger."""
MAX_UNARY_PAYLOAD_SIZE = DEFAULT_MAX_MSG_SIZE // 2
"""The size above which users of hivemind send a stream of messages instead of one."""

anext = builtins.anext


async def iter_as_aiter(iterable: Iterable[T]) -> AsyncIterator[T]:
    """Iterate asynchronously over an ordinary iterable."""
    for item in iterable:
        yield item


async def as_aiter(*items: T) -> AsyncIterator[T]:
    """Iterate asynchronously over the given items."""
    for item in items:
        yield item


async def azip(*iterables: AsyncIterable[Any]) -> AsyncGenerator[tuple[Any, ...], None]:
    """Like ``zip``: tuples of items at the same position, until the shortest iterable ends."""
    iterators = [iterable.__aiter__() for iterable in iterables]
    while iterators:
        try:
            row = [await builtins.anext(iterator) for iterator in iterators]
        except StopAsyncIteration:
            return
        yield tuple(row)


async def achain(*iterables: AsyncIterable[T]) -> AsyncIterator[T]:
    """Like ``itertools.chain``: the items of one iterable after another."""
    for iterable in iterables:
        async for item in iterable:
            yield item


async def aenumerate(iterable: AsyncIterable[T], start: int = 0) -> AsyncIterator[tuple[int, T]]:
    """Like ``enumerate``: the items with their numbers."""
    number = start
    async for item in iterable:
        yield number, item
        number += 1


async def asingle(iterable: AsyncIterable[T]) -> T:
    """The only item of an iterable.

    Raises:
        ValueError: there is no item, or more than one.
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
    """The same items, but each must come within ``timeout`` seconds.

    Raises:
        TimeoutError: an item took longer.
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
    """The same items; the event is set at their end, after an error, or when the consumer stops early."""
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
    """Apply a blocking function to items at the same position, in threads; results come in the order of the items.

    Args:
        function: called with one item of each iterable.
        max_prefetch: how many calls may run ahead of the one whose result is awaited.
        executor: runs the function; default: the loop's own.

    Raises:
        ValueError: ``max_prefetch`` is negative.
        Exception: any error of the function or an iterable, after the results of the items before it.
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
                except Exception as e:
                    # Raised in its turn, after the results that are still to come.
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


def _children(structure: Any) -> list[Any] | None:
    """The children of a structure, in order; ``None`` for a plain value."""
    if isinstance(structure, (list, tuple)):
        return list(structure)
    if isinstance(structure, dict):
        return [structure[key] for key in sorted(structure)]
    return None


def _rebuild(structure: Any, children: list[Any]) -> Any:
    if isinstance(structure, dict):
        by_key = dict(zip(sorted(structure), children, strict=True))
        return {key: by_key[key] for key in structure}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*children)
    return tuple(children) if isinstance(structure, tuple) else children


def nested_flatten(structure: Any) -> Iterator[Any]:
    """The values of a nested structure, one after another."""
    children = _children(structure)
    if children is None:
        yield structure
        return
    for child in children:
        yield from nested_flatten(child)


def nested_pack(flat: Iterable[Any], structure: Any) -> Any:
    """The opposite of :func:`nested_flatten`: put values into a structure like the given one.

    Raises:
        ValueError: there are too few or too many values.
    """
    values = iter(flat)
    packed = _pack(values, structure)
    if next(values, values) is not values:
        raise ValueError("more values than the structure has places")
    return packed


def _pack(values: Iterator[Any], structure: Any) -> Any:
    children = _children(structure)
    if children is not None:
        return _rebuild(structure, [_pack(values, child) for child in children])
    for value in values:
        return value
    raise ValueError("fewer values than the structure has places")


def nested_compare(first: Any, second: Any) -> bool:
    """Whether two structures have equal types, lengths and keys at every depth; their values are ignored."""
    ours, theirs = _children(first), _children(second)
    if ours is None or theirs is None:
        return ours is theirs
    if _kind(first) is not _kind(second) or len(ours) != len(theirs):
        return False
    if isinstance(first, dict) and first.keys() != second.keys():
        return False
    return all(map(nested_compare, ours, theirs))


def _kind(structure: Any) -> type:
    if isinstance(structure, dict):
        return dict
    return type(structure) if hasattr(structure, "_fields") else tuple if isinstance(structure, tuple) else list


def nested_map(function: Callable[..., Any], *structures: Any) -> Any:
    """Apply a function to the values at the same position of several structures; returns a structure of the results.

    Raises:
        ValueError: no structure is given, or their forms differ.
    """
    if not structures:
        raise ValueError("nested_map needs at least one structure")
    first, *others = structures
    for number, other in enumerate(others, start=2):
        if not nested_compare(first, other):
            raise ValueError(f"structure {number} has another form than the first one: {other!r}, {first!r}")
    return nested_pack(map(function, *map(nested_flatten, structures)), first)
