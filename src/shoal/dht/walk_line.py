"""One line for all walks of a process: a few are on their way, the others wait for their turn.

A walk that shares the processor with a thousand others takes so long that its calls time out, and costs several times
as much. Waiting in line costs nothing, and no call is on its way meanwhile.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from shoal.clock import SwarmClock, get_clock

WALKS_IN_FLIGHT = 8

_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[SwarmClock, asyncio.Semaphore]]
_lines = WeakKeyDictionary()


def walk_line() -> asyncio.Semaphore:
    """The line in which walks of the caller's process wait: ``async with walk_line(): ...``."""
    # There is one clock for each process, and in a simulation one for each simulated machine.
    lines = _lines.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    clock = get_clock()
    line = lines.get(clock)
    if line is None:
        line = lines[clock] = asyncio.Semaphore(WALKS_IN_FLIGHT)
    return line
