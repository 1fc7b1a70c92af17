"""The bridge between threads and the background loop: closing, forking, interrupting and leaving."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shoal.base.reactor import Portal, Reactor
from shoal.base.tasks import cancel_and_wait, first_completed, run_in_worker
from shoal.errors import ReactorError

pytestmark = pytest.mark.oldest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal("test object")
    yield portal
    portal.close(5)


async def forever() -> None:
    await asyncio.Event().wait()


async def identity(value: Any) -> Any:
    return value


async def raises(error: Exception) -> None:
    raise error


# --- portals ---------------------------------------------------------------------------------------------------------


def test_call_and_submit_run_in_the_background_thread(portal: Portal) -> None:
    async def where() -> tuple[int, asyncio.AbstractEventLoop]:
        return threading.get_ident(), asyncio.get_running_loop()

    for thread, loop in (portal.call(where()), portal.submit(where()).result(5)):
        assert thread == Reactor.get().thread.ident != threading.get_ident()
        assert loop is Reactor.get().loop


def test_all_portals_share_one_reactor(portal: Portal) -> None:
    other = Portal("another object")
    assert other.reactor is portal.reactor is Reactor.get()
    assert [thread.name for thread in threading.enumerate()].count("shoal-reactor") == 1
    other.close(5)
    assert portal.call(identity(1)) == 1, "closing one object must not touch the others"


def test_errors_of_the_coroutine_reach_the_caller(portal: Portal) -> None:
    with pytest.raises(KeyError, match="missing"):
        portal.call(raises(KeyError("missing")))
    assert isinstance(portal.submit(raises(ZeroDivisionError())).exception(5), ZeroDivisionError)


def test_call_with_timeout_cancels_the_coroutine(portal: Portal) -> None:
    cancelled = threading.Event()

    async def note_cancellation() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        portal.call(note_cancellation(), timeout=0.05)
    assert cancelled.wait(5)


def test_cancelling_the_future_cancels_the_coroutine(portal: Portal) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def note_cancellation() -> None:
        started.set()
        try:
            await forever()
        finally:
            cancelled.set()

    future = portal.submit(note_cancellation())
    assert started.wait(5)
    assert future.cancel()
    assert cancelled.wait(5)


def test_blocking_call_from_inside_the_loop_is_refused(portal: Portal) -> None:
    async def block() -> None:
        portal.call(identity(1))

    with pytest.raises(ReactorError, match=r"blocking call of test object from inside .* deadlock"):
        portal.call(block(), timeout=5)

    async def do_not_block() -> Any:
        return await asyncio.wrap_future(portal.submit(identity(1)))

    assert portal.call(do_not_block(), timeout=5) == 1


def test_many_threads_may_use_one_portal(portal: Portal) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: portal.call(identity(i), timeout=10), range(400)))
    assert results == list(range(400))


# --- closing ---------------------------------------------------------------------------------------------------------


def test_close_resolves_every_future() -> None:
    portal = Portal("test object")
    futures = [portal.submit(forever()) for _ in range(20)]
    portal.close(5)
    assert portal.closed
    assert all(future.cancelled() for future in futures)


def test_close_wakes_a_thread_that_waits_in_call() -> None:
    portal = Portal("test object")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        started = threading.Event()

        async def wait_forever() -> None:
            started.set()
            await forever()

        waiting = pool.submit(lambda: portal.call(wait_forever()))
        assert started.wait(5)
        portal.close(5)
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result(5)


def test_close_resolves_futures_at_once_even_if_the_loop_is_busy() -> None:
    portal, release = Portal("test object"), threading.Event()

    async def block_the_loop() -> None:
        release.wait(10)  # blocks on purpose

    blocked = portal.submit(block_the_loop())
    waiting = portal.submit(forever())
    closing = portal.begin_close()
    try:
        assert waiting.cancelled()
        assert blocked.cancelled()
        assert not closing.done()
    finally:
        release.set()
    closing.result(5)


def test_goodbye_runs_once_and_in_the_loop_after_cancelled_work_has_cleaned_up() -> None:
    portal, events = Portal("test object"), []
    started = threading.Event()

    async def work() -> None:
        started.set()
        try:
            await forever()
        finally:
            events.append("work cancelled")

    async def goodbye() -> None:
        events.append(f"goodbye from {threading.current_thread().name}")

    portal.on_close(goodbye)
    portal.submit(work())
    assert started.wait(5)
    for _ in range(3):
        portal.close(5)
    assert events == ["work cancelled", "goodbye from shoal-reactor"]


def test_a_closed_portal_refuses_work_and_says_why() -> None:
    portal = Portal("test object")
    portal.close(5)
    for use in (portal.submit, portal.call):
        with pytest.raises(ReactorError, match="test object is shut down: create a new one"):
            use(identity(1))  # the refused coroutine must not warn that it was never awaited


def test_close_is_bounded_in_time_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    stuck, failing = Portal("stuck object"), Portal("failing object")
    stuck.on_close(forever)
    started = time.monotonic()
    stuck.close(0.1)
    assert time.monotonic() - started < 5
    stuck.begin_close().cancel()  # it would hang in the background of all other tests

    failing.on_close(lambda: raises(OSError("no route")))
    with caplog.at_level(logging.WARNING, logger="shoal"):
        failing.close(5)
    assert "failing object" in caplog.text
    assert "no route" in caplog.text


def test_close_from_inside_the_loop_does_not_block() -> None:
    portal, said_goodbye = Portal("test object"), threading.Event()

    async def goodbye() -> None:
        said_goodbye.set()

    async def close_from_inside() -> None:
        portal.close(None)

    portal.on_close(goodbye)
    other = Portal("another object")
    other.call(close_from_inside(), timeout=5)
    assert said_goodbye.wait(5)
    other.close(5)


# --- the loop itself -------------------------------------------------------------------------------------------------


def test_stopped_reactor_is_replaced_and_old_objects_say_so(caplog: pytest.LogCaptureFixture) -> None:
    portal = Portal("test object")
    future, old = portal.submit(forever()), portal.reactor
    leftover = asyncio.run_coroutine_threadsafe(forever(), old.loop)  # belongs to no portal
    old.stop()
    assert not old.thread.is_alive()
    assert old.loop.is_closed()
    assert future.cancelled()
    assert leftover.cancelled()
    assert portal.closed
    with pytest.raises(ReactorError):
        portal.submit(identity(1))
    portal.close(5)
    assert not caplog.records

    renewed = Portal("test object")
    assert renewed.reactor is not old
    assert renewed.call(identity(2)) == 2
    renewed.close(5)


def test_run_in_worker_leaves_the_loop_free(portal: Portal) -> None:
    release = threading.Event()

    async def both() -> int:
        heavy = asyncio.ensure_future(run_in_worker(release.wait, 10))
        await asyncio.sleep(0)
        release.set()  # only reached if the heavy work does not hold the loop
        assert await heavy
        return await run_in_worker(lambda a, b: a + b, 1, 2)

    assert portal.call(both(), timeout=5) == 3


def test_cancel_and_wait_returns_after_the_tasks_have_ended(portal: Portal) -> None:
    async def scenario() -> list[str]:
        events = []

        async def slow_to_leave() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(0)
                events.append("left")

        async def fails_on_the_way_out() -> None:
            try:
                await forever()
            finally:
                raise ValueError("this error is the task's own")

        tasks = [asyncio.create_task(slow_to_leave()), asyncio.create_task(fails_on_the_way_out())]
        await asyncio.sleep(0)
        await cancel_and_wait(*tasks)
        assert all(task.done() for task in tasks)
        return events

    assert portal.call(scenario(), timeout=5) == ["left"]


def test_first_completed_cancels_the_rest(portal: Portal) -> None:
    async def scenario() -> None:
        done, never = asyncio.Event(), asyncio.ensure_future(forever())
        done.set()
        await first_completed(done.wait(), never)
        assert never.cancelled()
        await first_completed(forever(), timeout=0.01)

    portal.call(scenario(), timeout=5)


# --- fork ------------------------------------------------------------------------------------------------------------


def refusal(use: Callable[[Coroutine[Any, Any, Any]], Any]) -> str:
    with pytest.raises(ReactorError) as error:
        use(identity(1))
    return str(error.value)


def in_forked_child(check: Callable[[Connection], None]) -> Any:
    """Run a function in a forked child and return what it sent; a child that hangs or fails, fails the test."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check(sender)
            code = 0
        finally:
            os._exit(code)  # not a second pytest
    sender.close()
    try:
        assert receiver.poll(10), "the forked child hangs"
        return receiver.recv()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        receiver.close()


