"""An internet in network namespaces: public hosts, and hosts behind routers of every kind.

    with Laboratory() as lab:
        seed = lab.host("public")
        laptop = lab.host("port-restricted")       # behind a router of its own
        router = lab.router("symmetric", rst=True)
        first, second = router.host(), router.host()
        program = laptop.start("-m", "shoal.cli", "dht", "--initial-peers", ...)  # see tests.computers.Computer
        laptop.router.forget()                     # its translations, as at a power cut

      laptop ──veth── router ──tun── wire ──tun── seed
    192.168.1.2       11.0.2.2                  11.0.1.2

Outer addresses are global, each in a network of its own. Homes all have the same inner network, as they have in
reality, so the inner address of a stranger may be one's own. Any two lines are 30 ms from each other. Leaving the block
ends all programs and removes everything. If this process is killed, the wire does it. If that is killed, too, the next
laboratory does.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

import pytest

from tests.computers import CAN_MAKE_COMPUTERS, Computer, inside, new_homes, new_name, remove_leftovers
from tests.nat import port_mapper
from tests.nat.rules import LAN, WAN, Kind, firewall_6, translation
from tests.nat.wire import Wire

ONE_WAY_SECONDS = 0.030
"""From one line to another."""
SYSTEM = Path("/proc/sys/net")
CONTROL = ("congctl", "cubic")
"""The congestion control of most computers. BBR would mistake the bursts of the wire for a faster line, and lose a
third of what it sends."""
SETTINGS = {
    "ipv4/ip_forward": 1,
    "ipv6/conf/all/forwarding": 1,
    "netfilter/nf_conntrack_tcp_loose": 0,  # the middle of a connection that was forgotten is no new connection
    "bridge/bridge-nf-call-iptables": 0,  # what hosts behind one router send each other is not its business
    "bridge/bridge-nf-call-ip6tables": 0,
}
"""Of a router's kernel."""


def _lacks(*commands: str) -> bool:
    return not all(map(shutil.which, commands))


NEEDS_LABORATORY = pytest.mark.skipif(
    not CAN_MAKE_COMPUTERS or _lacks("nft", "conntrack") or not os.path.exists("/dev/net/tun"),
    reason="the laboratory needs Linux, root, iproute2, nftables, conntrack and /dev/net/tun",
)
NEEDS_PORT_MAPPER = pytest.mark.skipif(_lacks("miniupnpd"), reason="needs miniupnpd, built for nftables")


class Line:
    """One end of the wire, and the addresses there.

    Args:
        lab: whose wire it is.
        computer: at the end.
        megabits: that it can send per second; None: as many as it likes.
        delay: seconds to the middle of the internet, or back.
    """

    def __init__(self, lab: Laboratory, computer: Computer, megabits: float | None, delay: float) -> None:
        self._wire = lab.wire
        number = next(lab.networks)
        self.address, self.network_6 = f"11.0.{number}.2", f"2a0f:{number:x}"
        networks = [bytes([11, 0, number]), bytes([0x2A, 0x0F, 0, number])]
        self.number = self._wire.add(computer.namespace, WAN, networks, delay, megabits)
        computer.ip("addr", "add", f"{self.address}/24", "dev", WAN)
        computer.ip("link", "set", WAN, "mtu", lab.mtu, "txqueuelen", 1000, "up")
        computer.ip("route", "add", "default", "dev", WAN, *CONTROL)

    def add_address_6(self, computer: Computer) -> str:
        """Give its end an IPv6 address; returns it."""
        address = f"{self.network_6}::2"
        computer.ip("addr", "add", f"{address}/64", "dev", WAN, "nodad")
        computer.ip("-6", "route", "add", "default", "dev", WAN, *CONTROL)
        return address

    def cut(self) -> None:
        """From now on nothing arrives and nothing leaves, and nobody is told."""
        self._wire.cut(self.number)

    def mend(self) -> None:
        """Undo :meth:`cut`."""
        self._wire.mend(self.number)

    def set_delay(self, seconds: float) -> None:
        """From now on, to the middle of the internet or back."""
        self._wire.set_delay(self.number, seconds)

    def carried_to(self, other: Line) -> int:
        """Bytes so far, headers included."""
        return self._wire.carried(self.number, other.number)


