"""Swarms of real DHT peers in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shoal import DHT, get_dht_time


@contextmanager
def swarm(count: int, **options: Any) -> Iterator[list[DHT]]:
    """Peers that know each other."""
    chosen = random.Random(0)
    with ExitStack() as stack:
        dhts: list[DHT] = []
        for _ in range(count):
            known = [address for dht in chosen.sample(dhts, min(3, len(dhts))) for address in dht.get_visible_maddrs()]
            dhts.append(stack.enter_context(DHT(initial_peers=known, start=True, **options)))
        yield dhts


def soon(seconds: float = 60.0) -> float:
    """A DHT time."""
    return get_dht_time() + seconds