@needs_fork
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_child_refuses_old_objects_and_gets_a_reactor_of_its_own(portal: Portal) -> None:
    portal.call(identity(0))

    def check(report: Connection) -> None:
        errors = [refusal(portal.submit), refusal(portal.call)]
        closed = portal.closed
        portal.close(None)  # must neither hang nor touch the parent
        fresh = Portal("child's object")
        report.send((errors, closed, fresh.call(identity(7), timeout=5), fresh.reactor is portal.reactor))
        fresh.close(5)

    errors, closed, result, same_reactor = in_forked_child(check)
    assert all("before fork" in error and "create a new one" in error for error in errors)
    assert closed
    assert result == 7
    assert not same_reactor
    assert not portal.closed
    assert portal.call(identity(8), timeout=5) == 8, "the parent's object goes on"


@needs_fork
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_fork_while_another_thread_holds_every_lock_does_not_hang_the_child(portal: Portal) -> None:
    def check(report: Connection) -> None:
        portal.close(None)
        fresh = Portal("child's object")
        report.send(fresh.call(identity(7), timeout=5))

    locked, release = threading.Event(), threading.Event()

    def hold_the_locks() -> None:
        with Reactor.lock, portal.lock:
            locked.set()
            release.wait(20)

    holder = threading.Thread(target=hold_the_locks)
    holder.start()
    assert locked.wait(5)
    try:
        assert in_forked_child(check) == 7
    finally:
        release.set()
        holder.join()


