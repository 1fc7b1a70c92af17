"""A lock that threads and coroutines share, first come, first served."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class TensorLock:
    """Held by user code while it reads or changes the averaged tensors, and by the averager while it averages them.

    A coroutine that waits for it blocks nobody else in its loop.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._queue: deque[concurrent.futures.Future[None]] = deque()

    def _take_ticket(self) -> concurrent.futures.Future[None]:
        ticket: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._mutex:
            if self._held:
                self._queue.append(ticket)
            else:
                self._held = True
                ticket.set_result(None)
        return ticket

    def _release(self) -> None:
        with self._mutex:
            while self._queue:
                ticket = self._queue.popleft()
                if ticket.set_running_or_notify_cancel():
                    ticket.set_result(None)
                    return
            self._held = False

    def _abandon(self, ticket: concurrent.futures.Future[None]) -> None:
        """The wait was interrupted; if it was granted meanwhile, the next one gets the lock."""
        if not ticket.cancel():
            self._release()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock in a thread."""
        ticket = self._take_ticket()
        try:
            ticket.result()
        except BaseException:
            self._abandon(ticket)
            raise
        try:
            yield
        finally:
            self._release()

    @asynccontextmanager
    async def hold_async(self) -> AsyncIterator[None]:
        """Hold the lock in a coroutine."""
        ticket = self._take_ticket()
        try:
            await asyncio.shield(asyncio.wrap_future(ticket))
        except asyncio.CancelledError:
            self._abandon(ticket)
            raise
        try:
            yield
        finally:
            self._release()
