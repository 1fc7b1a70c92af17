"""What the standard library has for iterators, for asynchronous ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.base.extras import (
    achain,
    aenumerate,
    aiter_with_timeout,
    amap_in_executor,
    anext,
    as_aiter,
    asingle,
    attach_event_on_finished,
    azip,
    iter_as_aiter,
)
from shoal.base.tasks import await_cancelled, cancel_and_wait
from tests.dht.virtual_time import in_virtual_time

pytestmark = pytest.mark.oldest


async def collect(iterator: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in iterator]


async def until_error(iterator: AsyncIterator[Any], error: type[Exception] | tuple[type[Exception], ...]) -> list[Any]:
    """The items that come before this error."""
    seen: list[Any] = []

    async def see() -> None:
        async for item in iterator:
            seen.append(item)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(error):
        await see()
    return seen


async def fail_after(*items: int) -> AsyncIterator[int]:
    for item in items:
        yield item
    raise KeyError("no more")


async def test_items_one_after_another() -> None:
    assert await collect(as_aiter(1, 2, 3)) == [1, 2, 3]
    assert await collect(iter_as_aiter(range(3))) == [0, 1, 2]
    assert await anext(as_aiter(7)) == 7
    assert await collect(achain(as_aiter(1), as_aiter(), as_aiter(2, 3))) == [1, 2, 3]
    assert await collect(achain()) == []
    assert await collect(aenumerate(as_aiter("a", "b"))) == [(0, "a"), (1, "b")]
    assert await collect(azip(as_aiter(1, 2, 3), as_aiter("a", "b"))) == [(1, "a"), (2, "b")]
    assert await collect(azip()) == []


async def test_exactly_one_item() -> None:
    assert await asingle(as_aiter("only")) == "only"
    with pytest.raises(ValueError, match="got none"):
        await asingle(as_aiter())
    with pytest.raises(ValueError, match="got more"):
        await asingle(as_aiter(1, 2))


@in_virtual_time
async def test_each_item_has_a_time_limit() -> None:
    async def slower_and_slower() -> AsyncIterator[int]:
        for number in range(5):
            await asyncio.sleep(number)
            yield number

    limited = aiter_with_timeout(slower_and_slower(), timeout=2.5)
    assert await anext(limited) == 0
    await asyncio.sleep(100)  # the consumer's time does not count
    assert await until_error(limited, TimeoutError) == [1, 2]
    assert await collect(aiter_with_timeout(slower_and_slower(), timeout=None)) == [0, 1, 2, 3, 4]


async def test_the_end_is_told() -> None:
    ended = asyncio.Event()
    assert await collect(attach_event_on_finished(as_aiter(1, 2), ended)) == [1, 2]
    assert ended.is_set()
    failed = asyncio.Event()
    with pytest.raises(KeyError):
        await collect(attach_event_on_finished(fail_after(1), failed))
    assert failed.is_set()
    left = asyncio.Event()
    iterator = attach_event_on_finished(as_aiter(1, 2), left)
    assert await anext(iterator) == 1
    assert not left.is_set()
    await iterator.aclose()  # type: ignore[attr-defined]
    assert left.is_set()


# --- in threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_prefetch", [0, 1, 5, 100])
async def test_results_come_in_order(max_prefetch: int) -> None:
    with ThreadPoolExecutor(4) as executor:
        results = amap_in_executor(
            lambda a, b: (a * b, threading.get_ident()),
            iter_as_aiter(range(20)),
            iter_as_aiter(range(100)),
            max_prefetch=max_prefetch,
            executor=executor,
        )
        found = await collect(results)
    assert [value for value, _ in found] == [number**2 for number in range(20)]
    assert threading.get_ident() not in {thread for _, thread in found}


@pytest.mark.parametrize("max_prefetch", [0, 1, 3])
async def test_calls_run_ahead_as_far_as_allowed(max_prefetch: int) -> None:
    may_go_on = threading.Event()
    begun: list[int] = []
    all_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(number: int) -> int:
        begun.append(number)
        if len(begun) == max_prefetch + 1:
            loop.call_soon_threadsafe(all_begun.set)
        assert may_go_on.wait(30)
        return number

    with ThreadPoolExecutor(8) as executor:
        results = amap_in_executor(work, iter_as_aiter(range(10)), max_prefetch=max_prefetch, executor=executor)
        first = asyncio.ensure_future(anext(results))
        await all_begun.wait()
        for _ in range(20):  # whatever else could start now would
            await asyncio.sleep(0)
        assert sorted(begun) == list(range(max_prefetch + 1))
        may_go_on.set()
        assert await first == 0
        assert await collect(results) == list(range(1, 10))


async def test_errors_come_in_their_turn() -> None:
    divided = amap_in_executor(lambda x: 1 / x, as_aiter(1, 2, 0, 4), max_prefetch=3)
    assert await until_error(divided, ZeroDivisionError) == [1.0, 0.5]
    assert await until_error(amap_in_executor(str, fail_after(1, 2), max_prefetch=5), KeyError) == ["1", "2"]
    with pytest.raises(ValueError, match="max_prefetch"):
        await collect(amap_in_executor(str, as_aiter(1), max_prefetch=-1))


async def test_leaving_early_leaves_nothing_behind() -> None:
    never = asyncio.Event()

    async def slow() -> AsyncIterator[int]:
        yield 1
        await never.wait()
        yield 2

    results = amap_in_executor(str, slow(), max_prefetch=2)
    assert await anext(results) == "1"
    waiting = asyncio.ensure_future(anext(results))
    await asyncio.sleep(0)
    assert await cancel_and_wait(waiting)
    await results.aclose()  # type: ignore[attr-defined]


# --- cancelling -------------------------------------------------------------------------------------------------------


async def test_what_became_of_a_task() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise KeyError

    async def refuse() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    waiting, refusing = asyncio.ensure_future(wait_for_ever()), asyncio.ensure_future(refuse())
    await asyncio.sleep(0)
    assert await cancel_and_wait(waiting)
    assert not await cancel_and_wait(refusing)
    assert await await_cancelled(waiting)
    assert not await await_cancelled(asyncio.ensure_future(fail()))
    assert not await await_cancelled(asyncio.sleep(0))
    assert await cancel_and_wait()
