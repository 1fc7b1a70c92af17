"""Finds calls of shoal that would hold up the event loop: it may not sleep, read files, or wait for a name server.

Python announces such calls to audit hooks. What counts is what is called, not how long it takes, so the machine's speed
and load play no part. Test code may do what it likes; so may executors, which run no loop.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).parent.parent / "src" / "shoal")
SOURCE_OF_TOOLS = str(Path(SOURCE) / "testing")
TESTS = str(Path(__file__).parent)


def _always(_: tuple[Any, ...]) -> bool:
    return True


def _is_file(arguments: tuple[Any, ...]) -> bool:
    """Not a descriptor, nor a module that is being imported."""
    path = arguments[0]
    return isinstance(path, (str, bytes)) and not str(path).endswith((".py", ".pyc", ".so"))


def _waits(arguments: tuple[Any, ...]) -> bool:
    return arguments[0].gettimeout() != 0


Blocking = dict[str, Callable[[tuple[Any, ...]], bool]]
BLOCKING: Blocking = {
    "open": _is_file,
    "os.listdir": _always,
    "os.scandir": _always,
    "os.system": _always,
    "socket.connect": _waits,
    "socket.getaddrinfo": _always,
    "socket.gethostbyaddr": _always,
    "socket.gethostbyname": _always,
    "socket.sendto": _waits,
    "subprocess.Popen": _always,
    "tempfile.mkdtemp": _always,
    "tempfile.mkstemp": _always,
    "time.sleep": lambda arguments: arguments[0] > 0,
}
"""Audit events by name, with what has to hold for their arguments."""

found: list[str] = []
"""What was called, and from where."""


def _listen(event: str, arguments: tuple[Any, ...], blocking: Blocking = BLOCKING) -> None:
    """``blocking`` is an argument because events come until the process ends, when the module's own names are gone."""
    blocks = blocking.get(event)
    if blocks is None or asyncio._get_running_loop() is None or not blocks(arguments):
        return
    stack = [each for each in traceback.walk_stack(sys._getframe(1)) if each[0].f_code.co_filename != __file__]
    if any(frame.f_code.co_filename == "<frozen importlib._bootstrap>" for frame, _ in stack):
        return
    place, is_coroutine = "", False
    for frame, line in stack:
        code = frame.f_code
        if code.co_filename.startswith(SOURCE_OF_TOOLS):
            if place and is_coroutine:  # the loop of a simulation also runs what is for executors
                found.append(place)
            return
        if code.co_filename.startswith(SOURCE):
            place = place or f"{event}{arguments!r} called by {code.co_name}, {code.co_filename}:{line}"
            is_coroutine = bool(code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))
        elif code.co_filename.startswith(TESTS):
            if place and is_coroutine:  # a test that calls a plain function of shoal knows what it does
                found.append(place)
            return
    if place:
        found.append(place)


def watch() -> None:
    """Listen from now on; audit hooks cannot be taken away."""
    sys.addaudithook(_listen)
    if sys.version_info < (3, 13):  # older ones do not announce this
        time.sleep = _announced(time.sleep)


def _announced(sleep: Callable[[float], None]) -> Callable[[float], None]:
    def announced_sleep(seconds: float) -> None:
        sys.audit("time.sleep", seconds)
        sleep(seconds)

    return announced_sleep
