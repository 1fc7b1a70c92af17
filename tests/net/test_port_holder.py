"""Who has a port: real sockets of this process and of another one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.net.tcp.listener import holder_of, port_in_use

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")

LISTEN = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    input()
"""


@on_linux
def test_the_process_of_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert holder_of(port) == os.getpid()
        assert port_in_use(port) == f"port {port} is in use: is an earlier run still running? (this process)"
    assert holder_of(port) is None
    other = subprocess.Popen([sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert holder_of(port) == other.pid
        assert port_in_use(port).endswith(f"? (process {other.pid})")
        other.communicate("\n")


@on_linux
def test_a_connection_that_uses_a_port_does_not_have_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as one:
        assert holder_of(one.getsockname()[1]) is None


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert holder_of(port, tmp_path) is None
        monkeypatch.setattr("sys.platform", "win32")
        assert port_in_use(port) == f"port {port} is in use: is an earlier run still running?"
