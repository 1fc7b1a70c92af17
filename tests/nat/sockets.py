"""Plain sockets of hosts in a laboratory, made in this process."""

from __future__ import annotations

import selectors
import socket
import time

from tests.computers import Computer, inside

LIMIT_SECONDS = 30.0
"""For what must happen, on a machine that does other things, too."""
ATTEMPT_SECONDS = 5.0
"""For one of several attempts."""
PATIENCE_SECONDS = 0.4
"""For what must not happen: several times as long as it would take."""


def new_socket(host: Computer, port: int = 0, *, six: bool = False, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket of that host, bound to a port that others may share."""
    with inside(host.namespace):
        made = socket.socket(socket.AF_INET6 if six else socket.AF_INET, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("", port))
    made.settimeout(LIMIT_SECONDS)
    return made


def listen(host: Computer, port: int, *, six: bool = False) -> socket.socket:
    """A server there."""
    server = new_socket(host, port, six=six)
    server.listen()
    return server


def call(host: Computer, address: str, port: int, *, source: int = 0, seconds: float = LIMIT_SECONDS) -> socket.socket:
    """Connect from that host; raises what the socket raises, :class:`TimeoutError` if nothing answers."""
    caller = new_socket(host, source, six=":" in address)
    try:
        caller.settimeout(seconds)
        caller.connect((address, port))
        caller.settimeout(LIMIT_SECONDS)
    except OSError:
        caller.close()
        raise
    return caller


def expect(answer: str, host: Computer, address: str, port: int) -> None:
    """Call an address that may not let in everybody: what comes of it must be ``open``, ``refused`` or ``silent``."""
    try:
        call(host, address, port, seconds=PATIENCE_SECONDS if answer == "silent" else LIMIT_SECONDS).close()
        found = "open"
    except ConnectionRefusedError:
        found = "refused"
    except TimeoutError:
        found = "silent"
    assert found == answer


def see(observer: Computer, caller: Computer, address: str, port: int, *, source: int) -> tuple[str, int]:
    """The address that a caller seems to have, as a listening observer sees it."""
    with (
        listen(observer, port, six=":" in address) as server,
        call(caller, address, port, source=source),
        server.accept()[0] as seen,
    ):
        return seen.getpeername()[:2]


def open_at_once(
    first: tuple[Computer, int], second: tuple[Computer, int], addresses: tuple[str, str], seconds: float
) -> bool:
    """Call each other from fixed ports again and again until both calls are through, or time is up.

    Args:
        first: one host and its port.
        second: the other one.
        addresses: of the first and the second, as they see each other; ports are kept.
        seconds: how long to try.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        six = ":" in addresses[0]
        with new_socket(*first, six=six) as here, new_socket(*second, six=six) as there:
            for one in (here, there):
                one.setblocking(False)
            here.connect_ex((addresses[1], second[1]))
            there.connect_ex((addresses[0], first[1]))
            # An attempt that hangs, because a router knows something of the one before, must not take all the time.
            if _both_connected(here, there, min(left, ATTEMPT_SECONDS)):
                return True
    return False


def _both_connected(here: socket.socket, there: socket.socket, seconds: float) -> bool:
    """False as soon as one is refused."""
    with selectors.DefaultSelector() as selector:
        for each in (here, there):
            selector.register(each, selectors.EVENT_WRITE)
        deadline = time.monotonic() + seconds
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                if here.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or there.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ERROR
                ):
                    return False
                selector.unregister(key.fileobj)
    return True
