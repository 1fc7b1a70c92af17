"""The background event loop of this process, and the only bridge between threads and coroutines.

One daemon thread runs one event loop (uvloop where it exists) for all DHTs, averagers and trackers of the process.
It starts at first use, never at import, and touches no signal handler. It belongs to one process: after ``fork`` the
child gets a new one at first use, and objects made by the parent raise an error there instead of hanging.

Each facade talks to the loop through a :class:`Portal` of its own. The portal keeps track of what is in flight, so
closing the facade resolves every future that it has handed out.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import ipaddress
import itertools
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ClassVar, TypeVar

from shoal.base.logs import setting, show_own_lines
from shoal.errors import ReactorError

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Valid values of ``SHOAL_LOOP``.
LOOPS = ("uvloop", "asyncio")

# How long the loop waits at its end for cancelled tasks to clean up. Chosen.
TASK_GRACE_SECONDS = 0.2


# A blocking wait wakes up this often, so that an interrupt gets noticed. Chosen.
SECONDS_AT_A_TIME = 0.5


class AwaitableFuture(concurrent.futures.Future[T]):
    """A future that can be used from any thread and awaited in any event loop.

    Cancelling a task that awaits it cancels the future too; ``asyncio.shield`` prevents that.
    """

    def result(self, timeout: float | None = None) -> T:
        """Like the base class, but soon notices even an interrupt (Ctrl-C) that comes just before the wait begins.

        Python itself would notice such an interrupt only when the wait is over.
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
        """Does nothing: these futures live in one process, and need no thread or pipe of their own."""


def in_thread(work: Callable[[], T]) -> AwaitableFuture[T]:
    """Run a function in a new thread that does not keep the interpreter from exiting."""
    outcome: AwaitableFuture[T] = AwaitableFuture()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(work())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=run, name="shoal-work", daemon=True).start()
    return outcome


MPFuture = AwaitableFuture
"""The inherited name of :class:`AwaitableFuture`."""
ALL_STATES = ("PENDING", "RUNNING", "FINISHED", "CANCELLED", "CANCELLED_AND_NOTIFIED")
"""The states of a future of :mod:`concurrent.futures`."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new event loop: the one that ``SHOAL_LOOP`` names, else uvloop where it exists.

    Without uvloop it is the system's most suitable loop. The event loop policy of the process is ignored: on Windows,
    Jupyter's policy chooses a loop with at most 512 sockets.

    Raises:
        ValueError: ``SHOAL_LOOP`` names an unknown loop, or one that is not installed.
    """
    return loop_factory()()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The factory of the loop that the user has asked for."""
    keep_standard_descriptors()
    wanted = setting("LOOP")
    if wanted not in ("", *LOOPS):
        raise ValueError(f"SHOAL_LOOP must be one of {', '.join(LOOPS)}, got {wanted!r}")
    if wanted != "asyncio":
        try:
            return _uvloop()
        except ImportError:  # Windows, PyPy
            if wanted:
                raise ValueError(f"SHOAL_LOOP is {wanted}, which is not installed here: try asyncio") from None
    if sys.platform == "win32":
        return asyncio.ProactorEventLoop
    return asyncio.SelectorEventLoop


def _is_address(host: object, family: int) -> bool:
    """Whether a host is an IP address of this family (0 = any), so that there is nothing to look up."""
    try:
        version = ipaddress.ip_address(str(host)).version
    except ValueError:
        return False
    return family in (0, socket.AF_INET if version == 4 else socket.AF_INET6)


@functools.cache
def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop without libuv's threads, which it uses only to look up names and for each ``sock_connect``.

    At the end of a process, libuv joins its threads. In a forked child they do not exist, so it would crash.
    """
    import uvloop

    class Loop(uvloop.Loop):
        async def getaddrinfo(
            self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
        ) -> list[Any]:
            if _is_address(host, family):
                # uvloop needs no thread if it knows the kind of the socket, which makes no difference to sock_connect.
                kind = type or socket.SOCK_STREAM
                return await super().getaddrinfo(host, port, family=family, type=kind, proto=proto, flags=flags)
            look_up = functools.partial(socket.getaddrinfo, host, port, family, type, proto, flags)
            found: list[Any] = await self.run_in_executor(None, look_up)
            return found

    return Loop


