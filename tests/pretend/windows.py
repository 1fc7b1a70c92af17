"""What is different on Windows, as far as shoal can see it."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.pretend import views
from tests.pretend.proactor import TICK, PretendedProactorLoop

NO_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "uvloop")
NOT_IN_OS = frozenset(
    """
    O_CLOEXEC O_NOFOLLOW O_NONBLOCK WNOHANG chown fchmod fork forkpty getgid getloadavg getpgid getsid getuid
    geteuid killpg mkfifo openpty register_at_fork sched_getaffinity setsid sysconf uname wait4 waitid
    """.split()
)
NOT_IN_SOCKET = frozenset(
    """
    AF_UNIX MSG_DONTWAIT MSG_NOSIGNAL SCM_RIGHTS SO_BINDTODEVICE SO_REUSEPORT SOCK_CLOEXEC SOCK_NONBLOCK
    TCP_CONGESTION TCP_CORK TCP_INFO TCP_NOTSENT_LOWAT TCP_QUICKACK TCP_USER_TIMEOUT sethostname
    """.split()
)
NOT_IN_SIGNAL = frozenset(
    """
    SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 setitimer pthread_kill
    """.split()
)

O_BINARY = 1 << 28
SO_EXCLUSIVEADDRUSE = -5
exclusive: set[int] = set()
"""Descriptors of sockets whose port nobody else may have; for tests to look at."""


def begin() -> None:
    """Show the views of this system."""
    for name in NO_MODULES:
        views.show(name, None)
    text = TextFiles()
    views.look_at(
        os,
        NOT_IN_OS,
        {"name": "nt", "O_BINARY": O_BINARY, "open": text.open, "write": text.write, "fdopen": text.fdopen},
    )
    views.look_at(sys, (), {"platform": "win32"})
    views.look_at(socket, NOT_IN_SOCKET, {"SO_EXCLUSIVEADDRUSE": SO_EXCLUSIVEADDRUSE})
    views.look_at(select, ("poll", "epoll", "kqueue"))
    views.look_at(signal, NOT_IN_SIGNAL, {"CTRL_BREAK_EVENT": signal.SIGINT, "CTRL_C_EVENT": signal.SIGINT})
    views.look_at(time, (), {"time": coarse(time.time), "monotonic": coarse(time.monotonic)})
    views.look_at(asyncio, (), {"ProactorEventLoop": PretendedProactorLoop, "new_event_loop": PretendedProactorLoop})
    views.look_at(subprocess, (), {"CREATE_NEW_PROCESS_GROUP": CREATE_NEW_PROCESS_GROUP, "Popen": WindowsPopen})
    views.show("msvcrt", _msvcrt())
    _know_exclusive_ports()
    views.hand_out()


def coarse(clock: Callable[[], float]) -> Callable[[], float]:
    """A clock that moves on 64 times per second."""
    return lambda: clock() // TICK * TICK


class TextFiles:
    """Files opened by descriptor are text unless they are said to be binary: each line feed becomes two bytes."""

    def __init__(self) -> None:
        self._open, self._write, self._fdopen = os.open, os.write, os.fdopen
        self._text: set[int] = set()

    def open(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        descriptor = self._open(path, flags & ~O_BINARY, *arguments, **options)
        (self._text.discard if flags & O_BINARY else self._text.add)(descriptor)
        return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        if descriptor not in self._text:
            return self._write(descriptor, data)
        self._write(descriptor, _as_text(data))
        return len(data)

    def fdopen(self, descriptor: int, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if descriptor in self._text and mode == "wb":
            return io.BufferedWriter(_TextOutput(descriptor, mode))
        return self._fdopen(descriptor, mode, *arguments, **options)


class _TextOutput(io.FileIO):
    def write(self, data: Any) -> int:
        super().write(_as_text(data))
        return len(data)


def _as_text(data: Any) -> bytes:
    return bytes(data).replace(b"\n", b"\r\n")


CREATE_NEW_PROCESS_GROUP = 0x200


class WindowsPopen(subprocess.Popen):
    """Knows groups of processes and no sessions."""

    def __init__(self, *arguments: Any, creationflags: int = 0, start_new_session: bool = False, **options: Any):
        in_new_group = bool(creationflags & CREATE_NEW_PROCESS_GROUP)
        super().__init__(*arguments, **options, start_new_session=in_new_group)  # the other one has no effect there


def _msvcrt() -> ModuleType:
    """Locks of bytes of files; these are held by descriptors, as there."""
    module: Any = ModuleType("msvcrt")
    module.LK_NBLCK = 2
    module.LK_UNLCK = 0

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN if mode == module.LK_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB)

    module.locking = locking
    return module


def _know_exclusive_ports() -> None:
    setsockopt, share = socket.socket.setsockopt, socket.SO_REUSEPORT

    def knowing(self: socket.socket, level: int, option: int, *value: Any) -> None:
        if option == SO_EXCLUSIVEADDRUSE:
            exclusive.add(self.fileno())
            return
        setsockopt(self, level, option, *value)
        if (level, option) == (socket.SOL_SOCKET, socket.SO_REUSEADDR):  # a port with all who set it, listeners too
            setsockopt(self, level, share, *value)

    socket.socket.setsockopt = knowing
