"""The event loop of Windows over a selector: operations are begun and complete later, sockets cannot be watched.

Its upper half is the standard library's own (:class:`asyncio.proactor_events.BaseProactorEventLoop`), with whatever is
wrong in it. The lower half does with readiness what Windows does with completion ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import socket
import time
from asyncio import proactor_events
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

TICK = 0.015625
"""Seconds between two ticks of most clocks of Windows."""


class Operation(asyncio.Future):
    """Something begun on a socket. Cancelling it takes effect at once, as Windows does it."""

    withdraw: Callable[[Operation], None] | None = None

    def cancel(self, msg: object = None) -> bool:
        if self.withdraw is not None and not self.done():
            self.withdraw(self)
        return super().cancel(msg)


class Begun:
    """What waits for one socket, in the order in which it was begun: reading on the left, writing on the right."""

    def __init__(self, on: socket.socket) -> None:
        self.on = on
        self.descriptor = on.fileno()
        self.waiting: dict[int, deque[tuple[Operation, Callable[[], Any]]]] = {
            selectors.EVENT_READ: deque(),
            selectors.EVENT_WRITE: deque(),
        }

    @property
    def events(self) -> int:
        return sum(event for event, queue in self.waiting.items() if queue)


class SelectorProactor:
    """What :class:`asyncio.IocpProactor` offers, on top of a selector."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._begun: dict[int, Begun] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def set_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    # --- operations ---------------------------------------------------------------------------------------------------

    def recv(self, connection: socket.socket, nbytes: int, flags: int = 0) -> Operation:
        return self._begin(connection, selectors.EVENT_READ, lambda: connection.recv(nbytes, flags))

    def recv_into(self, connection: socket.socket, buffer: Any, flags: int = 0) -> Operation:
        def attempt() -> int:
            if not len(buffer) and not _is_readable(connection):  # nothing is read, as soon as there is something
                raise BlockingIOError
            return connection.recv_into(buffer, 0, flags) if len(buffer) else 0

        return self._begin(connection, selectors.EVENT_READ, attempt)

    def send(self, connection: socket.socket, buffer: Any, flags: int = 0) -> Operation:
        left = memoryview(buffer).cast("B")
        size = len(left)

        def attempt() -> int:
            nonlocal left
            while len(left):
                left = left[connection.send(left, flags) :]
            return size

        return self._begin(connection, selectors.EVENT_WRITE, attempt)

    def accept(self, listener: socket.socket) -> Operation:
        def attempt() -> tuple[socket.socket, Any]:
            connection, address = listener.accept()
            connection.settimeout(listener.gettimeout())
            return connection, address

        return self._begin(listener, selectors.EVENT_READ, attempt)

    def connect(self, connection: socket.socket, address: Any) -> Operation:
        is_begun = False

        def attempt() -> None:
            nonlocal is_begun
            if not is_begun:
                is_begun = True
                connection.connect(address)
                return
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))

        return self._begin(connection, selectors.EVENT_WRITE, attempt)

    def _begin(self, on: socket.socket, event: int, attempt: Callable[[], Any]) -> Operation:
        operation = Operation(loop=self._loop)
        begun = self._begun.get(on.fileno())
        if begun is None or begun.on is not on:
            begun = self._begun[on.fileno()] = Begun(on)  # the socket that had the descriptor before is closed
        if not begun.waiting[event] and self._try(operation, attempt):
            self._watch(begun)
            return operation
        entry = (operation, attempt)
        begun.waiting[event].append(entry)

        def withdraw(_: Operation) -> None:
            if entry in begun.waiting[event]:
                begun.waiting[event].remove(entry)
                self._watch(begun)

        operation.withdraw = withdraw
        self._watch(begun)
        return operation

    def _try(self, operation: Operation, attempt: Callable[[], Any]) -> bool:
        """Whether the operation has completed."""
        try:
            result = attempt()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            operation.set_exception(error)
        else:
            operation.set_result(result)
        return True

    def _watch(self, begun: Begun) -> None:
        """Let the selector look for what is waited for, unless the descriptor is that of another socket by now."""
        if self._begun.get(begun.descriptor) is not begun:
            return
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(begun.descriptor)
        if begun.events and begun.on.fileno() == begun.descriptor:
            self._selector.register(begun.descriptor, begun.events, begun)
        else:
            del self._begun[begun.descriptor]

    # --- for the loop -------------------------------------------------------------------------------------------------

    def select(self, timeout: float | None = None) -> list[Any]:
        for key, events in self._selector.select(timeout):
            begun: Begun = key.data
            for event, queue in begun.waiting.items():
                while events & event and queue and self._try(*queue[0]):
                    queue.popleft()
            self._watch(begun)
        return []

    def _stop_serving(self, listener: socket.socket) -> None:
        begun = self._begun.get(listener.fileno())
        for operation, _ in [*begun.waiting[selectors.EVENT_READ]] if begun is not None else []:
            operation.cancel()

    def close(self) -> None:
        self._selector.close()


def _is_readable(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


class PretendedProactorLoop(proactor_events.BaseProactorEventLoop):
    """``asyncio.ProactorEventLoop``."""

    def __init__(self) -> None:
        super().__init__(SelectorProactor())
        self._clock_resolution = TICK

    def time(self) -> float:
        return time.monotonic() // TICK * TICK

    def run_forever(self) -> None:
        self.call_soon(self._loop_self_reading)
        try:
            super().run_forever()
        finally:
            if self._self_reading_future is not None:
                self._self_reading_future.cancel()
                self._self_reading_future = None

    def _cannot_watch(self, *_: object) -> NoReturn:
        raise NotImplementedError

    add_reader = remove_reader = add_writer = remove_writer = _cannot_watch


def forgives(report: dict[str, Any]) -> bool:
    """Whether an error that reached nobody is the one of this loop at the end of a connection that a test has made.

    It shuts down what is over and forgets to close it; sockets of shoal do not mind.
    """
    transport = getattr(getattr(report.get("handle"), "_callback", None), "__self__", None)
    connection = getattr(transport, "_sock", None)
    if "_call_connection_lost" not in report["message"] or type(connection) is not socket.socket:
        return False
    connection.close()
    transport._called_connection_lost, transport._sock = True, None
    return True
