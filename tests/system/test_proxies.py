"""Computers that reach the internet by a proxy alone train with others, and with each other through a relay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.computers import ip
from tests.drills import mostly_drills
from tests.system.hosts import NEEDS_HOSTS, Host, Network
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = [NEEDS_HOSTS, pytest.mark.timeout(400)]

LIMIT = 150
"""Seconds, on a machine that does other things, too."""
PORT = 3128
PROXY = Path(__file__).parents[1] / "net" / "small_proxy.py"


def make_public(host: Host, number: int) -> str:
    """Give a host a global address in a network of its own, in the place of the private one; returns it."""
    address = f"11.0.{number}.2"
    host.ip("addr", "flush", "dev", "eth0", "scope", "global")
    host.ip("addr", "add", f"{address}/24", "dev", "eth0")
    host.ip("route", "replace", "default", "dev", "eth0")
    return address


class Office:
    """Two computers: the gate, where the proxy runs, has a cable to the internet, and the desk has one to the gate."""

    def __init__(self, gate: Host, desk: Host, *, user: str = "", password: str = "") -> None:
        self.gate, self.desk = gate, desk
        desk.ip("link", "del", "eth0")
        ip("-n", gate.namespace, "link", "add", "inner", "type", "veth", "peer", "eth0", "netns", desk.namespace)
        for computer, device, number in ((gate, "inner", 1), (desk, "eth0", 2)):
            computer.ip("addr", "add", f"192.168.1.{number}/24", "dev", device)
            computer.ip("link", "set", device, "up")
        self.proxy = gate.start(PROXY, "--port", PORT, f"--user={user}", f"--password={password}")
        self.proxy.wait_for("serves", START_LIMIT_SECONDS)

    def train(self, variable: str, value: str, *options: object) -> Peer:
        return start_training(self.desk, *options, environment={variable: value})


def start_training(host: Host, *options: object, environment: dict[str, str] | None = None) -> Peer:
    peer = host.start("train.py", "--epochs", 1000, "--pause", 0.05, *options, environment=environment)
    peer.wait_for("ready", START_LIMIT_SECONDS)
    return peer


def train_together(peers: list[Peer], rounds: int = 3) -> None:
    """Until each has made some epochs with all others."""
    for peer in peers:
        peer.tell("go")
    for peer in peers:
        last = -1
        for _ in range(rounds):
            event = peer.wait_for(
                "epoch", LIMIT, lambda event, last=last: event["epoch"] > last and len(event["group"]) == len(peers)
            )
            last = event["epoch"]
        assert "Traceback" not in peer.errors(), peer.errors()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """The internet: one public host and two gates, and two desks that are not plugged in yet."""
    with Network(5) as network:
        for number, host in enumerate(network.hosts[:3], start=1):
            make_public(host, number)
        yield network.hosts


@pytest.mark.parametrize(
    "proxy",
    mostly_drills(
        [
            ("HTTPS_PROXY", "http://192.168.1.1:3128"),
            ("all_proxy", "socks5://us%65r:s%3Acret@192.168.1.1:3128"),
            ("ALL_PROXY", "socks5h://192.168.1.1:3128"),
            ("https_proxy", "http://user:s%3Acret@192.168.1.1:3128"),
        ],
        quick=2,
    ),
)
def test_two_offices_and_a_public_machine_train_together(hosts: list[Host], proxy: tuple[str, str]) -> None:
    """The two desks reach each other through the public machine, which is their relay."""
    public, *gates, first_desk, second_desk = hosts
    secret = {"user": "user", "password": "s:cret"} if "@" in proxy[1] else {}
    offices = [Office(*each, **secret) for each in zip(gates, (first_desk, second_desk), strict=True)]
    first = start_training(public)
    address = first.wait_for("address", 1)["address"]
    train_together([first, *(office.train(*proxy, "--initial-peers", address) for office in offices)])
    for office in offices:
        assert "11.0.1.2" in {event["asked"] for event in office.proxy.all("asked")}


def test_doctor_names_the_proxy(hosts: list[Host]) -> None:
    public, gate, _, desk, _ = hosts
    Office(gate, desk)
    address = start_training(public).wait_for("address", 1)["address"]
    for environment, expected, status in (
        ({}, "no route to that host", 1),
        ({"HTTPS_PROXY": "192.168.1.1:3128", "NO_PROXY": "example.org"}, r"proxy +http://192.168.1.1:3128", 0),
        ({"HTTPS_PROXY": "192.168.1.1:3128", "NO_PROXY": "11.0.0.0/8"}, "no route to that host", 1),
        ({"HTTPS_PROXY": "ftp://192.168.1.1"}, r"proxy +HTTPS_PROXY must be like", 1),
    ):
        doctor = desk.start("-m", "shoal.cli", "doctor", address, environment=environment)
        doctor.wait_for_line(expected, START_LIMIT_SECONDS)
        assert doctor.wait(START_LIMIT_SECONDS) == status, "\n".join(each["line"] for each in doctor.all("line"))
        assert "Traceback" not in doctor.errors(), doctor.errors()


def test_neighbours_in_the_office_need_no_proxy(hosts: list[Host]) -> None:
    office = Office(hosts[1], hosts[3])
    first = start_training(office.gate)
    addresses = first.wait_for("address", 1)
    private = addresses["address"].replace("11.0.2.2", "192.168.1.1")
    train_together([first, office.train("HTTPS_PROXY", "http://192.168.1.1:3128", "--initial-peers", private)])
    assert office.proxy.all("asked") == []
