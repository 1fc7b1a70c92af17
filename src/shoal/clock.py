"""DHT time: one clock for the swarm, in Unix seconds.

Everything that expires is stamped with this clock. The event loop may bring its own (a virtual clock in tests);
otherwise it is the clock of the machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:
    from async_timeout import timeout as timeout

DHTExpiration = float

MAX_DHT_TIME_DISCREPANCY_SECONDS = 3.0
"""Peers whose clocks differ by more than this many seconds cannot share expiration times safely."""


def get_dht_time() -> float:
    """Current DHT time in Unix seconds: the running loop's ``dht_time()`` if it has one, else the system clock."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    virtual: Callable[[], float] | None = getattr(loop, "dht_time", None)
    return time.time() if virtual is None else virtual()
