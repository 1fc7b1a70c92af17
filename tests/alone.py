"""Awaits an asynchronous test, and fails it for what it leaves behind in its loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from shoal.base.reactor import is_harmless
from tests.pretend.proactor import forgives

LEAK_GRACE_SECONDS = 3.0
"""Closing is asynchronous: what a test left is a leak only if it is still there after this time."""


async def run_alone(test: Coroutine[Any, Any, None]) -> None:
    """Await the test; tasks that outlive it are a leak of the test or of the code under test.

    What the loop reports to its exception handler is an error that reached nobody.
    """
    reported: list[str] = []

    def note(_: asyncio.AbstractEventLoop, report: dict[str, Any]) -> None:
        if not forgives(report) and not is_harmless(report):
            reported.append(str(report))

    asyncio.get_running_loop().set_exception_handler(note)
    try:
        await test
        deadline = time.monotonic() + LEAK_GRACE_SECONDS
        while (left := asyncio.all_tasks() - {asyncio.current_task()}) and time.monotonic() < deadline:
            await asyncio.wait(left, timeout=0.05)
        assert not left, f"the test left running tasks behind: {left}"
        assert not reported, f"errors that reached nobody: {reported}"
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