class Host(Computer):
    """One computer that people use; made by :meth:`Laboratory.host` or :meth:`Router.host`.

    Args:
        namespace: its name.
        home: see :class:`Computer`.
        router: what it is behind; None: it is public.
    """

    address = ""
    """Its own, inside."""
    address_6 = ""
    """Global; empty: it has none."""
    outer = ""
    """What others see instead of :attr:`address`."""
    line: Line

    def __init__(self, namespace: str, home: Path, router: Router | None) -> None:
        super().__init__(namespace, home)
        self._router = router

    @property
    def router(self) -> Router:
        assert self._router is not None, "a public host has no router"
        return self._router

    def reset(self, which: str) -> None:
        """End connections by RST, at both ends.

        Args:
            which: a filter as ss has them, such as ``dst 11.0.1.2``.
        """
        self.run("ss", "--kill", "--tcp", which)


class Router(Computer):
    """What hosts are behind; made by :meth:`Laboratory.router`.

    Args:
        lab: where it is.
        kind: any but PUBLIC and CGNAT.
        upstream: the router that it is behind; None: it has a line of its own.
        is_carrier: its inner network is one of those that providers have.
        megabits, delay: see :class:`Line`.
        rst, hairpin, only_port: see :func:`.rules.translation`.
        ipv6: ``"firewalled"``: hosts have global addresses and nobody can call them; ``"open"``: everybody can;
            ``""``: they have none.
    """

    def __init__(
        self,
        lab: Laboratory,
        kind: Kind,
        *,
        upstream: Router | None = None,
        is_carrier: bool = False,
        megabits: float | None = None,
        delay: float,
        rst: bool = False,
        hairpin: bool = False,
        only_port: int | None = None,
        ipv6: str = "",
    ) -> None:
        super().__init__(*lab.new_place())
        lab.computers.append(self)
        self._lab, self.kind, self._has_6 = lab, kind, bool(ipv6)
        self._numbers = itertools.count(2)
        self._mapper: subprocess.Popen[bytes] | None = None
        self._set_up()
        self.ip("link", "add", LAN, "type", "bridge")
        self.ip("link", "set", LAN, "up")
        if upstream is None:
            self.line = Line(lab, self, megabits, delay)
            self.address = self.outer = self.line.address
            self._network_6 = f"{self.line.network_6}:0:1"
            if ipv6:
                self.line.add_address_6(self)
        else:
            self.line = upstream.line
            self.address, address_6, number = upstream.plug_in(self, WAN)
            self.outer = upstream.outer
            self._network_6 = f"{self.line.network_6}:0:{number + 0x10:x}"
            if ipv6:
                upstream.ip("-6", "route", "add", f"{self._network_6}::/64", "via", address_6)
        self.lan = f"100.64.{self.line.number}" if is_carrier else "192.168.1"
        self.ip("addr", "add", f"{self.lan}.1/24", "dev", LAN)
        if ipv6:
            self.ip("addr", "add", f"{self._network_6}::1/64", "dev", LAN, "nodad")
        rules = translation(kind, self.address, rst=rst, hairpin=hairpin, only_port=only_port)
        if ipv6 == "firewalled":
            rules += firewall_6(rst=rst, only_port=only_port)
        self.run("nft", "-f", "-", text=rules)

    def _set_up(self) -> None:
        with inside(self.namespace):
            for name, value in SETTINGS.items():
                if name.startswith("bridge/") and not (SYSTEM / "bridge").exists():
                    continue  # what it is to turn off is not there
                (SYSTEM / name).write_text(str(value), encoding="utf-8")

    def host(self) -> Host:
        """One more computer behind it."""
        host = Host(*self._lab.new_place(), self)
        self._lab.computers.append(host)
        host.address, host.address_6, _ = self.plug_in(host, "eth0")
        host.outer, host.line = self.outer, self.line
        return host

    def plug_in(self, computer: Computer, device: str) -> tuple[str, str, int]:
        """Connect a computer with the inner network; returns its addresses there and the number that they end with."""
        number = next(self._numbers)
        port, address, address_6 = f"port{number}", f"{self.lan}.{number}", ""
        mtu = ["mtu", self._lab.mtu]
        self.ip("link", "add", port, *mtu, "type", "veth", "peer", device, *mtu, "netns", computer.namespace)
        self.ip("link", "set", port, "master", LAN, "up")
        computer.ip("addr", "add", f"{address}/24", "dev", device)
        computer.ip("link", "set", device, "up")
        computer.ip("route", "add", "default", "via", f"{self.lan}.1", *CONTROL)
        if self._has_6:
            address_6 = f"{self._network_6}::{number:x}"
            computer.ip("addr", "add", f"{address_6}/64", "dev", device, "nodad")
            computer.ip("-6", "route", "add", "default", "via", f"{self._network_6}::1", *CONTROL)
        return address, address_6, number

    def forget(self) -> None:
        """Lose all translations, as at a power cut: connections through it are dead, and nobody is told."""
        self.run("conntrack", "-F")
        for table in ("used", "called"):
            self.run("nft", "flush", "map", "ip", "home", table)

    def forward(self, port: int, host: Host) -> None:
        """Let everybody call this port of a host, as owners of routers can set."""
        rule = f"iifname {WAN} meta l4proto {{ tcp, udp }} th dport {port} dnat to {host.address}"
        self.run("nft", "add", "rule", "ip", "home", "forwarded", rule)

    def start_port_mapper(self, *, outer: str = "", upnp: bool = False, datagrams: bool = True) -> None:
        """Open ports to hosts that ask for it; see :mod:`.port_mapper`."""
        self.run("nft", "-f", "-", text=port_mapper.TABLE)
        settings = port_mapper.write_settings(
            self.home, f"{self.lan}.0/24", outer=outer, upnp=upnp, datagrams=datagrams
        )
        self._mapper = port_mapper.start(self.namespace, settings)

    def close(self) -> None:
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()
        super().close()


