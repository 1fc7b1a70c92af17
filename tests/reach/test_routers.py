"""Finding the router: the tables and commands of Linux, macOS and Windows, and which routers need not be asked."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest

from shoal.p2p import Multiaddr
from shoal.reach.nat import routers
from shoal.reach.nat.routers import Gateway, NoMappingError

ROUTE = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t0102A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
tun0\t00000000\t00000000\t0001\t0\t0\t50\t00000000\t0\t0\t0
tun0\t00000000\t0101000A\t0003\t0\t0\t0\t00000080\t0\t0\t0
eth1\t00000000\t0103A8C0\t0002\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
nonsense
"""
NOWHERE, ONE = "0" * 32, "fe80" + "0" * 24 + "0001"
IPV6_ROUTE = f"""\
{NOWHERE} 00 {NOWHERE} 00 {ONE[:-1]}2 00000400 00000001 00000000 00000003   wlan0
{NOWHERE} 00 {NOWHERE} 00 {ONE} 00000064 00000001 00000000 00000003    eth0
{NOWHERE} 00 {NOWHERE} 00 {NOWHERE} ffffffff 00000001 00000000 00200200      lo
fd00{NOWHERE[4:]} 40 {NOWHERE} 00 {ONE} 00000001 00000001 00000000 00000003    eth0
"""
ROUTE_COMMAND = """   route to: default
destination: default
       mask: default
    gateway: 192.168.1.1
  interface: en0
      flags: <UP,GATEWAY,DONE,STATIC,PRCLONING,GLOBAL>
"""


def test_the_tables_of_linux() -> None:
    assert routers.gateway_in_route(ROUTE) == "192.168.1.1"
    assert routers.gateway_in_route(ROUTE.splitlines()[0]) is None
    assert routers.gateway_in_ipv6_route(IPV6_ROUTE) == "fe80::1%eth0"
    assert routers.gateway_in_ipv6_route("") is None
    table = IPV6_ROUTE.replace(ONE, "20010db8" + "0" * 23 + "1")
    assert routers.gateway_in_ipv6_route(table) == "2001:db8::1"


def test_the_command_of_macos() -> None:
    assert routers.gateway_in_route_command(ROUTE_COMMAND) == "192.168.1.1"
    assert routers.gateway_in_route_command(ROUTE_COMMAND.replace("192.168.1.1", "fe80::1%en0")) == "fe80::1%en0"
    assert routers.gateway_in_route_command(ROUTE_COMMAND.replace("192.168.1.1", "fd00::1")) == "fd00::1"
    for hop in ("index: 5", "link#5", ""):
        assert routers.gateway_in_route_command(ROUTE_COMMAND.replace("192.168.1.1", hop)) is None
    assert routers.gateway_in_route_command("route: writing to routing socket: not in table") is None


@pytest.mark.parametrize(
    ("family", "hop", "expected"),
    [
        (socket.AF_INET, struct.pack("=HH4s", 2, 0, bytes([192, 168, 1, 1])), "192.168.1.1"),
        (socket.AF_INET, struct.pack("=HH4s", 2, 0, bytes(4)), None),
        (socket.AF_INET6, struct.pack("=HHI16s", 23, 0, 0, bytes.fromhex(ONE)), "fe80::1%7"),
        (socket.AF_INET6, struct.pack("=HHI16s", 23, 0, 0, bytes(16)), None),
        (socket.AF_INET6, struct.pack("=HH4s", 2, 0, bytes([192, 168, 1, 1])), None),
    ],
)
def test_the_function_of_windows(family: socket.AddressFamily, hop: bytes, expected: str | None) -> None:
    asked: list[bytes] = []

    def get_best_route(luid: None, index: int, source: None, to: Any, options: int, row: Any, best: Any) -> int:
        asked.append(to._obj.raw)
        row._obj[8:12] = struct.pack("=I", 7)
        row._obj[44 : 44 + len(hop)] = hop
        return 0

    assert routers.gateway_of_windows(family, get_best_route) == expected
    assert struct.unpack_from("=H", asked[0])[0] == (2 if family == socket.AF_INET else 23)
    assert routers.gateway_of_windows(family, lambda *_: 1232) is None  # the network is out of reach


GATEWAYS = {
    "at home": ({4: "192.168.1.1"}, {4: "192.168.1.2"}, [Gateway("192.168.1.1", "192.168.1.2")]),
    "a provider that translates": ({4: "100.64.0.1"}, {4: "100.64.0.9"}, [Gateway("100.64.0.1", "100.64.0.9")]),
    "a cloud": ({4: "10.0.0.1"}, {4: "8.8.4.4"}, []),
    "a public machine": ({4: "8.8.4.1"}, {4: "8.8.4.4"}, []),
    "no network": ({}, {}, []),
    "a way without an address": ({4: "192.168.1.1"}, {}, []),
    "both": (
        {4: "192.168.1.1", 6: "fe80::1%eth0"},
        {4: "192.168.1.2", 6: "2003:1::2"},
        [Gateway("192.168.1.1", "192.168.1.2"), Gateway("fe80::1%eth0", "2003:1::2")],
    ),
    "private IPv6": ({6: "fe80::1%eth0"}, {6: "fd00::2"}, []),
}


@pytest.mark.parametrize("where", GATEWAYS)
def test_which_routers_are_asked(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    hops, sources, expected = GATEWAYS[where]
    versions = {socket.AF_INET: 4, socket.AF_INET6: 6}
    monkeypatch.setattr(routers, "gateway_of", lambda family: hops.get(versions[family]))
    monkeypatch.setattr(routers, "source_towards", lambda ip: sources.get(4))
    monkeypatch.setattr(routers, "source_of_default_route", lambda family: sources.get(versions[family]))
    assert routers.find_gateways() == expected


def test_the_routers_of_this_machine() -> None:
    for gateway in routers.find_gateways():
        assert gateway.pcp_port == 5351
        assert gateway.is_ipv6 or routers.is_private(gateway.own_ip)


def test_outer_addresses() -> None:
    assert routers.outer_address("198.51.100.7", 5) == Multiaddr("/ip4/198.51.100.7/tcp/5")
    assert routers.outer_address("::ffff:198.51.100.7", 5) == Multiaddr("/ip4/198.51.100.7/tcp/5")
    assert routers.outer_address("2001:db8::1", 5) == Multiaddr("/ip6/2001:db8::1/tcp/5")
    assert routers.outer_address("192.168.0.9", 5) == Multiaddr("/ip4/192.168.0.9/tcp/5")  # of a router behind another
    for ip, port in [("198.51.100.7", 0), ("::", 5), ("::1", 5), ("ff02::1", 5), ("240.0.0.1", 5), ("x" * 99, 5)]:
        with pytest.raises(NoMappingError, match="outer address"):
            routers.outer_address(ip, port)