def keep_standard_descriptors() -> None:
    """Open the null device in place of each closed standard stream; many daemons close theirs.

    Otherwise the next socket or pipe gets its number. Output of other libraries would be sent over it, and libuv ends
    the process when it closes a descriptor with such a number.
    """
    if sys.platform == "win32":
        return
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(opened, number)
                os.close(opened)


def switch_to_uvloop() -> asyncio.AbstractEventLoop:
    """Make a new event loop (uvloop where it exists), and make it the current one of this thread."""
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


async def _end_remaining_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=TASK_GRACE_SECONDS)


def is_harmless(report: dict[str, Any]) -> bool:
    """Whether what a loop reports is one of two errors of uvloop that are over before anybody could handle them.

    It fails to write the last TLS data when the connection has just ended: the stream learns of the end anyway. And if
    a dial is cancelled just before the TLS handshake, nobody waits for the end of that handshake.
    """
    error, message = report.get("exception"), report.get("message")
    if message == "Fatal error on SSL protocol":
        return isinstance(error, RuntimeError)
    is_bare = type(error) is ConnectionResetError and not error.args  # those of sockets have a number
    return message == "Future exception was never retrieved" and is_bare


def _report(loop: asyncio.AbstractEventLoop, report: dict[str, Any]) -> None:
    """Log uncaught errors in the usual way, except for those that are harmless."""
    if is_harmless(report):
        logger.debug("a connection ended while TLS was at work on it: %r", report.get("exception"))
    else:
        loop.default_exception_handler(report)


class Reactor:
    """The loop and its thread. Use :meth:`get`; do not construct."""

    current: ClassVar[Reactor | None] = None
    """That of this process, if there is one."""
    lock: ClassVar[threading.Lock] = threading.Lock()
    """Held while it is made."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.portals: weakref.WeakSet[Portal] = weakref.WeakSet()
        self.portal_numbers = itertools.count()
        made: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self.thread = threading.Thread(target=self._run, args=(loop_factory(), made), name="shoal-reactor", daemon=True)
        self.thread.start()
        self.loop = made.result()

    @classmethod
    def get(cls) -> Reactor:
        """The reactor of this process; starts one if there is none."""
        with cls.lock:
            if cls.current is None or not cls.current.thread.is_alive():
                show_own_lines()
                cls.current = cls()
            return cls.current

    def _run(
        self,
        make_loop: Callable[[], asyncio.AbstractEventLoop],
        made: concurrent.futures.Future[asyncio.AbstractEventLoop],
    ) -> None:
        """Make the loop and run it.

        It is made in this thread because on Windows a loop made in the main thread takes over that thread's wake-up for
        Ctrl-C.
        """
        try:
            loop = make_loop()
        except BaseException as e:  # there may be no sockets left
            made.set_exception(e)
            return
        loop.set_exception_handler(_report)
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(thread_name_prefix="shoal-worker"))
        asyncio.set_event_loop(loop)
        made.set_result(loop)
        try:
            loop.run_forever()
            # Otherwise asyncio would complain about each task when it is collected.
            loop.run_until_complete(_end_remaining_tasks())
        finally:
            loop.close()

    def in_loop_thread(self) -> bool:
        """Whether the caller runs inside the loop, where blocking would deadlock."""
        return threading.get_ident() == self.thread.ident

    def stop(self, grace: float = 1.0) -> None:
        """Close all open portals and end the thread. Called at interpreter exit and by tests.

        Args:
            grace: seconds that open objects have to leave their swarms.
        """
        if self.pid != os.getpid() or not self.thread.is_alive():
            return
        deadline = time.monotonic() + grace
        portals = [portal for portal in self.portals if not portal.closed]
        # Newest first, so that averagers close before their DHT.
        for portal in sorted(portals, key=lambda portal: portal.number, reverse=True):
            left = deadline - time.monotonic()
            # At most half of the time left, so that the remaining portals get some, too.
            concurrent.futures.wait([portal.begin_close()], timeout=max(0.0, left / 2))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(max(2 * TASK_GRACE_SECONDS, deadline - time.monotonic()))


def _forget_after_fork() -> None:
    Reactor.current = None
    Reactor.lock = threading.Lock()


def _stop_at_exit() -> None:
    if Reactor.current is not None:
        Reactor.current.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_stop_at_exit)


async def _no_goodbye() -> None:
    return None


def _run_in(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T]) -> AwaitableFuture[T]:
    """Run a coroutine in another thread's loop, like ``run_coroutine_threadsafe``, but with a future to await."""
    future: AwaitableFuture[T] = AwaitableFuture()

    def start() -> None:
        task = loop.create_task(coro)
        task.add_done_callback(functools.partial(_resolve, future))
        # A partial, because a closure would make a reference cycle, which keeps results alive.
        future.add_done_callback(functools.partial(_cancel, loop, task))

    loop.call_soon_threadsafe(start)
    return future


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
    if future.cancelled() and not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)


