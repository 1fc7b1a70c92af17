"""Routers of the laboratory translate and filter as their kinds are named, seen by plain sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.drills import mostly_drills
from tests.nat.laboratory import NEEDS_LABORATORY, Laboratory
from tests.nat.rules import Kind
from tests.nat.sockets import (
    LIMIT_SECONDS,
    PATIENCE_SECONDS,
    call,
    expect,
    listen,
    new_socket,
    open_at_once,
    see,
)

pytestmark = [NEEDS_LABORATORY, pytest.mark.timeout(200)]

PORT = 4001
"""Of whoever is called or observes."""
OWN = 4002
"""From which hosts call."""
BEHIND = [kind for kind in Kind if kind is not Kind.PUBLIC]


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


@pytest.mark.parametrize("kind", BEHIND)
def test_easy_routers_keep_the_outer_port_and_hard_ones_change_it_for_each_destination(
    lab: Laboratory, kind: Kind
) -> None:
    observers, host = [lab.host("public") for _ in range(3)], lab.host(kind)
    seen = [see(each, host, each.address, PORT, source=OWN) for each in observers]
    assert {address for address, _ in seen} == {host.outer}
    if kind is Kind.SYMMETRIC:
        assert len({port for _, port in seen}) > 1
        assert OWN not in {port for _, port in seen}
    else:
        assert {port for _, port in seen} == {OWN}


@pytest.mark.parametrize("rst", mostly_drills([False, True]), ids=["drop", "rst"])
@pytest.mark.parametrize("kind", BEHIND)
def test_routers_let_in_what_their_kind_lets_in(lab: Laboratory, kind: Kind, rst: bool) -> None:
    called, stranger, host = lab.host("public"), lab.host("public"), lab.host(kind, rst=rst)
    closed = "refused" if rst and kind is not Kind.CGNAT else "silent"
    expect(closed, stranger, host.outer, OWN)  # nothing has gone out yet
    with (
        listen(called, PORT) as server,
        call(host, called.address, PORT, source=OWN),
        server.accept()[0] as seen,
        listen(host, OWN),
    ):
        outer = seen.getpeername()
        expect("open" if kind is Kind.FULL_CONE else closed, stranger, *outer)
        expect("open" if kind in (Kind.FULL_CONE, Kind.ADDRESS_RESTRICTED) else closed, called, *outer)


@pytest.mark.parametrize("kind", BEHIND)
def test_datagrams_are_translated_like_connections(lab: Laboratory, kind: Kind) -> None:
    observers, host = [lab.host("public") for _ in range(3)], lab.host(kind)
    ports = []
    with new_socket(host, OWN, kind=socket.SOCK_DGRAM) as mine:
        for each in observers:
            with new_socket(each, PORT, kind=socket.SOCK_DGRAM) as theirs:
                mine.sendto(b"?", (each.address, PORT))
                _, outer = theirs.recvfrom(10)
                theirs.sendto(b"!", outer)
                assert mine.recvfrom(10)[1] == (each.address, PORT)
                ports.append(outer[1])
        with new_socket(observers[0], PORT + 1, kind=socket.SOCK_DGRAM) as other_port:
            other_port.sendto(b"!", (host.outer, ports[0]))
            if kind in (Kind.FULL_CONE, Kind.ADDRESS_RESTRICTED):
                assert mine.recv(10) == b"!"
            else:
                mine.settimeout(PATIENCE_SECONDS)
                with pytest.raises(TimeoutError):
                    mine.recv(10)
    assert (len(set(ports)) > 1) == (kind is Kind.SYMMETRIC)


@pytest.mark.parametrize(
    ("first", "second", "opens"),
    [
        (Kind.PORT_RESTRICTED, Kind.PORT_RESTRICTED, True),
        (Kind.PORT_RESTRICTED, Kind.CGNAT, True),
        (Kind.FULL_CONE, Kind.ADDRESS_RESTRICTED, True),
        (Kind.SYMMETRIC, Kind.PORT_RESTRICTED, False),
        (Kind.SYMMETRIC, Kind.SYMMETRIC, False),
    ],
)
@pytest.mark.parametrize("rst", mostly_drills([False, True]), ids=["drop", "rst"])
def test_two_calls_that_cross_open_a_connection_unless_a_port_is_not_known(
    lab: Laboratory, first: Kind, second: Kind, opens: bool, rst: bool
) -> None:
    here, there = lab.host(first, rst=rst), lab.host(second, rst=rst)
    seconds = LIMIT_SECONDS if opens else 3 * PATIENCE_SECONDS
    assert open_at_once((here, OWN), (there, PORT), (here.outer, there.outer), seconds) is opens


def test_hosts_of_a_symmetric_router_are_not_let_out_to_where_nobody_listens(lab: Laboratory) -> None:
    host, public = lab.host(Kind.SYMMETRIC), lab.host("public")
    expect("refused", host, public.address, PORT)


def test_homes_have_the_same_inner_network(lab: Laboratory) -> None:
    one, other = lab.host(Kind.PORT_RESTRICTED), lab.host(Kind.CGNAT)
    assert one.address == other.address
    assert one.outer != other.outer
    with listen(one, PORT):
        expect("open", one, one.address, PORT)
        expect("refused", other, one.address, PORT)  # that is itself


@pytest.mark.parametrize("hairpin", [True, False])
@pytest.mark.parametrize("kind", [Kind.FULL_CONE, Kind.PORT_RESTRICTED])
def test_hosts_behind_one_router(lab: Laboratory, kind: Kind, hairpin: bool) -> None:
    router, public = lab.router(kind, hairpin=hairpin), lab.host("public")
    first, second = router.host(), router.host()
    assert first.address != second.address
    see(public, first, public.address, PORT, source=OWN)
    with listen(first, OWN):
        expect("open", second, first.address, OWN)
        expect("open" if hairpin else "silent", second, router.outer, OWN)
    if hairpin:
        assert see(first, second, router.outer, OWN, source=PORT) == (router.outer, PORT)
        assert open_at_once((first, OWN), (second, PORT), (router.outer, router.outer), LIMIT_SECONDS)


def test_two_homes_behind_one_carrier(lab: Laboratory) -> None:
    carrier, public = lab.router(Kind.PORT_RESTRICTED, is_carrier=True), lab.host("public")
    homes = [lab.router(Kind.PORT_RESTRICTED, upstream=carrier).host() for _ in range(2)]
    assert len({home.router.address for home in homes}) == 2
    for number, home in enumerate(homes):
        assert see(public, home, public.address, PORT, source=OWN + number) == (carrier.outer, OWN + number)


@pytest.mark.parametrize("kind", [Kind.PORT_RESTRICTED, Kind.SYMMETRIC, Kind.CGNAT])
@pytest.mark.parametrize("rst", mostly_drills([False, True]), ids=["drop", "rst"])
def test_firewalled_ipv6_lets_in_what_was_called(lab: Laboratory, kind: Kind, rst: bool) -> None:
    public, first = lab.host("public", ipv6="open"), lab.host(kind, ipv6="firewalled", rst=rst)
    second = lab.host(kind, ipv6="firewalled", rst=rst)
    assert see(public, first, public.address_6, PORT, source=OWN) == (first.address_6, OWN)
    with listen(first, OWN, six=True):
        for caller in (public, second):
            expect("refused" if rst else "silent", caller, first.address_6, OWN)
    addresses = first.address_6, second.address_6
    assert open_at_once((first, OWN), (second, PORT), addresses, LIMIT_SECONDS), "no port is translated"


def test_open_ipv6_lets_in_everybody(lab: Laboratory) -> None:
    public, host = lab.host("public", ipv6="open"), lab.host(Kind.PORT_RESTRICTED, ipv6="open")
    assert see(host, public, host.address_6, PORT, source=OWN) == (public.address_6, OWN)


def test_a_forwarded_port_lets_in_everybody(lab: Laboratory) -> None:
    public, host = lab.host("public"), lab.host(Kind.SYMMETRIC)
    host.router.forward(PORT, host)
    assert see(host, public, host.outer, PORT, source=OWN) == (public.address, OWN)


def test_one_port_out(lab: Laboratory) -> None:
    public = lab.host("public", ipv6="open")
    host = lab.host(Kind.PORT_RESTRICTED, only_port=443, ipv6="firewalled")
    for address in (public.address, public.address_6):
        six = ":" in address
        with listen(public, 443, six=six), listen(public, PORT, six=six):
            expect("open", host, address, 443)
            expect("silent", host, address, PORT)


def test_a_router_that_forgets_cuts_its_connections_without_a_word(lab: Laboratory) -> None:
    public, host = lab.host("public"), lab.host(Kind.PORT_RESTRICTED)
    with listen(public, PORT) as server:
        with call(host, public.address, PORT) as mine, server.accept()[0] as theirs:
            mine.sendall(b"before")
            assert theirs.recv(10) == b"before"
            host.router.forget()
            mine.sendall(b"after")
            for one in (mine, theirs):
                one.settimeout(PATIENCE_SECONDS)
                with pytest.raises(TimeoutError):
                    one.recv(10)
                one.sendall(b"it seems to work")
        expect("open", host, public.address, PORT)
