"""How often and how long a peer is dialled before it counts as gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from shoal.errors import DialError, InterruptedDialError, NoReservationError, RefusedDialError, StreamClosedError
from shoal.net.resumable import (
    ANSWERED_FACTOR,
    MAX_DIALS,
    REDIAL_WITHIN,
    RESUME_SECONDS,
    RETURN_SECONDS,
    open_again,
    open_patiently,
)
from shoal.testing import run

pytestmark = pytest.mark.once


def calls(
    failures: int, seconds: float, dials: list[float], error: type[DialError] = DialError
) -> Callable[[], AbstractAsyncContextManager[Any]]:
    """Calls of which the first ones fail after so many seconds; notes when each was begun."""

    @asynccontextmanager
    async def open_call() -> AsyncIterator[Any]:
        dials.append(asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)
        if len(dials) <= failures:
            raise error("not now")
        yield "a call"

    return open_call


@pytest.mark.parametrize("failures", range(MAX_DIALS))
def test_quick_failures_are_dialled_again(failures):
    dials: list[float] = []

    async def main() -> None:
        async with open_patiently(calls(failures, 0.5, dials)) as call:
            assert call == "a call"

    run(main())
    assert len(dials) == failures + 1
    assert all(later > earlier + 0.5 for earlier, later in itertools.pairwise(dials))


def test_dials_are_limited():
    dials: list[float] = []

    async def main() -> None:
        with pytest.raises(DialError, match="not now"):
            async with open_patiently(calls(100, 0.1, dials)):
                pass

    run(main())
    assert len(dials) == MAX_DIALS


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_interrupted_dials_are_repeated_more_often(seconds):
    """Over the longest links a handshake takes a second: one in a hundred fails, and nobody is left out for that."""
    dials: list[float] = []

    async def main() -> None:
        async with open_patiently(calls(3, seconds, dials, InterruptedDialError)) as call:
            assert call == "a call"

    run(main())
    assert len(dials) == 4


@pytest.mark.parametrize(
    ("seconds", "most"), [(0.1, ANSWERED_FACTOR * MAX_DIALS), (ANSWERED_FACTOR * REDIAL_WITHIN, 2)]
)
def test_interrupted_dials_are_limited_too(seconds, most):
    dials: list[float] = []

    async def main() -> None:
        with pytest.raises(InterruptedDialError, match="not now"):
            async with open_patiently(calls(100, seconds, dials, InterruptedDialError)):
                pass

    run(main())
    assert len(dials) == most


def test_a_silent_peer_is_dialled_once():
    """Otherwise one silent member would take so long that the others took this one for dead."""
    dials: list[float] = []

    async def main() -> None:
        with pytest.raises(DialError, match="not now"):
            async with open_patiently(calls(100, REDIAL_WITHIN + 0.1, dials)):
                pass

    run(main())
    assert len(dials) == 1


def test_a_call_that_has_begun_is_not_repeated():
    dials: list[float] = []

    async def main() -> None:
        with pytest.raises(StreamClosedError):
            async with open_patiently(calls(0, 0.1, dials)):
                raise StreamClosedError("gone")

    run(main())
    assert len(dials) == 1


class Signs:
    """Signs of life, as somebody says."""

    def __init__(self, *, is_heard: bool, came_at: float) -> None:
        self._is_heard, self._came_at = is_heard, came_at

    def is_heard(self) -> bool:
        return self._is_heard

    def has_come_after(self, moment: float) -> bool:
        return self._came_at > moment


async def seconds_until_given_up(error: type[DialError], signs: Signs) -> float:
    begun = asyncio.get_running_loop().time()
    with pytest.raises((DialError, TimeoutError)):
        async with open_again(calls(10_000, 0.05, [], error), signs):
            pass
    return asyncio.get_running_loop().time() - begun


@pytest.mark.parametrize("error", [RefusedDialError, NoReservationError])
def test_a_refusal_is_a_death_unless_the_peer_just_came(error):
    async def main() -> None:
        now = asyncio.get_running_loop().time()
        for is_heard, came_at, expected in (
            (False, now, 0.05),
            (True, now - 2 * RESUME_SECONDS, 0.05),
            (True, now, RETURN_SECONDS),
        ):
            signs = Signs(is_heard=is_heard, came_at=came_at)
            margin = 0.01 if expected < 1.0 else RESUME_SECONDS + 0.2
            assert await seconds_until_given_up(error, signs) == pytest.approx(expected, abs=margin)

    run(main())


def test_a_peer_that_is_heard_is_dialled_for_longer():
    async def main() -> None:
        silent, heard = (Signs(is_heard=is_heard, came_at=0.0) for is_heard in (False, True))
        assert await seconds_until_given_up(DialError, silent) == pytest.approx(RESUME_SECONDS, abs=0.2)
        assert await seconds_until_given_up(DialError, heard) == pytest.approx(RETURN_SECONDS, abs=RESUME_SECONDS + 0.2)

    run(main())
