from __future__ import annotations

import asyncio
import time

import pytest

from shoal.clock import get_dht_time, timeout
from shoal.testing import START_OF_TIME, run
from tests.dht.virtual_time import in_virtual_time


def test_outside_a_loop_it_is_the_time_of_the_machine():
    before = time.time()
    assert before <= get_dht_time() <= time.time()


async def test_inside_an_ordinary_loop_too():
    before = time.time()
    assert before <= get_dht_time() <= time.time()


@in_virtual_time
async def test_a_loop_may_bring_its_own_time():
    assert get_dht_time() == START_OF_TIME
    await asyncio.sleep(3600)
    assert get_dht_time() == START_OF_TIME + 3600


def test_an_hour_of_virtual_time_passes_at_once():
    before = time.monotonic()
    run(asyncio.sleep(3600))
    assert time.monotonic() - before < 1


@in_virtual_time
async def test_timeout_follows_the_time_of_the_loop():
    with pytest.raises((asyncio.TimeoutError, TimeoutError)):
        async with timeout(10):
            await asyncio.sleep(11)
    assert get_dht_time() == START_OF_TIME + 10
