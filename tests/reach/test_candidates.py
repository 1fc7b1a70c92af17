"""Which addresses a punch tries: what the other side and the relay say is not simply believed."""

from __future__ import annotations

import ipaddress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ProtocolError
from shoal.net.transport import MAX_FRAME_BYTES, decode_header, pack_frame
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.punching import (
    MAX_CANDIDATES,
    CandidateHost,
    Candidates,
    Endpoint,
    endpoint_of,
    global_ipv6,
    own_candidates,
    worth_punching,
)
from shoal.reach.relay.messages import LOWEST_PORT, MAX_AT_ONCE

GLOBAL, GLOBAL_6 = "8.8.4.4", "2a00:1450::7"
PORT = 40_000


def is_inside(address: Multiaddr) -> bool:
    """A machine in a network at home."""
    host = address.values()[0] or ""
    return ipaddress.ip_address(host) in ipaddress.ip_network(
        "192.168.1.0/24" if "." in host else "fd00:1::/64", strict=False
    )


def dialled(*candidates: Endpoint, same: bool = False, loopback: bool = False) -> list[str]:
    found = worth_punching(candidates, have_same_host=same, is_inside=is_inside, is_relay_on_loopback=loopback)
    return [str(address) for address in found]


@pytest.mark.parametrize(
    ("host", "otherwise", "same_host", "relay_on_loopback"),
    [
        (GLOBAL, True, True, True),
        (GLOBAL_6, True, True, True),
        ("192.168.1.7", True, True, True),  # the own network
        ("192.168.2.7", False, True, False),
        ("10.0.0.7", False, True, False),
        ("172.16.0.7", False, True, False),
        ("100.64.0.7", False, True, False),
        ("169.254.1.7", False, True, False),
        ("fd00:1::7", True, True, True),
        ("fd00:2::7", False, True, False),
        ("127.0.0.1", False, False, True),
        ("::1", False, False, True),
        ("0.0.0.0", False, False, False),
        ("0.0.0.7", False, False, False),
        ("::", False, False, False),
        ("224.0.0.1", False, False, False),
        ("239.255.255.250", False, False, False),
        ("ff02::1", False, False, False),
        ("240.0.0.1", False, False, False),
        ("255.255.255.255", False, False, False),
        ("fe80::7", False, False, False),
        ("fe80::7%eth0", False, False, False),
        (f"{GLOBAL_6}%eth0", False, False, False),
        ("::ffff:127.0.0.1", False, False, False),
        (f"::ffff:{GLOBAL}", False, False, False),
        ("2002:7f00:1::", False, False, False),
        ("2001:0:7f00:1::1", False, False, False),
        ("64:ff9b::7f00:1", False, False, False),
        ("example.org", False, False, False),
        ("", False, False, False),
        ("8.8.8", False, False, False),
        ("127.1", False, False, False),
    ],
)
def test_hosts_that_are_dialled(host: str, otherwise: bool, same_host: bool, relay_on_loopback: bool) -> None:
    def is_dialled(*, same: bool = False, loopback: bool = False) -> bool:
        return bool(dialled((host, PORT), same=same, loopback=loopback))

    assert is_dialled() == otherwise
    assert is_dialled(same=True) == same_host
    assert is_dialled(loopback=True) == relay_on_loopback


def test_ports_that_are_dialled() -> None:
    for port in (0, 1, 22, 443, LOWEST_PORT - 1):
        assert dialled((GLOBAL, port)) == []
    assert dialled((GLOBAL, LOWEST_PORT), (GLOBAL_6, 65_535)) == [
        f"/ip4/{GLOBAL}/tcp/{LOWEST_PORT}",
        f"/ip6/{GLOBAL_6}/tcp/65535",
    ]


def test_no_more_than_a_few_are_dialled_and_each_once() -> None:
    assert dialled(*[(GLOBAL, PORT)] * 3) == [f"/ip4/{GLOBAL}/tcp/{PORT}"]
    assert dialled(("2a00:1450:0::7", PORT), (GLOBAL_6, PORT)) == [f"/ip6/{GLOBAL_6}/tcp/{PORT}"]
    assert len(dialled(*((f"8.8.4.{number}", PORT) for number in range(9)))) == MAX_CANDIDATES


# --- what is told -----------------------------------------------------------------------------------------------------


