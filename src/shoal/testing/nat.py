"""Simulated routers that translate addresses, and the routes that lead through them.

On a :class:`~shoal.testing.Network` with ``internet=True``, every host has an IPv4 address, and a host may be behind a
:class:`Nat`::

    home = Nat(mapping="easy", filtering="port")
    laptop, desktop = network.add_host(nat=home), network.add_host(nat=home)
    friend = network.add_host(nat=Nat(mapping="hard", behind=Nat()))  # behind the router of a carrier
    server = network.add_host()  # has a public address

What the words mean (RFC 4787):

- *mapping* ``easy``: an inner port has one outer port for all destinations; ``hard``: another one for each destination;
  ``none``: nothing is translated, so this is a firewall in front of public addresses.
- *filtering*: what gets in through an existing outer port. ``none``: everything; ``address``: packets from hosts to
  which something was sent from there; ``port``: only packets from ports to which something was sent. ``open``:
  everything, even through ports from which nothing was sent yet, as if all were forwarded.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from shoal.errors import SimulationError
from shoal.peers.multiaddr import Multiaddr

Endpoint = tuple[str, int]
"""An IP address and a port."""
# With more mappings than this, a router forgets the oldest. Chosen.
MOST_MAPPINGS = 4096


class Located(Protocol):
    """A host, as its routers see it."""

    ip: str
    nat: Nat | None


class Severable(Protocol):
    """A connection that falls silent without an end when a router forgets it."""

    def sever(self) -> None: ...


H = TypeVar("H", bound=Located)


def endpoint_of(address: Multiaddr) -> Endpoint:
    """The IP address and port of ``/ip4/…/tcp/…``."""
    host, port = address.values()[:2]
    return str(host), int(str(port))


def address_of(endpoint: Endpoint) -> Multiaddr:
    """An endpoint as an address of the transport."""
    return Multiaddr(f"/ip4/{endpoint[0]}/tcp/{endpoint[1]}")


@dataclass
class _Mapping:
    """An inner port that has an outer one."""

    inside: Endpoint
    key: tuple[Endpoint, Endpoint | None]
    contacts: dict[Endpoint, None] = field(default_factory=dict)
    """The destinations to which something was sent from there."""


class Nat:
    """A router. It takes part in a network as soon as a host is added behind it.

    Args:
        mapping: which outer port an inner one gets.
        filtering: what gets in from outside.
        keeps_ports: whether an easy mapping keeps the number of the inner port, if it is free.
        rejects: whether it answers packets that do not get in, rather than dropping them.
        hairpin: whether hosts behind it reach each other at their outer addresses.
        behind: the next router on the way out, such as that of a carrier.
    """

    def __init__(
        self,
        mapping: Literal["easy", "hard", "none"] = "easy",
        filtering: Literal["none", "address", "port", "open"] = "port",
        *,
        keeps_ports: bool = True,
        rejects: bool = False,
        hairpin: bool = False,
        behind: Nat | None = None,
    ) -> None:
        self.mapping, self.filtering = mapping, filtering
        self.keeps_ports, self.rejects, self.hairpin, self.behind = keeps_ports, rejects, hairpin, behind
        self.ip = ""
        """Its outer address."""
        self.prefix = ""
        """The prefix of the addresses behind it."""
        self.members: list[Located | Nat] = []
        """The hosts and routers directly behind it."""
        self.streams: dict[Severable, None] = {}
        """One end of each connection that it translates."""
        self._internet: Internet[Any] | None = None
        self._outer: dict[tuple[Endpoint, Endpoint | None], Endpoint] = {}
        self._mappings: dict[Endpoint, _Mapping] = {}
        self._forwarded: dict[int, Endpoint] = {}

    def __repr__(self) -> str:
        return f"<Nat {self.ip}, {self.mapping} mapping, {self.filtering} filtering>"

    # --- what its owner does ------------------------------------------------------------------------------------------

    def forward(self, port: int, host: Located) -> None:
        """Forward a port to the same port of a host."""
        self._forwarded[port] = (host.ip, port)

    def rebind(self, *, new_address: bool = False) -> None:
        """Forget every connection, as after a restart.

        Old connections fall silent without an end. New ones get other ports, which are no longer those of the hosts.

        Args:
            new_address: get another outer address, too.
        """
        assert self._internet is not None
        self._outer.clear()
        self._mappings.clear()
        self.keeps_ports = False
        streams, self.streams = self.streams, {}
        for stream in streams:
            stream.sever()
        if new_address:
            self._internet.move(self)

    # --- packets ------------------------------------------------------------------------------------------------------

    def outward(self, inside: Endpoint, to: Endpoint) -> Endpoint:
        """The outer port for packets from an inner port to a destination."""
        key = (inside, to if self.mapping == "hard" else None)
        outer = self._outer.get(key)
        if outer is None:
            outer = self._outer[key] = inside if self.mapping == "none" else (self.ip, self._new_port(inside[1]))
            self._mappings[outer] = _Mapping(inside, key)
            if len(self._mappings) > MOST_MAPPINGS:
                oldest = next(iter(self._mappings))
                del self._outer[self._mappings.pop(oldest).key]
        self._mappings[outer].contacts[to] = None
        return outer

    def _new_port(self, wanted: int) -> int:
        assert self._internet is not None
        port = wanted
        if self.mapping == "hard" or not self.keeps_ports:
            port = self._internet.rng.randrange(1024, 2**16)
        while (self.ip, port) in self._mappings or port in self._forwarded:
            port = self._internet.rng.randrange(1024, 2**16)
        return port

    def withdraw(self, outer: Endpoint, to: Endpoint) -> None:
        """An attempt to connect from this outer port was refused: expect nothing from that destination any more."""
        mapping = self._mappings.get(outer)
        if mapping is not None:
            mapping.contacts.pop(to, None)

    def inward(self, to: Endpoint, source: Endpoint) -> Endpoint | None:
        """The inner endpoint to which a packet from outside is forwarded; ``None`` if it does not get in."""
        mapping = self._mappings.get(to)
        if mapping is not None and self._lets_in(mapping, source):
            return mapping.inside
        if self.filtering == "open":
            return self._forwarded.get(to[1], to if self.mapping == "none" else self._first_inside(to[1]))
        return self._forwarded.get(to[1])

    def _lets_in(self, mapping: _Mapping, source: Endpoint) -> bool:
        if self.filtering == "address":
            return any(source[0] == host for host, _ in mapping.contacts)
        return self.filtering != "port" or source in mapping.contacts

    def _first_inside(self, port: int) -> Endpoint:
        return self.members[0].ip, port

    # --- its place in the network -------------------------------------------------------------------------------------

    def first_host(self) -> Located:
        """A host behind it."""
        first = self.members[0]
        return first.first_host() if isinstance(first, Nat) else first

    def take_place(self, internet: Internet[Any]) -> None:
        """Become part of a network."""
        if self._internet is None:
            self._internet = internet
            self.ip = internet.add(self, self.behind)
        elif self._internet is not internet:
            raise SimulationError(f"{self} is part of another network")


@dataclass
class Packet:
    """An attempt to connect, after the routers of its sender.

    Attributes:
        to: its destination as the sender knows it.
        source: its sender, as seen now.
        place: the router behind which it is; ``None`` = the open internet.
        left: the routers that it has passed, with its outer port at each.
    """

    to: Endpoint
    source: Endpoint
    place: Nat | None
    left: list[tuple[Nat, Endpoint]]

    def withdraw(self) -> None:
        """The packet was refused."""
        for router, outer in self.left:
            router.withdraw(outer, self.to)


@dataclass
class Arrived(Generic[H]):
    """What became of a packet.

    Attributes:
        host: the host that it has reached, or ``None``.
        to: its destination as that host knows it.
        is_rejected: whether a router has answered that it does not let it in.
        routers: the routers that it has passed.
    """

    host: H | None
    to: Endpoint
    is_rejected: bool
    routers: list[Nat]


class Internet(Generic[H]):
    """The addresses of hosts and routers, and the routes between them.

    Args:
        rng: source of all randomness.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._there: dict[tuple[Nat | None, str], H | Nat] = {}
        self._public_numbers, self._private_numbers, self._carriers = (itertools.count() for _ in range(3))

    def add(self, member: H | Nat, place: Nat | None) -> str:
        """Give an address to a host or router behind another router, or to one on the open internet."""
        if place is not None:
            place.take_place(self)
            place.members.append(member)
        if place is None or place.mapping == "none":
            ip = self._public_ip()
        else:
            if not place.prefix:
                place.prefix = self._private_prefix(is_carrier=isinstance(member, Nat))
            ip = f"{place.prefix}{len(place.members) + 1}"
        self._there[place, ip] = member
        if place is not None and place.mapping == "none":
            self._there[place.behind, ip] = place
        return ip

    def move(self, router: Nat) -> None:
        """Give another outer address to a router."""
        assert router.mapping != "none", "a firewall has no address of its own"
        del self._there[router.behind, router.ip]
        if router.behind is None:
            router.ip = self._public_ip()
        else:
            router.behind.members.remove(router)
            taken = {member.ip for member in router.behind.members} | {router.ip}
            numbers = itertools.count(len(taken) + 1)
            router.ip = next(ip for number in numbers if (ip := f"{router.behind.prefix}{number}") not in taken)
            router.behind.members.append(router)
        self._there[router.behind, router.ip] = router

    def _public_ip(self) -> str:
        """An address in a network of its own: code that counts hosts looks at the first three bytes."""
        number = next(self._public_numbers)
        return f"{101 + (number >> 16)}.{number >> 8 & 255}.{number & 255}.1"

    def _private_prefix(self, *, is_carrier: bool) -> str:
        number = next(self._carriers if is_carrier else self._private_numbers)
        return f"100.{64 + (number >> 8)}.{number & 255}." if is_carrier else f"10.{number >> 8}.{number & 255}."

    def depart(self, host: H, port: int, to: Endpoint) -> Packet | None:
        """Send an attempt to connect; ``None`` if no route leads there."""
        source, place, left = (host.ip, port), host.nat, list[tuple[Nat, Endpoint]]()
        while (place, to[0]) not in self._there:
            if place is None or (place.ip == to[0] and not place.hairpin):
                return None
            source = place.outward(source, to)
            left.append((place, source))
            place = place.behind
        return Packet(to, source, place, left)

    def host_towards(self, packet: Packet) -> H:
        """A host at the other end that is as far away as the destination of the packet."""
        there = self._there[packet.place, packet.to[0]]
        return cast("H", there.first_host()) if isinstance(there, Nat) else there

    def arrive(self, packet: Packet) -> Arrived[H]:
        """Let a packet pass the routers of its destination."""
        to, place = packet.to, packet.place
        routers = [router for router, _ in packet.left]
        while isinstance(there := self._there.get((place, to[0])), Nat):
            routers.append(there)
            inside = there.inward(to, packet.source)
            if inside is None:
                return Arrived(None, to, there.rejects, routers)
            to, place = inside, there
        return Arrived(there, to, False, routers)
