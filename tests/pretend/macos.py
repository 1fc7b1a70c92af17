"""What is different on macOS, as far as shoal can see it."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
from typing import Any

from tests.pretend import views

NOT_IN_OS = frozenset(
    """
    O_TMPFILE memfd_create sched_getaffinity sched_setaffinity
    """.split()
)
NOT_IN_SOCKET = frozenset(
    """
    MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE TCP_CONGESTION TCP_CORK TCP_INFO TCP_KEEPIDLE
    TCP_QUICKACK TCP_USER_TIMEOUT
    """.split()
)
_TCP_INFO, _CLOSED, _SEGMENTS_OUT = 11, 7, 136


def begin() -> None:
    """Show the views of this system."""
    views.look_at(os, NOT_IN_OS)
    views.look_at(sys, (), {"platform": "darwin"})
    views.look_at(socket, NOT_IN_SOCKET, {"TCP_KEEPALIVE": socket.TCP_KEEPIDLE})
    views.look_at(select, ("epoll",), {"poll": Poll})
    _change_sockets()
    views.hand_out()


class Poll:
    """``select.poll``, with which nothing is told of a descriptor that is registered for no events."""

    def __init__(self) -> None:
        self._poll = select.poll()

    def register(self, descriptor: Any, events: int = select.POLLIN | select.POLLPRI | select.POLLOUT) -> None:
        if events:
            self._poll.register(descriptor, events)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        return self._poll.poll(timeout)


def is_over(connection: socket.socket) -> bool:
    """Whether this socket had a connection that has been reset."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SEGMENTS_OUT + 4)
    except OSError:  # not TCP
        return False
    return info[0] == _CLOSED and struct.unpack_from("I", info, _SEGMENTS_OUT)[0] > 0


def _change_sockets() -> None:
    setsockopt = socket.socket.setsockopt

    def as_on_macos(self: socket.socket, level: int, option: int, *value: Any) -> None:
        if is_over(self):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        setsockopt(self, level, option, *value)
        if (level, option) == (socket.SOL_SOCKET, socket.SO_REUSEADDR):  # all networks, and one of them, may overlap
            setsockopt(self, level, socket.SO_REUSEPORT, *value)

    socket.socket.setsockopt = as_on_macos
