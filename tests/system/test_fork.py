"""Forked workers do not keep the connections of their parent open, and end as quietly as any process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.base.reactor import Portal
from shoal.p2p import P2P, Multiaddr
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "win32", reason="this system cannot fork"),
    pytest.mark.timeout(240),
]
NOTICE_LIMIT_SECONDS = 20.0
"""A connection that a worker keeps open stays for as long as the worker lives."""


@pytest.fixture
def own_port() -> Iterator[tuple[str, int]]:
    """A peer in this process: its address and port."""
    portal = Portal("test peer")
    p2p = portal.call(P2P.create())
    address = portal.call(p2p.get_visible_maddrs())[0]
    yield str(address), int(str(address["tcp"]))
    portal.call(p2p.shutdown())
    portal.close(5)


@pytest.fixture
def peer_with_worker(own_port: tuple[str, int]) -> Iterator[Peer]:
    peer = Peer("fork_a_worker.py", own_port[0])
    try:
        worker = psutil.Process(peer.wait_for("worker", START_LIMIT_SECONDS)["worker"])
        yield peer
        assert worker.is_running(), "the worker must be there all the time, or this tests nothing"
        worker.kill()
    finally:
        peer.close()


def connections_of(port: int) -> int:
    own = psutil.Process().net_connections("tcp")
    return sum(1 for c in own if c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED)


def wait_until_disconnected(port: int) -> None:
    deadline = time.monotonic() + NOTICE_LIMIT_SECONDS
    while connections_of(port):
        assert time.monotonic() < deadline, "the connection outlives its owner"
        time.sleep(0.02)


def test_death_of_peer_with_workers_is_noticed(own_port: tuple[str, int], peer_with_worker: Peer) -> None:
    assert connections_of(own_port[1]) > 0
    peer_with_worker.process.send_signal(signal.SIGKILL)
    wait_until_disconnected(own_port[1])


def test_workers_do_not_hold_closed_ports(own_port: tuple[str, int], peer_with_worker: Peer) -> None:
    peer_with_worker.tell("close")
    peer_with_worker.wait_for("closed", START_LIMIT_SECONDS)
    wait_until_disconnected(own_port[1])
    port = int(str(Multiaddr(peer_with_worker.wait_for("address", 1)["address"])["tcp"]))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the worker still listens for its parent"


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_exiting_child_does_not_crash(loop: str, tmp_path: Path) -> None:
    """It has the exit status that it has chosen, and the connections of the parent go on."""
    ways = {"exit": 3, "in a thread": 0, "multiprocessing": 3, "own nodes": 3}  # sys.exit only ends that thread
    results = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("talk.py")), str(results), *ways],
        env={**os.environ, "SHOAL_LOOP": loop},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert results.read_text(encoding="utf-8").splitlines()[1:] == [
        f"{way}: {status}, new connections: 0" for way, status in ways.items()
    ]
    assert done.stderr == ""
