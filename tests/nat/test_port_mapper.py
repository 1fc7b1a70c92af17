"""Routers that open ports to hosts that ask, and routers that refuse."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from tests.nat.laboratory import NEEDS_LABORATORY, NEEDS_PORT_MAPPER, Host, Laboratory
from tests.nat.rules import Kind
from tests.nat.sockets import expect, listen, new_socket

pytestmark = [NEEDS_LABORATORY, NEEDS_PORT_MAPPER, pytest.mark.timeout(200)]

PORT = 4001
NAT_PMP_PORT, NAT_PMP_TCP = 5351, 2
OUTER_ADDRESS = b"\0\0"
GRANTED, NETWORK_FAILURE = 0, 3
TRIES, TRY_SECONDS = 60, 0.5


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


def ask(host: Host, request: bytes) -> bytes:
    """The expect of its router, which may still be starting."""
    with new_socket(host, kind=socket.SOCK_DGRAM) as asking:
        asking.settimeout(TRY_SECONDS)
        for _ in range(TRIES):
            asking.sendto(request, (f"{host.router.lan}.1", NAT_PMP_PORT))
            try:
                return asking.recv(100)
            except TimeoutError:
                continue
            except ConnectionRefusedError:  # of the datagram before
                continue
    raise AssertionError("no expect from the router")


def ask_for_port(host: Host, port: int) -> int:
    """The result that NAT-PMP gives."""
    reply = ask(host, struct.pack(">BBHHHI", 0, NAT_PMP_TCP, 0, port, port, 3600))
    _, kind, result, _ = struct.unpack_from(">BBHI", reply)
    assert kind == 128 + NAT_PMP_TCP
    return result


@pytest.mark.parametrize("kind", [Kind.PORT_RESTRICTED, Kind.SYMMETRIC])
def test_a_port_that_was_asked_for_is_open(lab: Laboratory, kind: Kind) -> None:
    public, host = lab.host("public"), lab.host(kind)
    host.router.start_port_mapper()
    assert socket.inet_ntoa(ask(host, OUTER_ADDRESS)[8:12]) == host.outer
    with listen(host, PORT):
        expect("silent", public, host.outer, PORT)
        assert ask_for_port(host, PORT) == GRANTED
        expect("open", public, host.outer, PORT)


def test_the_inner_one_of_two_routers_refuses_if_it_sees_that_there_is_another(lab: Laboratory) -> None:
    host = lab.host(Kind.CGNAT)
    host.router.start_port_mapper()
    assert ask_for_port(host, PORT) == NETWORK_FAILURE


def test_the_inner_one_of_two_routers_may_open_a_port_that_nobody_can_call(lab: Laboratory) -> None:
    public, host = lab.host("public"), lab.host(Kind.CGNAT)
    host.router.start_port_mapper(outer="11.0.200.2")
    with listen(host, PORT):
        assert socket.inet_ntoa(ask(host, OUTER_ADDRESS)[8:12]) == "11.0.200.2"
        assert ask_for_port(host, PORT) == GRANTED
        expect("silent", public, host.outer, PORT)
