"""Lines of the laboratory have their delay and rate, can be cut, and are removed whatever happens."""

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

from tests.computers import namespaces
from tests.nat.laboratory import NEEDS_LABORATORY, Host, Laboratory
from tests.nat.rules import Kind
from tests.nat.sockets import LIMIT_SECONDS, PATIENCE_SECONDS, call, expect, listen, new_socket

pytestmark = [NEEDS_LABORATORY, pytest.mark.timeout(200)]

PORT = 4001


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


def round_trip(first: Host, second: Host) -> float:
    with (
        new_socket(first, kind=socket.SOCK_DGRAM) as here,
        new_socket(second, PORT, kind=socket.SOCK_DGRAM) as there,
    ):
        began = time.monotonic()
        here.sendto(b"?", (second.outer, PORT))
        there.sendto(b"!", there.recvfrom(10)[1])
        here.recvfrom(10)
        return time.monotonic() - began


def test_any_two_lines_are_30_ms_from_each_other_unless_they_are_told_otherwise(lab: Laboratory) -> None:
    first, second, third = lab.host("public"), lab.host("public"), lab.host(Kind.CGNAT)
    far = lab.host("public", delay=0.1)
    assert round_trip(first, second) >= 0.060
    assert round_trip(third, second) >= 0.060
    assert round_trip(first, far) >= 0.230
    near = lab.host("public", delay=0.0)
    first.line.set_delay(0.0)
    assert min(round_trip(first, near) for _ in range(20)) < 0.060


def test_a_line_sends_no_faster_than_its_rate(lab: Laboratory) -> None:
    slow, fast = lab.host(Kind.PORT_RESTRICTED, megabits=8), lab.host("public")
    data, got = bytes(1_000_000), 0
    with listen(fast, PORT) as server, call(slow, fast.address, PORT) as here, server.accept()[0] as there:
        began = time.monotonic()
        here.setblocking(False)
        sent = here.send(data)
        here.settimeout(LIMIT_SECONDS)
        while got < len(data):
            if sent < len(data):
                sent += here.send(memoryview(data)[sent : sent + 50_000])
            got += len(there.recv(65536))
        seconds = time.monotonic() - began
    assert seconds > 0.8, "a megabyte takes a second"
    assert slow.line.carried_to(fast.line) > len(data)
    assert fast.line.carried_to(slow.line) < len(data) / 10


def test_a_line_that_is_cut_is_silent(lab: Laboratory) -> None:
    first, second = lab.host("public"), lab.host(Kind.PORT_RESTRICTED)
    with listen(first, PORT) as server, call(second, first.address, PORT) as there, server.accept()[0] as here:
        second.line.cut()
        here.sendall(b"late")
        there.settimeout(PATIENCE_SECONDS)
        with pytest.raises(TimeoutError):
            there.recv(10)
        expect("silent", second, first.address, PORT)
        second.line.mend()
        there.settimeout(LIMIT_SECONDS)
        assert there.recv(10) == b"late", "TCP repeats it"


def test_connections_of_a_pair_are_reset_and_others_are_not(lab: Laboratory) -> None:
    first, second, third = lab.host("public"), lab.host(Kind.PORT_RESTRICTED), lab.host("public")
    with listen(first, PORT) as server, call(third, first.address, PORT) as beside, server.accept()[0] as of_third:
        for host, other in ((first, second), (second, first)):
            with call(second, first.address, PORT) as there, server.accept()[0] as here:
                host.reset(f"dst {other.outer}")
                for end in (here, there):
                    end.settimeout(LIMIT_SECONDS)
                    with pytest.raises((ConnectionResetError, ConnectionAbortedError)):
                        end.recv(10)
        beside.sendall(b"!")
        of_third.settimeout(LIMIT_SECONDS)
        assert of_third.recv(10) == b"!"


def test_udp_can_be_blocked_everywhere(lab: Laboratory) -> None:
    first, second = lab.host("public"), lab.host(Kind.FULL_CONE)
    lab.wire.block_udp()
    with new_socket(first, PORT, kind=socket.SOCK_DGRAM) as there, new_socket(second, kind=socket.SOCK_DGRAM) as here:
        here.sendto(b"?", (first.address, PORT))
        there.settimeout(PATIENCE_SECONDS)
        with pytest.raises(TimeoutError):
            there.recv(10)
    with listen(first, PORT):
        expect("open", second, first.address, PORT)


# --- removal ----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
LIVE = """
from tests.nat.laboratory import Laboratory
with Laboratory() as lab:
    host = lab.host("CGNAT")
    host.start("-c", "import time; print('lives'); time.sleep(1000)").wait_for_line("lives", 100)
    print(lab.name, host.home.parent, flush=True)
    input()
"""


@pytest.fixture
def another() -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A process that has a laboratory, with its name and its folder."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LIVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
    ) as process:
        assert process.stdout
        name, homes = process.stdout.readline().split()
        assert process.poll() is None
        yield process, name, Path(homes)
        process.kill()


def left_of(name: str) -> list[str]:
    return [each for each in namespaces() if each.startswith(f"{name}-")]


def wires_of(name: str) -> list[psutil.Process]:
    words = {"tests.nat.wire", name}
    # Processes may end meanwhile; psutil then knows no words of theirs.
    return [each for each in psutil.process_iter(["cmdline"]) if words <= set(each.info["cmdline"] or ())]


def test_nothing_is_left_of_a_laboratory() -> None:
    with Laboratory() as lab:
        program = lab.host(Kind.CGNAT).start("-c", "input()")
        assert len(left_of(lab.name)) == 3
        home = program.process, lab.computers[0].home
    assert home[0].returncode is not None
    assert not home[1].parent.exists()
    assert not left_of(lab.name)
    assert not wires_of(lab.name)


def test_nothing_is_left_of_a_laboratory_whose_process_was_killed(
    another: tuple[subprocess.Popen[str], str, Path],
) -> None:
    process, name, homes = another
    [wire] = wires_of(name)
    process.send_signal(signal.SIGKILL)
    psutil.wait_procs([wire], LIMIT_SECONDS)
    assert not wire.is_running()
    assert not left_of(name)
    assert not homes.exists()


def test_the_next_laboratory_removes_what_is_left_if_the_wire_was_killed_too(
    another: tuple[subprocess.Popen[str], str, Path],
) -> None:
    process, name, homes = another
    [wire] = wires_of(name)
    wire.kill()
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs([wire], LIMIT_SECONDS)
    with Laboratory():  # or one of another process, if tests run elsewhere on this machine
        assert not left_of(name)
        assert not homes.exists()
