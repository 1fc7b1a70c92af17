"""What every test gets: ``async def`` tests, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests import blocking_calls, nursery, pretend
from tests.marks import keep_groups, mark_folders

pretend.begin(pretend.asked_for())  # before shoal is imported

from shoal.base.reactor import Reactor, new_event_loop  # noqa: E402
from shoal.net.limits import have_enough_files  # noqa: E402
from shoal.net.tcp.connect import EXCEPTIONS  # noqa: E402
from shoal.net.tcp.connect import VARIABLES as PROXIES  # noqa: E402
from tests.alone import LEAK_GRACE_SECONDS, run_alone  # noqa: E402

settings.register_profile("quick", deadline=None, max_examples=10)
# How long one example takes says little on a busy machine. There are few; `make fuzz` tries a million.
settings.register_profile("shoal", deadline=None, max_examples=40)
settings.load_profile("shoal")
blocking_calls.watch()
have_enough_files()  # here, so that no test's log has the line about a system that allows few

os.environ["SHOAL_HOST_MADDRS"] = "/ip4/127.0.0.1/tcp/0"  # tests keep to themselves, except for those about this
for name in (*PROXIES, *EXCEPTIONS):
    os.environ.pop(name, None)  # tests are their own internet
os.environ.setdefault("TORCH_WARM_POOL", "0")  # older versions start processes for a compiler that no test uses
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests and their processes share few cores

DESCRIPTORS = Path("/proc/self/fd")
MOST_TOLD = 20
"""Of what a test has left behind."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loop",
        choices=["uvloop", "asyncio"],
        default=os.environ.get("SHOAL_LOOP") or None,
        help="event loop of tests and of shoal, like SHOAL_LOOP; default: uvloop where it exists",
    )
    parser.addoption(
        "--pretend",
        choices=pretend.SYSTEMS,
        default=pretend.system or None,
        help="be another system, as far as shoal can see; see tests/pretend",
    )
    parser.addoption(
        "--variants",
        type=int,
        metavar="COUNT",
        help="of each test, run so many sets of parameters at most: the first ones and the last; default: all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start have the same loop, and hear of Ctrl-C even if a shell runs this in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--loop"):
        os.environ["SHOAL_LOOP"] = config.getoption("--loop")


def pytest_report_header() -> str:
    return f"pretends to be {pretend.system}" if pretend.system else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks come first: ``-m "not slow"`` selects by them, and the scheduler of pytest-xdist sorts by them."""
    mark_folders(config, items)
    yield
    keep_groups(config, items)
    if (most := config.getoption("--variants")) is not None:
        kept = _some_variants(items, most)
        config.hook.pytest_deselected(items=[*set(items).difference(kept)])
        items[:] = kept


def _some_variants(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Of each test, so many sets of parameters: the first ones and the last."""
    functions: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        functions.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    kept = {item for variants in functions.values() for item in [*variants[: most - 1], variants[-1]]}
    return [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """Set what has been collected aside: it is no garbage of a test, and no model that an optimizer looks for.

    These are most objects of the process. To look through all of them takes longer than many a test.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # shoal would warn that it does not see what a program has set aside
    # This saves time, too: pytest hands its handlers, six times in each test, to each logger that does not propagate.
    # torch has dozens of them.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def`` tests in a fresh event loop each."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    loop = new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_in_time(pyfuncitem, run_alone(pyfuncitem.obj(**arguments))))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()
    return True


async def _in_time(item: pytest.Function, test: Coroutine[Any, Any, None]) -> None:
    """Await a test for as long as it may take: pytest-timeout works by a signal, which a waiting uvloop ignores."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker is not None and marker.args else item.config.getini("timeout"))
    async with asyncio.timeout(limit or None):
        await test


class Belongings:
    """What this process holds at one moment: threads, child processes, internet sockets.

    And what runs in the background loop: what is not shut down would go on, and warn in the tests that follow.
    """

    def __init__(self) -> None:
        process = psutil.Process()
        self.threads = {thread for thread in threading.enumerate() if not _belongs_to_reactor(thread)}
        self.children = {child for child in _children_of(process) if not nursery.is_it(child.pid)}
        self.sockets = set(_sockets_of(process))
        reactor = Reactor.current
        self.tasks = set() if reactor is None else asyncio.all_tasks(reactor.loop)

    def beyond(self, before: Belongings) -> list[str]:
        threads = [f"thread {thread.name}" for thread in self.threads - before.threads]
        children = [f"process {child}" for child in self.children - before.children]
        sockets = [f"socket {laddr} -> {raddr or 'listening'}" for _, laddr, raddr in self.sockets - before.sockets]
        tasks = [f"task of {task.get_coro()}" for task in self.tasks - before.tasks]
        return threads + children + sockets + tasks


def _children_of(this_process: psutil.Process) -> list[psutil.Process]:
    """At any depth. To find them means to look at every process of the machine; the kernel knows at once of none."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []
    return this_process.children(recursive=True)


Ends = tuple[int, tuple[Any, ...], tuple[Any, ...]]
"""A descriptor, and the addresses here and there."""


def _sockets_of(this_process: psutil.Process) -> Iterator[Ends]:
    """Its internet sockets. psutil reads those of the whole machine, which are many after other tests."""
    if not DESCRIPTORS.is_dir():
        yield from ((s.fd, s.laddr, s.raddr) for s in this_process.net_connections("inet") if s.fd != -1)
        return
    for number in map(int, os.listdir(DESCRIPTORS)):
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode) and (ends := _ends_of(number)):
                yield ends


def _ends_of(number: int) -> Ends | None:
    one = socket.socket(fileno=number)
    try:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or not one.getsockname()[1]:
            return None
        here, there = one.getsockname()[:2], ()
        with contextlib.suppress(OSError):  # it is not connected
            there = one.getpeername()[:2]
        return number, here, there
    finally:
        one.detach()


def _belongs_to_reactor(thread: threading.Thread) -> bool:
    """The background loop and its executor live as long as the process."""
    return thread.name.startswith(("shoal-reactor", "shoal-worker"))


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a thread, a child process or a socket stays open."""
    before = Belongings()
    yield
    if request.node.get_closest_marker("leaves_something"):
        return
    deadline = time.monotonic() + LEAK_GRACE_SECONDS
    while left := Belongings().beyond(before):
        if time.monotonic() > deadline:
            others = f" and {len(left) - MOST_TOLD} more" if len(left) > MOST_TOLD else ""
            pytest.fail("left behind: " + "; ".join(left[:MOST_TOLD]) + others, pytrace=False)
        time.sleep(0.02)  # closing runs in the background; there is no event to wait for


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop() -> Iterator[None]:
    """Fail a test in which shoal called something in an event loop that blocks."""
    blocking_calls.found.clear()
    yield
    if blocking_calls.found:
        pytest.fail("blocking calls in an event loop: " + "; ".join(dict.fromkeys(blocking_calls.found)), pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The background loop itself must end when asked to."""
    nursery.Nursery.close()
    reactor = Reactor.current
    if reactor is not None:
        reactor.stop()
        assert not reactor.thread.is_alive(), "the reactor's thread did not end"