# --- whole interpreters ----------------------------------------------------------------------------------------------


def python(script: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run_python(script: str) -> str:
    process = python(script)
    try:
        output, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running after 30 s: {process.communicate()}")
    assert (process.returncode, errors) == (0, "")
    return output


def test_import_starts_no_thread_and_touches_no_signal_handler() -> None:
    run_python("""
        import signal, threading
        def handlers():
            return {number: signal.getsignal(number) for number in signal.valid_signals()}
        before = handlers()
        import shoal.base.reactor
        assert threading.active_count() == 1
        assert shoal.base.reactor.Reactor.current is None
        assert handlers() == before
        portal = shoal.base.reactor.Portal("test object")
        async def nothing(): pass
        portal.call(nothing())
        assert threading.active_count() == 2
        assert handlers() == before
        wakeup = signal.set_wakeup_fd(-1)
        assert wakeup == -1, wakeup
    """)


def test_exit_with_open_portals_is_fast_silent_and_says_goodbye() -> None:
    output = run_python("""
        import asyncio, atexit, functools, time
        def report():
            print(f"{time.monotonic() - leaving:.3f}")
        atexit.register(report)  # runs after shoal's own exit handler
        from shoal.base.reactor import Portal
        from shoal.base.tasks import run_in_worker
        async def forever():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
        async def nested():
            unknown_to_portals.append(asyncio.create_task(forever()))
            await run_in_worker(int)
        async def goodbye(number):
            await asyncio.sleep(0.05 * number)
            await run_in_worker(print, "goodbye", number)
        unknown_to_portals = []
        portals = [Portal(f"object {i}") for i in range(4)]
        for number, portal in enumerate(portals):
            portal.on_close(functools.partial(goodbye, number))
            portal.submit(forever())
            portal.call(nested())
        leaving = time.monotonic()
    """)
    *goodbyes, seconds = output.splitlines()
    assert goodbyes == [f"goodbye {i}" for i in (3, 2, 1, 0)], "what was made first may be used by the rest"
    assert float(seconds) < 15


def test_exit_does_not_wait_long_for_a_goodbye_that_hangs() -> None:
    output = run_python("""
        import asyncio, atexit, time
        atexit.register(lambda: print(f"{time.monotonic() - leaving:.3f}"))
        from shoal.base.reactor import Portal
        async def hang():
            await asyncio.Event().wait()
        portal = Portal("test object")
        portal.on_close(hang)
        leaving = time.monotonic()
    """)
    assert float(output) < 15


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to another process")
@pytest.mark.parametrize(
    "waiting",
    ["portal.call(forever())", "portal.call(forever(), timeout=60)", "portal.submit(forever()).result()"],
)
def test_ctrl_c_ends_a_script_that_waits(waiting: str) -> None:
    process = python(f"""
        import asyncio, signal
        from shoal.base.reactor import Portal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have it ignored
        async def forever():
            print("waiting", flush=True)
            await asyncio.Event().wait()
        portal = Portal("test object")
        try:
            {waiting}
        except KeyboardInterrupt:
            print("interrupted", portal.closed, flush=True)
    """)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
        assert time.monotonic() - interrupted < 15
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output, errors) == (0, "interrupted False\n", "")


def test_errors_that_reach_nobody_are_logged_but_for_the_end_of_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    portal = Portal("test")

    closed = RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def report(message: str, error: Exception = closed) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    try:
        portal.call(report("Fatal error on SSL protocol"))
        portal.call(report("Future exception was never retrieved", ConnectionResetError()))
        assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
        portal.call(report("something else"))
        portal.call(report("Future exception was never retrieved", ConnectionResetError(104, "reset by peer")))
        assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == [
            "something else",
            "Future exception was never retrieved",
        ]
    finally:
        portal.close(timeout=5)


def threads_of_libuv() -> int:
    """How many there are; other tests may have made some. On systems without this list: none."""
    names = [path.read_text(encoding="utf-8").strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("libuv-worker")


async def test_names_and_addresses_are_looked_up_without_threads_of_libuv():
    loop, before = asyncio.get_running_loop(), threads_of_libuv()
    for host in ("localhost", "127.0.0.1", None):
        found = await loop.getaddrinfo(host, 80, family=socket.AF_INET, type=socket.SOCK_STREAM)
        assert [each[4] for each in found] == [("127.0.0.1", 80)]
    with pytest.raises(socket.gaierror):
        await loop.getaddrinfo("no such name", 80)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as caller:
        caller.setblocking(False)
        await loop.sock_connect(caller, listener.getsockname())
    assert threads_of_libuv() == before
