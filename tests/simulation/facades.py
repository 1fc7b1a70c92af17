"""What users hold (a DHT, an optimizer) in virtual time: all of it is the real thing, and only the clock is not.

Such objects block the thread of their user while the loop works. Here, each user is a thread on a simulated host, and
of all threads, that of the loop included, only one runs at a time: a user that would block hands over to the loop, and
goes on when its time has come. So a run still depends on its seed alone.

::

    async def main() -> None:
        network = Network()
        host = network.add_host()

        def use() -> None:
            dht = shoal.DHT(start=True, transport=host.transport(), rng=host.rng)
            pause(10)

        with facades_in_virtual_time():
            await host.run(in_virtual_thread(use))
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from shoal.base.reactor import AwaitableFuture, Reactor
from shoal.testing import VirtualTimeLoop

T = TypeVar("T")

# A thread that waits for an event looks so often whether it is set, in virtual seconds.
GLANCE_SECONDS = 0.01

Wait = Callable[[], Any]
"""Makes a coroutine after which a thread goes on."""


class HostHasDied(BaseException):
    """Ends the thread of a user whose host is dead."""


class VirtualThread:
    """A thread that runs only while the loop stands still.

    Args:
        work: what it does.
        loop: the loop, which runs in the calling thread.
    """

    def __init__(self, work: Callable[[], Any], loop: VirtualTimeLoop) -> None:
        self._work, self._loop = work, loop
        self._turn, self._loop_turn = threading.Semaphore(0), threading.Semaphore(0)
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._wait: Wait | None = None
        self._is_dead = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)

    def _run(self) -> None:
        self._turn.acquire()
        asyncio._set_running_loop(self._loop)  # for the clock of this thread's host
        _current.thread = self
        try:
            if self._is_dead:
                raise HostHasDied
            self.outcome.set_result(self._work())
        except BaseException as e:
            self.outcome.set_exception(e)
        finally:
            asyncio._set_running_loop(None)
            self._wait = None
            self._loop_turn.release()

    def go_on(self) -> Wait | None:
        """Called by the loop: run until the thread blocks, or ends; returns what it waits for."""
        owner = self._loop.owner
        if self._thread.ident is None:
            self._thread.start()
        assert self._thread.ident is not None
        self._loop.owner = self._thread.ident
        try:
            self._turn.release()
            self._loop_turn.acquire()
        finally:
            self._loop.owner = owner
        return self._wait

    def block(self, wait: Wait) -> None:
        """Called by the thread: let the loop work until this is over."""
        if self._is_dead:
            raise HostHasDied
        self._wait = wait
        self._loop_turn.release()
        self._turn.acquire()
        if self._is_dead:
            raise HostHasDied

    def die(self) -> None:
        """Called by the loop: the thread ends."""
        self._is_dead = True
        while not self.outcome.done():
            self.go_on()


class _Current(threading.local):
    thread: VirtualThread | None = None


_current = _Current()


async def in_virtual_thread(work: Callable[[], T]) -> T:
    """Run a function of a user, which may block. Inside :func:`facades_in_virtual_time`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    thread = VirtualThread(work, loop)
    try:
        while (wait := thread.go_on()) is not None:
            await wait()
    except asyncio.CancelledError:
        thread.die()
        raise
    result: T = thread.outcome.result()
    return result


def pause(seconds: float) -> None:
    """Let virtual time pass. Called by a user."""
    thread = _current.thread
    assert thread is not None, "this thread is not in virtual time"
    thread.block(functools.partial(asyncio.sleep, seconds))


async def _wait_for(future: concurrent.futures.Future[Any], timeout: float | None) -> None:
    await asyncio.wait([asyncio.shield(asyncio.wrap_future(_follow(future)))], timeout=timeout)


def _follow(future: concurrent.futures.Future[Any]) -> concurrent.futures.Future[None]:
    """A future that is done when another one is. To cancel it leaves the other one alone."""
    follower: concurrent.futures.Future[None] = concurrent.futures.Future()

    def follow(_: object) -> None:
        if not follower.done():
            follower.set_result(None)

    future.add_done_callback(follow)
    return follower


_result_really, _wait_really = concurrent.futures.Future.result, threading.Event.wait


def _result(future: concurrent.futures.Future[Any], timeout: float | None = None) -> Any:
    thread = _current.thread
    if thread is None or future.done():
        return _result_really(future, timeout)
    thread.block(functools.partial(_wait_for, future, timeout))
    return _result_really(future, 0)


def _wait(event: threading.Event, timeout: float | None = None) -> bool:
    thread = _current.thread
    if thread is None:
        return _wait_really(event, timeout)
    loop = asyncio.get_running_loop()
    deadline = float("inf") if timeout is None else loop.time() + timeout
    while not event.is_set() and (left := deadline - loop.time()) > 0:
        pause(min(left, GLANCE_SECONDS))
    return event.is_set()


class _VirtualReactor:
    """The loop with virtual time, as a portal sees it."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.loop, self.pid = loop, os.getpid()
        self.portals: weakref.WeakSet[Any] = weakref.WeakSet()
        self.portal_numbers = itertools.count()
        self.thread = SimpleNamespace(is_alive=lambda: not loop.is_closed(), ident=loop.owner)

    def in_loop_thread(self) -> bool:
        return _current.thread is None


@contextlib.contextmanager
def facades_in_virtual_time() -> Iterator[None]:
    """Inside this context, whatever users hold works in the running loop, which has virtual time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    with (
        patch.object(Reactor, "current", _VirtualReactor(loop)),
        patch.object(concurrent.futures.Future, "result", _result),
        patch.object(AwaitableFuture, "result", _result),
        patch.object(threading.Event, "wait", _wait),
        patch.object(time, "monotonic", loop.time),
        patch.object(time, "perf_counter", loop.time),
    ):
        yield
