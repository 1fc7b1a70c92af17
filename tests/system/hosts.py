"""Hosts in network namespaces of this machine, on one switch, with cables that can be pulled.

    with Network(3) as network:
        first, second, third = network.hosts
        seed = first.start("keep_training.py", "--seed", 0)  # see tests.system.swarm.Peer
        second.pull_cable()
        ...
        second.plug_in()

Each host has a loopback interface of its own, and an ``eth0`` with an IPv4 and an IPv6 address and a default route, so
that it looks like a computer in a house. A cable is pulled at the switch: ``eth0`` keeps its addresses and has no
carrier. Leaving the block ends all programs and removes everything, and so does the next block if this process is
killed. Needs root and iproute2; tests say ``pytestmark = NEEDS_HOSTS``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType

import pytest

from tests.computers import CAN_MAKE_COMPUTERS, Computer, ip, new_homes, new_name, remove_leftovers, remove_of

SUBNET = "10.88.0"
SUBNET_6 = "fd88:"
NEEDS_HOSTS = pytest.mark.skipif(not CAN_MAKE_COMPUTERS, reason="network namespaces need Linux, root and iproute2")


class Host(Computer):
    """One computer on the network; made by :class:`Network`.

    Args:
        network: where it is plugged in.
        number: the last part of its addresses, from 2; the network's router is 1.
        home: a folder that is home to whoever runs programs here.
    """

    def __init__(self, network: Network, number: int, home: Path) -> None:
        super().__init__(f"{network.name}-{number}", home)
        self._switch, self._port = network.switch, f"port{number}"
        ip("-n", self._switch, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self.namespace)
        ip("-n", self._switch, "link", "set", self._port, "master", "side0", "up")
        self.address = self.address_6 = ""
        self.set_address(number)

    def set_address(self, number: int) -> None:
        """Take other addresses, as a laptop does in another network; connections of the old ones are dead."""
        if self.address:
            self.ip("addr", "flush", "dev", "eth0", "scope", "global")
        self.address, self.address_6 = f"{SUBNET}.{number}", f"{SUBNET_6}:{number}"
        self.ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        self.ip("addr", "add", f"{self.address_6}/64", "dev", "eth0", "nodad")
        self.ip("link", "set", "eth0", "up")
        self.ip("route", "replace", "default", "via", f"{SUBNET}.1")
        self.ip("-6", "route", "replace", "default", "via", f"{SUBNET_6}:1")

    def pull_cable(self) -> None:
        """From now on nothing arrives and nothing leaves; connections stay until somebody notices."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def plug_in(self) -> None:
        """Undo :meth:`pull_cable`."""
        ip("-n", self._switch, "link", "set", self._port, "up")

    def move_to_side(self, side: int) -> None:
        """Sides 0 and 1 of the switch are apart from each other; every host begins on side 0."""
        ip("-n", self._switch, "link", "set", self._port, "master", f"side{side}")


class Network:
    """Hosts that reach each other; leaving the block ends their programs and removes them.

    Args:
        size: how many hosts.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = new_name()
        self.switch = f"{self.name}-switch"
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        remove_leftovers()
        self._homes = new_homes(self.name)
        try:
            ip("netns", "add", self.switch)
            for side in (0, 1):
                ip("-n", self.switch, "link", "add", f"side{side}", "type", "bridge")
                ip("-n", self.switch, "link", "set", f"side{side}", "up")
            ip("-n", self.switch, "addr", "add", f"{SUBNET}.1/24", "dev", "side0")
            ip("-n", self.switch, "addr", "add", f"{SUBNET_6}:1/64", "dev", "side0", "nodad")
            for number in range(2, 2 + self.size):
                self.hosts.append(Host(self, number, self._homes / str(number)))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def split(self, *others: Host) -> None:
        """Cut the network in two: these hosts reach each other, and everybody else reaches everybody else."""
        for host in self.hosts:
            host.move_to_side(int(host in others))

    def join(self) -> None:
        """Undo :meth:`split`."""
        self.split()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for host in self.hosts:
            host.close()
        remove_of(self.name)
        shutil.rmtree(self._homes)
