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

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from tests.system.swarm import Peer

PREFIX = "shoal-test"
SUBNET = "10.88.0"
SUBNET_6 = "fd88:"
_UNSET = ("SHOAL_HOST_MADDRS", "HIVEMIND_HOST_MADDRS")
"""What keeps other tests on loopback would keep hosts from each other."""


def _can_make_hosts() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return made


CAN_MAKE_HOSTS = _can_make_hosts()
NEEDS_HOSTS = pytest.mark.skipif(not CAN_MAKE_HOSTS, reason="network namespaces need Linux, root and iproute2")


def ip(*words: object) -> None:
    """Run the ``ip`` command.

    Raises:
        RuntimeError: it failed; with what it has printed.
    """
    command = ["ip", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """One computer on the network; made by :class:`Network`.

    Args:
        network: where it is plugged in.
        number: the last part of its addresses, from 2; the network's router is 1.
        home: a folder that is home to whoever runs programs here.
    """

    def __init__(self, network: Network, number: int, home: Path) -> None:
        self.namespace = f"{network.name}-{number}"
        self.home = home
        self.programs: list[Peer] = []
        self._switch, self._port = network.switch, f"port{number}"
        ip("netns", "add", self.namespace)
        ip("-n", self._switch, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self.namespace)
        ip("-n", self._switch, "link", "set", self._port, "master", "side0", "up")
        self.ip("link", "set", "lo", "up")
        self.address = self.address_6 = ""
        self.set_address(number)

    def ip(self, *words: object) -> None:
        """Run the ``ip`` command on this host."""
        ip("-n", self.namespace, *words)

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

    def start(
        self,
        program: str | Path,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Peer:
        """Run Python here.

        Args:
            program: a script of this folder or the path of another one; or ``-c`` or ``-m``, before their arguments.
            arguments: for the program.
            environment: beside what this process has; programs may be anywhere and listen where they like.
            cwd: the folder in which it runs.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
        if paths := inherited.get("PYTHONPATH"):  # they may be relative to the folder of this process
            inherited["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        own = {"HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state"), **(environment or {})}
        started = Peer(
            program,
            *arguments,
            namespace=self.namespace,
            environment=inherited | own,
            cwd=cwd or self.home,
        )
        self.programs.append(started)
        return started

    def pull_cable(self) -> None:
        """From now on nothing arrives and nothing leaves; connections stay until somebody notices."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def plug_in(self) -> None:
        """Undo :meth:`pull_cable`."""
        ip("-n", self._switch, "link", "set", self._port, "up")

    def move_to_side(self, side: int) -> None:
        """Sides 0 and 1 of the switch are apart from each other; every host begins on side 0."""
        ip("-n", self._switch, "link", "set", self._port, "master", f"side{side}")

    def close(self) -> None:
        for program in self.programs:
            program.close()
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)


class Network:
    """Hosts that reach each other; leaving the block ends their programs and removes them.

    Args:
        size: how many hosts.
    """

    _numbers = itertools.count()

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"{PREFIX}-{os.getpid()}-{next(self._numbers)}"
        self.switch = f"{self.name}-switch"
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        _remove(name for name in _namespaces() if not psutil.pid_exists(int(name.split("-")[2])))
        self._homes = tempfile.TemporaryDirectory(prefix=f"{self.name}-")
        try:
            ip("netns", "add", self.switch)
            for side in (0, 1):
                ip("-n", self.switch, "link", "add", f"side{side}", "type", "bridge")
                ip("-n", self.switch, "link", "set", f"side{side}", "up")
            ip("-n", self.switch, "addr", "add", f"{SUBNET}.1/24", "dev", "side0")
            ip("-n", self.switch, "addr", "add", f"{SUBNET_6}:1/64", "dev", "side0", "nodad")
            for number in range(2, 2 + self.size):
                home = Path(self._homes.name, str(number))
                home.mkdir()
                self.hosts.append(Host(self, number, home))
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
        _remove(name for name in _namespaces() if name.startswith(f"{self.name}-"))
        self._homes.cleanup()


def _namespaces() -> list[str]:
    """Those that tests have made, of whatever process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")]


def _remove(namespaces: Iterable[str]) -> None:
    for name in namespaces:
        for pid in subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        ).stdout.split():
            psutil.Process(int(pid)).kill()
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
