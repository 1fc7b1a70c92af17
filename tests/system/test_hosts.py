"""The laboratory itself: what other tests take for granted about hosts and their cables."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.hosts import NEEDS_HOSTS, Host, Network

pytestmark = [pytest.mark.xdist_group("hosts"), NEEDS_HOSTS, pytest.mark.timeout(400)]

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""
KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])).close()
except OSError as e:
    print("closed", type(e).__name__)
else:
    print("open")
"""
LIMIT = 120


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


def reaches(caller: Host, address: str, seconds: float = 20.0) -> bool:
    program = caller.start("-c", KNOCK, address, seconds)
    answer = program.wait_for_line("open|closed", LIMIT)[0]
    program.wait(LIMIT)
    return answer == "open"


def test_hosts_have_addresses_and_cables(network: Network) -> None:
    first, second, third = network.hosts
    for address in (first.address, first.address_6):
        echo = first.start("-c", ECHO, address)
        echo.wait_for_line("listening", LIMIT)
        assert reaches(second, address)
    first.pull_cable()
    assert not reaches(second, first.address, 0.3)
    first.plug_in()
    assert reaches(second, first.address)
    network.split(first, second)
    assert reaches(second, first.address)
    assert not reaches(third, first.address, 0.3)
    network.join()
    assert reaches(third, first.address)


def test_nothing_is_left_of_a_network() -> None:
    with Network(1) as network:
        [host] = network.hosts
        program = host.start("-c", "import os; print(os.getcwd()); input()")
        home = program.wait_for_line("/.*", LIMIT)[0]
        assert home == str(host.home)
    assert program.process.returncode is not None
    assert not Path(home).exists()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert network.name not in left


def test_source_address_of_the_default_route(network: Network) -> None:
    for host in network.hosts:
        code = 'import socket; s = socket.socket(type=2); s.connect(("192.0.2.1", 9)); print(s.getsockname()[0])'
        assert host.start("-c", code).wait_for_line(".+", LIMIT)[0] == host.address
