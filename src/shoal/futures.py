"""Futures that threads wait for and coroutines await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import time
from collections.abc import Generator
from concurrent.futures import CancelledError, InvalidStateError, TimeoutError
from typing import Any, TypeVar

__all__ = ["AwaitableFuture", "CancelledError", "InvalidStateError", "MPFuture", "TimeoutError"]

T = TypeVar("T")
SECONDS_AT_A_TIME = 0.5
"""After this time a wait looks around and goes on."""


class AwaitableFuture(concurrent.futures.Future[T]):
    """A result that will be there later. Safe to use from any thread, and can be awaited in any event loop.

    Cancelling a task that awaits it cancels the future too; ``asyncio.shield`` prevents that.
    """

    def result(self, timeout: float | None = None) -> T:
        """As ever, but an interrupt (Ctrl-C) that comes in the moment before the wait begins is noticed soon, too.

        Python itself notices such an interrupt only when the wait is over.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done():
            left = deadline - time.monotonic()
            try:
                return super().result(min(left, SECONDS_AT_A_TIME))
            except TimeoutError:
                if left <= SECONDS_AT_A_TIME and not self.done():
                    raise
        return super().result()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    @classmethod
    def reset_backend(cls) -> None:
        """Nothing to reset: these futures live in one process, and need no thread or pipe of their own."""


MPFuture = AwaitableFuture
"""The name under which users of this field know it."""
