"""The detector of blocking calls finds them, and finds nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.base.reactor import Portal
from shoal.testing import run
from tests import blocking_calls

pytestmark = pytest.mark.oldest

BLOCKING = {
    "open": "open('/dev/null' if os.name == 'posix' else 'NUL').close()",
    "os.listdir": "os.listdir()",
    "socket.getaddrinfo": "socket.getaddrinfo('127.0.0.1', 1)",
    "socket.connect": "connect(1.0)",
    "subprocess.Popen": "subprocess.run([sys.executable, '-S', '-c', ''], check=True)",
    "time.sleep": "time.sleep(0.001)",
}
HARMLESS = ["connect(0)", "time.sleep(0)", "sum(range(1000))"]
PROGRAM = """
import os, socket, subprocess, sys, time

def connect(seconds):
    with socket.socket() as listener, socket.socket() as connection:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        connection.settimeout(seconds)
        connection.connect_ex(listener.getsockname())

def plainly():
    return {0}

async def in_a_coroutine():
    return {0}
"""


def shoal_code(expression: str) -> dict[str, Any]:
    """Functions that seem to be a part of shoal."""
    names: dict[str, Any] = {}
    exec(compile(PROGRAM.format(expression), f"{blocking_calls.SOURCE}/somewhere.py", "exec"), names)
    return names


@pytest.mark.parametrize("event", BLOCKING)
def test_blocking_calls_are_found(event: str) -> None:
    portal = Portal("test")
    try:
        portal.call(shoal_code(BLOCKING[event])["in_a_coroutine"]())
    finally:
        portal.close(timeout=5)
    assert any(each.startswith(event) for each in blocking_calls.found), blocking_calls.found
    blocking_calls.found.clear()


@pytest.mark.parametrize("event", BLOCKING)
async def test_in_a_loop_of_the_test_too(event: str) -> None:
    await shoal_code(BLOCKING[event])["in_a_coroutine"]()
    assert any(each.startswith(event) for each in blocking_calls.found), blocking_calls.found
    blocking_calls.found.clear()


@pytest.mark.parametrize("event", BLOCKING)
def test_in_virtual_time_too(event: str) -> None:
    run(shoal_code(BLOCKING[event])["in_a_coroutine"]())
    assert any(each.startswith(event) for each in blocking_calls.found), blocking_calls.found
    blocking_calls.found.clear()


@pytest.mark.parametrize("expression", HARMLESS)
async def test_other_calls_are_not(expression: str) -> None:
    await shoal_code(expression)["in_a_coroutine"]()
    assert blocking_calls.found == []


async def test_where_they_block_nobody() -> None:
    code = shoal_code(BLOCKING["open"])
    await asyncio.to_thread(code["plainly"])
    code["plainly"]()  # the test's own choice
    assert blocking_calls.found == []


def test_nor_where_the_loop_of_a_simulation_does_what_executors_do() -> None:
    run(asyncio.to_thread(shoal_code(BLOCKING["open"])["plainly"]))
    assert blocking_calls.found == []