def tcp(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def hosts(candidates: Candidates) -> dict[str, list[int]]:
    return {each.host: each.ports for each in candidates.hosts}


def test_own_candidates() -> None:
    ports = [(tcp(GLOBAL, 50_001), tcp("192.168.1.5", 40_001)), (tcp(GLOBAL, 50_002), tcp("192.168.1.5", 40_002))]
    told = own_candidates(ports, GLOBAL_6)
    assert hosts(told) == {GLOBAL: [50_001, 50_002], "192.168.1.5": [40_001, 40_002], GLOBAL_6: [40_001, 40_002]}
    assert told.of_port(1) == [(GLOBAL, 50_002), ("192.168.1.5", 40_002), (GLOBAL_6, 40_002)]
    assert told.of_port(2) == []


def test_a_port_that_did_not_come_about_keeps_its_place() -> None:
    told = own_candidates([(None, None), (tcp(GLOBAL, 50_002), tcp(GLOBAL, 50_002))], None)
    assert hosts(told) == {GLOBAL: [0, 50_002]}
    assert dialled(*told.of_port(0)) == []
    assert hosts(own_candidates([(None, None)], GLOBAL_6)) == {}


def test_a_router_with_many_addresses_leaves_room() -> None:
    ports = [(tcp(f"8.8.4.{number}", 50_000), tcp("192.168.1.5", 40_000)) for number in range(MAX_AT_ONCE)]
    assert len(own_candidates(ports, GLOBAL_6).hosts) == MAX_CANDIDATES


def test_endpoints() -> None:
    assert endpoint_of(tcp(GLOBAL, 1)) == (GLOBAL, 1)
    assert endpoint_of(tcp(GLOBAL_6, 1)) == (GLOBAL_6, 1)
    assert endpoint_of(Multiaddr("/memory/7")) == ("memory", 7)
    assert endpoint_of(Multiaddr("/dns4/example.org/tcp/1")) is None
    assert endpoint_of(None) is None
    assert global_ipv6([tcp(GLOBAL, 1), tcp("fd00::1", 1), tcp(GLOBAL_6, 1)]) == GLOBAL_6
    assert global_ipv6([tcp(GLOBAL, 1)]) is None


def test_the_largest_candidates_fit_into_a_frame() -> None:
    host = "2a00:1450:1450:1450:1450:1450:255.255.255.255"
    assert len(host) == 45
    ports = [65_535] * MAX_AT_ONCE
    assert len(pack_frame(Candidates([CandidateHost(host, ports)] * MAX_CANDIDATES))) < MAX_FRAME_BYTES / 2


# --- hostile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts",
    [
        [{"host": GLOBAL, "ports": [PORT]}] * (MAX_CANDIDATES + 1),
        [{"host": GLOBAL, "ports": [PORT] * (MAX_AT_ONCE + 1)}],
        [{"host": GLOBAL, "ports": [-1]}],
        [{"host": GLOBAL, "ports": [2**16]}],
        [{"host": GLOBAL, "ports": [1.5]}],
        [{"host": "x" * 46, "ports": []}],
        [{"host": "", "ports": []}],
        [{"host": GLOBAL}],
        [GLOBAL],
        7,
    ],
)
def test_what_no_honest_peer_says_is_refused(hosts: object) -> None:
    with pytest.raises(ProtocolError):
        decode_header(msgspec.msgpack.encode({"hosts": hosts}), Candidates)


addresses = (
    st.ip_addresses().map(str) | st.text(max_size=45) | st.sampled_from(["127.0.0.1", "::1", "memory", "fe80::"])
)
candidates = st.lists(st.tuples(addresses, st.integers(0, 65_535)), max_size=MAX_CANDIDATES)


@given(candidates)
def test_whatever_is_said_only_what_may_be_is_dialled(said: list[Endpoint]) -> None:
    found = worth_punching(said, have_same_host=False, is_inside=is_inside, is_relay_on_loopback=False)
    assert len(found) <= MAX_CANDIDATES
    for address in found:
        endpoint = endpoint_of(address)
        assert endpoint is not None
        if endpoint[0] != "memory":
            ip = ipaddress.ip_address(endpoint[0])
            assert endpoint[1] >= LOWEST_PORT
            assert not (ip.is_loopback)
            assert not (ip.is_multicast)
            assert not (ip.is_unspecified)
            assert ip.is_global or is_inside(address)
