"""A lock on tensors that threads and coroutines share, first come, first served."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager


class _Ticket(concurrent.futures.Future[None]):
    """Someone who holds the lock, or waits for it; done when it is granted."""

    def __init__(self, tensors: frozenset[int] | None) -> None:
        super().__init__()
        self._tensors = tensors

    def excludes(self, other: _Ticket) -> bool:
        return self._tensors is None or other._tensors is None or not self._tensors.isdisjoint(other._tensors)


class TensorLock:
    """Held by user code while it reads or changes the averaged tensors, and by the averager while it averages them.

    A holder has all tensors, or some of them by index: holders of different tensors do not exclude each other. A
    coroutine that waits for it blocks nobody else in its loop.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        # Tickets of all that hold the lock or wait for it, in the order in which they came.
        self._tickets: list[_Ticket] = []

    def _take_ticket(self, tensors: Iterable[int] | None) -> _Ticket:
        ticket = _Ticket(None if tensors is None else frozenset(tensors))
        with self._mutex:
            self._tickets.append(ticket)
            self._grant()
        return ticket

    def _return(self, ticket: _Ticket) -> None:
        """It is not needed any more, or the wait was interrupted."""
        with self._mutex:
            self._tickets.remove(ticket)
            self._grant()

    def _grant(self) -> None:
        for position, ticket in enumerate(self._tickets):
            blocked = any(earlier.excludes(ticket) for earlier in self._tickets[:position])
            if not ticket.done() and not blocked:
                ticket.set_result(None)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold all tensors, in a thread."""
        ticket = self._take_ticket(None)
        try:
            ticket.result()
            yield
        finally:
            self._return(ticket)

    @asynccontextmanager
    async def hold_async(self, tensors: Iterable[int] | None = None) -> AsyncIterator[None]:
        """Hold tensors in a coroutine: those with the given indices, or all."""
        ticket = self._take_ticket(tensors)
        try:
            await asyncio.shield(asyncio.wrap_future(ticket))
            yield
        finally:
            self._return(ticket)
