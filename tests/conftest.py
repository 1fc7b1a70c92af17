"""What every test gets: ``async def`` tests, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests import blocking_calls, nursery, pretend

pretend.begin(pretend.asked_for())  # before shoal is imported

from shoal.p2p import tcp_stream  # noqa: E402
from shoal.reactor import new_event_loop  # noqa: E402
from tests.pretend.proactor import forgives  # noqa: E402

settings.register_profile("quick", deadline=None, max_examples=10)
settings.register_profile("shoal", deadline=None)  # how long one example takes says little on a busy machine
settings.load_profile("shoal")
blocking_calls.watch()

os.environ["SHOAL_HOST_MADDRS"] = "/ip4/127.0.0.1/tcp/0"  # tests keep to themselves, except for those about this
os.environ.setdefault("TORCH_WARM_POOL", "0")  # older versions start processes for a compiler that no test uses
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests and their processes share few cores

WITH_PROCESSES = {
    "tests/cli/": "commands",
    "tests/system/": "systems",
    "tests/lightning/test_distributed.py": "groups",
    "tests/lightning/test_equivalence.py": "groups",
    "tests/lightning/test_swarm.py": "groups",
    "tests/optim/test_multi_process.py": "groups",
}
"""Tests that start processes, which need the machine's cores: of each kind, one at a time."""
ON_HOSTS = ("tests/system/test_hosts.py", "tests/system/test_outages.py", "tests/system/test_two_machines.py")
"""Tests on hosts of their own mostly wait, so they may run beside those."""
SLOW = (
    *(*WITH_PROCESSES, *ON_HOSTS, "tests/fuzz/", "tests/simulation/"),
    *("tests/optim/test_memory.py", "tests/optim/test_two_sides.py"),
)
MOST_TOLD = 20
"""Of what a test has left behind."""
LEAK_GRACE_SECONDS = 3.0
"""Closing is asynchronous: what a test left is a leak only if it is still there after this time."""


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


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start have the same loop, and hear of Ctrl-C even if a shell runs this in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--loop"):
        os.environ["SHOAL_LOOP"] = config.getoption("--loop")


def pytest_report_header() -> str:
    return f"pretends to be {pretend.system}" if pretend.system else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks come first: ``-m "not slow"`` selects by them, and the scheduler of pytest-xdist sorts by them."""
    for item in items:
        path = item.path.relative_to(item.config.rootpath).as_posix()
        if path.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if path.startswith(ON_HOSTS):
            item.add_marker(pytest.mark.xdist_group("hosts"))
            continue
        for start, group in WITH_PROCESSES.items():
            if path.startswith(start):
                item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def`` tests in a fresh event loop each."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    loop = new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_run_alone(pyfuncitem.obj(**arguments)))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()
    return True


async def _run_alone(test) -> None:
    """Await the test; tasks that outlive it are a leak of the test or of the code under test.

    What the loop reports to its exception handler is an error that reached nobody.
    """
    reported: list[str] = []

    def note(_: asyncio.AbstractEventLoop, report: dict[str, Any]) -> None:
        if not forgives(report):
            reported.append(str(report))

    asyncio.get_running_loop().set_exception_handler(note)
    try:
        await test
        deadline = time.monotonic() + LEAK_GRACE_SECONDS
        while (left := asyncio.all_tasks() - {asyncio.current_task()}) and time.monotonic() < deadline:
            await asyncio.wait(left, timeout=0.05)
        assert not left, f"the test left running tasks behind: {left}"
        assert not reported, f"errors that reached nobody: {reported}"
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class Belongings:
    """What this process holds at one moment: threads, child processes, internet sockets, entries of their owners."""

    def __init__(self) -> None:
        process = psutil.Process()
        self.threads = {thread for thread in threading.enumerate() if not _belongs_to_reactor(thread)}
        self.children = {child for child in process.children(recursive=True) if not nursery.is_it(child.pid)}
        self.owned = set(tcp_stream._owners)
        self.sockets = {(s.fd, s.laddr, s.raddr) for s in process.net_connections("inet") if s.fd != -1}

    def beyond(self, before: Belongings) -> list[str]:
        threads = [f"thread {thread.name}" for thread in self.threads - before.threads]
        children = [f"process {child}" for child in self.children - before.children]
        sockets = [f"socket {laddr} -> {raddr or 'listening'}" for _, laddr, raddr in self.sockets - before.sockets]
        owned = [f"entry of {tcp_stream._owners.get(fd)} as owner of {fd}" for fd in self.owned - before.owned]
        return threads + children + sockets + owned


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
    from shoal.reactor import Reactor

    reactor = Reactor._current
    if reactor is not None:
        reactor.stop()
        assert not reactor.thread.is_alive(), "the reactor's thread did not end"
