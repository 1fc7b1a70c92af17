"""Futures that threads wait for and coroutines await."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator
from concurrent.futures import CancelledError, InvalidStateError, TimeoutError
from typing import Any, TypeVar

__all__ = ["AwaitableFuture", "CancelledError", "InvalidStateError", "MPFuture", "TimeoutError"]

T = TypeVar("T")


class AwaitableFuture(concurrent.futures.Future[T]):
    """A result that will be there later. Safe to use from any thread, and can be awaited in any event loop.

    Cancelling a task that awaits it cancels the future too; ``asyncio.shield`` prevents that.
    """

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    @classmethod
    def reset_backend(cls) -> None:
        """Nothing to reset: these futures live in one process, and need no thread or pipe of their own."""


MPFuture = AwaitableFuture
"""The name under which users of this field know it."""