class Laboratory:
    """The internet, at first without anybody; leaving the block removes it.

    Args:
        one_way: seconds that a packet takes from one line to another.
        mtu: the largest packet; larger ones make less work for the wire, which is slow code.
    """

    def __init__(self, one_way: float = ONE_WAY_SECONDS, mtu: int = 1500) -> None:
        self.name, self.mtu = new_name(), mtu
        self.computers: list[Computer] = []
        self.networks = itertools.count(1)
        self._delay = one_way / 2
        self._places = itertools.count(1)

    def __enter__(self) -> Laboratory:
        remove_leftovers()
        self._homes = new_homes(self.name)
        self.wire = Wire(self.name, self._homes)
        return self

    def new_place(self) -> tuple[str, Path]:
        """Name and home of one more computer."""
        number = next(self._places)
        return f"{self.name}-{number}", self._homes / str(number)

    def host(
        self,
        kind: Kind | str,
        *,
        megabits: float | None = None,
        delay: float | None = None,
        rst: bool = False,
        only_port: int | None = None,
        ipv6: str = "",
    ) -> Host:
        """One more computer, behind a router of its own if it is not public; see :meth:`router`."""
        if Kind(kind) is not Kind.PUBLIC:
            return self.router(kind, megabits=megabits, delay=delay, rst=rst, only_port=only_port, ipv6=ipv6).host()
        assert not rst, "only routers refuse"
        assert only_port is None, "only routers choose ports"
        assert ipv6 in ("", "open"), "only routers have a firewall"
        host = Host(*self.new_place(), None)
        self.computers.append(host)
        host.line = Line(self, host, megabits, self._delay if delay is None else delay)
        host.address = host.outer = host.line.address
        if ipv6:
            host.address_6 = host.line.add_address_6(host)
        return host

    def router(
        self,
        kind: Kind | str,
        *,
        upstream: Router | None = None,
        is_carrier: bool = False,
        megabits: float | None = None,
        delay: float | None = None,
        rst: bool = False,
        hairpin: bool = False,
        only_port: int | None = None,
        ipv6: str = "",
    ) -> Router:
        """One more router, see there; with CGNAT the inner one of the two."""
        kind, delay = Kind(kind), self._delay if delay is None else delay
        assert kind is not Kind.PUBLIC, "public hosts have no router"
        if kind is Kind.CGNAT:
            kind = Kind.PORT_RESTRICTED
            upstream = Router(self, kind, is_carrier=True, megabits=megabits, delay=delay, ipv6="open" if ipv6 else "")
        return Router(
            self,
            kind,
            upstream=upstream,
            is_carrier=is_carrier,
            megabits=megabits,
            delay=delay,
            rst=rst,
            hairpin=hairpin,
            only_port=only_port,
            ipv6=ipv6,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for computer in self.computers:
            computer.close()
        self.wire.close()
