"""Where the two sides of a punch can perhaps be reached, and which of that is dialled.

What one side says of itself comes through a relay, and both may lie. So a peer sends connection attempts only to
addresses that may belong to the other side: to the public internet, or into a network that it shares with it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec

from shoal.net.addresses import ip_to_dial
from shoal.net.transport import Header
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.relay.messages import MAX_AT_ONCE

MAX_CANDIDATES = 4
"""Addresses of each side for each port."""
LOWEST_PORT = 1024
"""Services of systems are below; no system gives such a port to a connection."""
MEMORY = "memory"
"""Stands for a host on the network inside a process, where ports are the numbers of addresses."""

Endpoint = tuple[str, int]
"""A host and a port."""


class CandidateHost(msgspec.Struct):
    """A host of one side, and for each of its ports in order the port there; 0 if there is none."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=45)]
    ports: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**16)]], msgspec.Meta(max_length=MAX_AT_ONCE)]


class Candidates(Header):
    """Where the sender can perhaps be reached. From the target of a call: no hosts mean that it will not punch."""

    hosts: Annotated[list[CandidateHost], msgspec.Meta(max_length=MAX_CANDIDATES)] = msgspec.field(default_factory=list)

    def of_port(self, number: int) -> list[Endpoint]:
        """The candidates of one port."""
        return [(each.host, each.ports[number]) for each in self.hosts if number < len(each.ports)]


def endpoint_of(address: Multiaddr | None) -> Endpoint | None:
    """Host and port of an address; ``None`` if it has no such parts."""
    if address is None:
        return None
    host, port = address.get("ip4") or address.get("ip6"), address.get("tcp")
    if host is None or port is None:
        number = address.get(MEMORY)
        return None if number is None else (MEMORY, int(number) % 2**16)
    return host, int(port)


def address_of(endpoint: Endpoint) -> Multiaddr:
    """The address of an endpoint, whose host is valid."""
    host, port = endpoint
    if host == MEMORY:
        return Multiaddr(f"/memory/{port}")
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def global_ipv6(addresses: Iterable[Multiaddr]) -> str | None:
    """The first IPv6 host that has the same address everywhere."""
    hosts = (address.get("ip6") for address in addresses)
    return next((host for host in hosts if host is not None and ipaddress.IPv6Address(host).is_global), None)


def own_candidates(ports: Sequence[tuple[Multiaddr | None, Multiaddr | None]], ipv6: str | None) -> Candidates:
    """What to tell the other side.

    Args:
        ports: for each port, where the relay sees it, and its own address; ``None`` if it is not known.
        ipv6: a global IPv6 address of this machine. There the port of the same number is used.
    """
    found: dict[str, list[int]] = {}
    seen = [endpoint_of(seen_at) for seen_at, _ in ports]
    local = [endpoint_of(address) for _, address in ports]
    fresh = [None if each is None or ipv6 is None else (ipv6, each[1]) for each in local]
    for kind in (seen, local, fresh):
        for number, endpoint in enumerate(kind):
            if endpoint is not None:
                of_host = found.setdefault(endpoint[0], [0] * len(ports))
                of_host[number] = of_host[number] or endpoint[1]
    return Candidates([CandidateHost(host, numbers) for host, numbers in list(found.items())[:MAX_CANDIDATES]])


def worth_punching(
    candidates: Iterable[Endpoint],
    *,
    have_same_host: bool,
    is_inside: Callable[[Multiaddr], bool],
    is_relay_on_loopback: bool,
) -> list[Multiaddr]:
    """The candidates of one port that are dialled.

    Args:
        have_same_host: the relay sees both sides at one host: they are behind the same router, or on one machine.
        is_inside: whether an address is in a network of this machine.
        is_relay_on_loopback: so is every peer that it can join to this one.
    """
    found: dict[Multiaddr, None] = {}
    for host, port in candidates:
        if host == MEMORY:
            found[address_of((host, port))] = None
        elif port >= LOWEST_PORT and (ip := ip_to_dial(host)) is not None:
            address = address_of((str(ip), port))
            if is_relay_on_loopback if ip.is_loopback else ip.is_global or have_same_host or is_inside(address):
                found[address] = None
    return list(found)[:MAX_CANDIDATES]
