"""Small swarms in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.dht import DHT

PATIENCE = 20.0
"""Seconds after which a condition that should have come true makes a test fail."""


@pytest.fixture
def make_dhts() -> Iterator[Callable[..., list[DHT]]]:
    """Make connected DHTs: ``make_dhts(3)``, with a client as the last one: ``make_dhts(3, clients=1)``."""
    made: list[DHT] = []

    def make(count: int, clients: int = 0) -> list[DHT]:
        dhts = []
        for index in range(count):
            initial_peers = made[0].get_visible_maddrs() if made else None
            dhts.append(DHT(initial_peers=initial_peers, start=True, client_mode=index >= count - clients))
            made.append(dhts[-1])
        return dhts

    yield make
    for dht in reversed(made):
        dht.shutdown()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Shut objects down at the end of a test, the last one first: ``tracker = closing(ProgressTracker(...))``."""
    things: list[Any] = []

    def remember(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield remember
    for thing in reversed(things):
        thing.shutdown()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll for something that happens in the background."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"it never came true that {what}"
        pause.wait(0.01)


def in_parallel(*tasks: Callable[[], Any]) -> list[Any]:
    """Run tasks in a thread each; results in their order, or the first error."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]
