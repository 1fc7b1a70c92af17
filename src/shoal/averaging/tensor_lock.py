"""A lock on tensors that threads and coroutines share, first come, first served.

Each request takes a ticket. A ticket is granted when no earlier ticket wants one of the same tensors.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager


class _Ticket(concurrent.futures.Future[None]):
    """A holder of the lock, or a waiter for it; done when the lock is granted."""

    def __init__(self, tensors: frozenset[int] | None) -> None:
        super().__init__()
        self._tensors = tensors

    def excludes(self, other: _Ticket) -> bool:
        return self._tensors is None or other._tensors is None or not self._tensors.isdisjoint(other._tensors)


class TensorLock:
    """Protects the averaged tensors. User code holds it to read or change them, the averager to average them.

    A holder locks all tensors, or some of them by index. Holders of different tensors do not exclude each other. A
    coroutine that waits for the lock does not block its loop.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.tickets: list[_Ticket] = []
        """Tickets of all holders and waiters, in order of arrival."""

    def _take_ticket(self, tensors: Iterable[int] | None) -> _Ticket:
        ticket = _Ticket(None if tensors is None else frozenset(tensors))
        with self._mutex:
            self.tickets.append(ticket)
            self._grant()
        return ticket

    def _return(self, ticket: _Ticket) -> None:
        """Give a ticket back, after its use or an interrupted wait, and grant the tickets that waited for it."""
        with self._mutex:
            self.tickets.remove(ticket)
            self._grant()

    def _grant(self) -> None:
        for position, ticket in enumerate(self.tickets):
            blocked = any(earlier.excludes(ticket) for earlier in self.tickets[:position])
            if not ticket.done() and not blocked:
                ticket.set_result(None)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold all tensors; for threads, not for coroutines."""
        ticket = self._take_ticket(None)
        try:
            ticket.result()
            yield
        finally:
            self._return(ticket)

    @asynccontextmanager
    async def hold_async(self, tensors: Iterable[int] | None = None) -> AsyncIterator[None]:
        """Hold the tensors with the given indices, or all; for coroutines."""
        ticket = self._take_ticket(tensors)
        try:
            # Shielded, so that a cancelled wait does not cancel the ticket while another thread grants it.
            await asyncio.shield(asyncio.wrap_future(ticket))
            yield
        finally:
            self._return(ticket)
