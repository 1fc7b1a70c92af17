"""Starts Python scripts in processes of their own that have imported torch already.

To import torch takes two seconds of pure computing. One process, the nursery, does so and nothing else. It forks for
each script: the child takes the arguments, the environment, the folder and the standard streams that it is given, and
becomes ``__main__`` as if Python had just started it. shoal is not imported before. No thread runs in the nursery, so a
fork is safe.

pytest ──socket──► nursery ──fork──► minder ──fork──► script
   ▲                                   │
   └──────── pipe: pid, exit status ───┘
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO

SUPPORTED = sys.platform == "linux"
"""Elsewhere a fork is no way to begin, or is not to be had."""
IMPORTED = (
    *("blake3", "cryptography.x509", "msgpack", "msgspec", "numpy", "psutil", "pydantic", "torch", "uvloop"),
    *("torch._dynamo", "torch.distributed", "torch.optim", "torch.utils.data"),
)
"""What shoal and scripts need; not shoal itself, which may look at the environment when it is imported."""
CLONE_NEWNET = 0x40000000
_ROOT = Path(__file__).parents[1]
_STATUS = struct.Struct("i")


def start(
    script: Path,
    arguments: Sequence[str],
    *,
    stderr: int,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    namespace: str = "",
) -> Process:
    """Run a script in a process of its own; its standard input and output are pipes.

    Args:
        script: its file.
        arguments: for the script.
        stderr: where its errors go.
        environment: all of it.
        cwd: the folder in which it runs.
        namespace: the network namespace in which it runs, by its name.
    """
    if SUPPORTED:
        return NurseryProcess(script, arguments, stderr, environment, cwd, namespace)
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=dict(environment),
        cwd=cwd,
    )


class NurseryProcess:
    """What tests use of :class:`subprocess.Popen`, for a script that the nursery has started."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        stderr: int,
        environment: Mapping[str, str],
        cwd: Path | None,
        namespace: str,
    ) -> None:
        request = {
            "script": str(script),
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": str(cwd or Path.cwd()),
            "namespace": namespace,
        }
        self.returncode: int | None = None
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        self._status, status = os.pipe()
        self._waiting = threading.Lock()
        try:
            Nursery.of_this_process().send(request, [stdin, stdout, stderr, status])
        finally:
            for descriptor in (stdin, stdout, status):
                os.close(descriptor)
        # Their user closes them, as with Popen.
        self.stdin: IO[str] | None = open(to_stdin, "w", encoding="utf-8")  # noqa: SIM115
        self.stdout: IO[str] | None = open(from_stdout, encoding="utf-8")  # noqa: SIM115
        self.pid = self._read_status()

    def _read_status(self) -> int:
        data = os.read(self._status, _STATUS.size)
        if not data:
            raise AssertionError("the process that starts scripts has died")
        return _STATUS.unpack(data)[0]

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raises :class:`subprocess.TimeoutExpired`."""
        with self._waiting:
            if self.returncode is None:
                if not _readable(self._status, timeout):
                    raise subprocess.TimeoutExpired(["script"], timeout or 0)
                self.returncode = self._read_status()
                os.read(self._status, 1)  # the end of the pipe: the minder is gone, too
                os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


Process = subprocess.Popen[str] | NurseryProcess


class Nursery:
    """The process that starts scripts, seen from the one that runs tests; it ends with it."""

    current: Nursery | None = None

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=_ROOT,
            )
        self.pid = self.process.pid

    @classmethod
    def of_this_process(cls) -> Nursery:
        if cls.current is None:
            cls.current = Nursery()
        return cls.current

    @classmethod
    def close(cls) -> None:
        """End it, if there is one."""
        if cls.current is not None:
            cls.current.socket.close()
            cls.current.process.wait()
            cls.current = None

    def send(self, request: object, descriptors: list[int]) -> None:
        data = json.dumps(request).encode()
        socket.send_fds(self.socket, [struct.pack("I", len(data))], descriptors)
        self.socket.sendall(data)


def is_it(pid: int) -> bool:
    return Nursery.current is not None and Nursery.current.pid == pid


# --- in the nursery ---------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> CodeType:
    """Start scripts until the test run ends; returns only in a process that has become a script, with its code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how minders end
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
        if not head:
            os._exit(0)
        data = b""
        while len(data) < struct.unpack("I", head)[0]:
            data += connection.recv(struct.unpack("I", head)[0] - len(data))
        if os.fork() == 0:
            connection.close()
            return _mind(json.loads(data), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _mind(request: dict, stdin: int, stdout: int, stderr: int, status: int) -> CodeType:
    """Tell who has asked when the script has begun and how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return _become(request, stdin, stdout, stderr)
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    os.write(status, _STATUS.pack(pid))
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(status, _STATUS.pack(ended))
    os._exit(0)


def _become(request: dict, *streams: int) -> CodeType:
    if request["namespace"]:
        with open(f"/run/netns/{request['namespace']}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {request['namespace']}")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the old one has seen the end of /dev/null
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - the old one seeks, if it was made for a file
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    sys.modules["numpy"].random.seed()  # the other generators are seeded anew by themselves
    return compile(Path(request["script"]).read_text(encoding="utf-8"), request["script"], "exec", dont_inherit=True)


def main() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # not here; the script will say so if it needs it
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules["__main__"] = script = ModuleType("__main__")
    script.__file__ = sys.argv[0]
    exec(code, vars(script))


if __name__ == "__main__":
    main()