def _resolve(future: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        future.cancel()
    error = None if task.cancelled() else task.exception()
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(task.result())
    else:
        future.set_exception(error)


class Portal:
    """One object's access to the reactor.

    Args:
        owner: name of the object in error messages, such as ``"DHT"``.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.reactor = Reactor.get()
        self.number = next(self.reactor.portal_numbers)
        self.reactor.portals.add(self)
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self.lock = threading.RLock()
        """Re-entrant, because a finaliser may close this portal while the same thread is inside :meth:`submit`."""
        self._goodbye: Callable[[], Coroutine[Any, Any, None]] = _no_goodbye
        self._closing: concurrent.futures.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """True once closing has begun, or in a forked child."""
        return self._closing is not None or self.reactor.pid != os.getpid() or not self.reactor.thread.is_alive()

    def on_close(self, goodbye: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Set the coroutine function that releases the owner's resources; it runs once, inside the loop."""
        self._goodbye = goodbye

    def check(self) -> None:
        """Raise :class:`ReactorError` if the loop belongs to another process or has ended."""
        if self.reactor.pid != os.getpid():
            raise ReactorError(
                f"this {self.owner} was made in process {self.reactor.pid} before fork and cannot work in process "
                f"{os.getpid()}: create a new one after the fork"
            )
        if not self.reactor.thread.is_alive():
            raise ReactorError(f"this {self.owner} is closed: the background loop has ended")

    def check_open(self) -> None:
        """Like :meth:`check`, but raise :class:`ReactorError` also if the owner was shut down."""
        self.check()
        if self._closing is not None:
            raise ReactorError(f"this {self.owner} is shut down: create a new one")

    def submit(self, coro: Coroutine[Any, Any, T]) -> AwaitableFuture[T]:
        """Run a coroutine in the loop. Cancelling the returned future cancels it; any loop may await the future.

        Raises:
            ReactorError: the owner was shut down, or belongs to the parent of this forked process.
        """
        try:
            # Before taking the lock: in a forked child its holder may not exist any more.
            self.check()
            with self.lock:
                self.check_open()
                future = _run_in(self.reactor.loop, coro)
                self._pending.add(future)
                if self.closed:
                    future.cancel()
        except ReactorError:
            coro.close()
            raise
        future.add_done_callback(self._pending.discard)
        return future

    def call(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine in the loop and wait for its result.

        Raises:
            ReactorError: as for :meth:`submit`, or the caller runs inside the loop, which would wait for itself.
            TimeoutError: the coroutine was not done in time; it is cancelled.
        """
        if self.reactor.pid == os.getpid() and self.reactor.in_loop_thread():
            coro.close()
            raise ReactorError(
                f"blocking call of {self.owner} from inside shoal's event loop would deadlock: await the async form "
                "instead, or ask for a future"
            )
        future = self.submit(coro)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def begin_close(self) -> concurrent.futures.Future[None]:
        """Start closing: cancel all that is in flight, then run the goodbye. Idempotent."""
        if self.reactor.pid != os.getpid() or not self.reactor.thread.is_alive():
            closed: concurrent.futures.Future[None] = concurrent.futures.Future()
            # No lock here: after a fork a thread that does not exist may hold it.
            closed.set_result(None)
            return closed
        with self.lock:
            if self._closing is None:
                # Cancel the futures from this thread, so that they resolve at once even if the loop is busy.
                for future in list(self._pending):
                    future.cancel()
                self._closing = asyncio.run_coroutine_threadsafe(self._close(), self.reactor.loop)
            return self._closing

    async def _close(self) -> None:
        try:
            await self._goodbye()
        except Exception as e:
            logger.warning("closing %s: %s: %s", self.owner, type(e).__name__, e)

    def close(self, timeout: float | None) -> None:
        """Close and wait up to ``timeout`` seconds; never raises, never hangs, may be called from the loop itself."""
        closing = self.begin_close()
        if self.reactor.in_loop_thread() and self.reactor.pid == os.getpid():
            return  # the goodbye runs as soon as the caller yields
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            closing.result(timeout)
