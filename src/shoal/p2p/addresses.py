"""Addresses: where this machine can be reached, where other peers can, and which cannot although they are alive.

*This machine* has many addresses, and most are of no use to others: loopback, the bridges of containers, the networks
of virtual machines. The one from which it speaks to the rest of the world comes first, then what else looks like a
network, then bridges and VPNs, and loopback in the end. Addresses change when a laptop moves, so they are looked at
again: from time to time, and when a connection is bound to an address that was not there the last time.

*Others*: a dial that fails says little, for the peer may be gone, or busy. But if it has shown another sign of life
since, through others, then it was there, and after a few such failures in a row it is the way to it that is closed: its
user, or the one of this peer, has to do something about it. That is said once for each peer. A connection that is made
takes everything back.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import math
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ifaddr

from shoal.errors import DialError
from shoal.logs import get_logger, setting
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr

MAX_PEERS = 10_000
MAX_ADDRESSES_PER_PEER = 8

LOOK_AGAIN_SECONDS = 30.0
# Others remember no more of one peer.
MAX_ANNOUNCED = 8

_FAR_AWAY = {socket.AF_INET: "8.8.8.8", socket.AF_INET6: "2001:4860:4860::8888"}
_VIRTUAL_NAME = re.compile(
    r"(docker|br-|veth|virbr|lxc|lxd|cni|cali|flannel|podman|vmnet|vboxnet|bridge\d{2,}|vnic"
    r"|tun|utun|tap|wg|tailscale|zt|ppp|ipsec|nordlynx|proton)"
)
_VIRTUAL_WORDS = re.compile(r"virtual|hyper-v|vmware|tap-|tunnel|wireguard|tailscale|zerotier|vpn", re.IGNORECASE)

# What an address is good for, the best first: it is the one of the default route; of another network; of a bridge for
# containers, a virtual machine or a VPN; one that a machine gives itself where nobody else does; of this machine alone;
# it leads to where another one leads, and is not told to others.
ROUTED, PLUGGED, VIRTUAL, UNCONFIGURED, LOOPBACK, SPARE = range(6)


@dataclass(frozen=True)
class OwnAddress:
    """An IP address of this machine."""

    ip: str
    rank: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.ip


def everywhere(port: int = 0) -> list[str]:
    """Listening addresses for all networks of this machine; port 0 is any free one."""
    hosts = [f"/ip4/0.0.0.0/tcp/{port}"]
    return [*hosts, f"/ip6/::/tcp/{port}"] if _has_ipv6() else hosts


def chosen_host_maddrs() -> list[str]:
    """Where ``SHOAL_HOST_MADDRS`` says that peers shall listen; empty if it says nothing."""
    return setting("HOST_MADDRS").replace(",", " ").split()


def is_loopback(address: Multiaddr) -> bool:
    """Whether only the machine itself can use an address; of a name nobody knows."""
    host = address.get("ip4") or address.get("ip6")
    return host is not None and ipaddress.ip_address(host).is_loopback


def host_of(peer: PeerID, addresses: Iterable[Multiaddr]) -> PeerID | str:
    """What peers of one host have in common: the network of a public address, of 256 hosts in IPv4 and a site in IPv6.

    Whoever has none is a host of its own: in one network, or on one machine, peers know each other.
    """
    return next(filter(None, map(_public_network, addresses)), peer)


@functools.lru_cache(4096)
def _public_network(address: Multiaddr) -> str | None:
    host = address.get("ip4") or address.get("ip6")
    if host is None or not ipaddress.ip_address(host).is_global:
        return None
    return str(ipaddress.ip_network((host, 24 if "." in host else 48), strict=False))


def _has_ipv6() -> bool:
    """Some systems, many containers among them, know IPv6 and have it switched off."""
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def look_at_interfaces() -> list[OwnAddress]:
    """The addresses of this machine, the best first.

    Of the addresses of IPv6 that an interface has, one is as good as another, and the temporary ones come and go.
    """
    routed = {source for family in _FAR_AWAY if (source := _source_of_default_route(family)) is not None}
    found: list[OwnAddress] = []
    for adapter in ifaddr.get_adapters():
        is_virtual = bool(_VIRTUAL_NAME.match(str(adapter.name)) or _VIRTUAL_WORDS.search(str(adapter.nice_name)))
        ips = [str(ip.ip if ip.is_IPv4 else ip.ip[0]) for ip in adapter.ips]
        ranked = [OwnAddress(ip, _rank(ip, ip in routed, is_virtual)) for ip in ips]
        found += [each for each in ranked if not each.is_ipv6]
        version_6 = sorted((each for each in ranked if each.is_ipv6), key=_usefulness_of_ipv6)
        found += [*version_6[:1], *(OwnAddress(each.ip, SPARE) for each in version_6[1:])]
    return sorted(found, key=lambda each: (each.rank, each.is_ipv6))


def _source_of_default_route(family: int) -> str | None:
    """The address from which this machine would speak to somebody far away; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            probe.connect((_FAR_AWAY[socket.AddressFamily(family)], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _rank(ip: str, is_routed: bool, is_virtual: bool) -> int:
    parsed = ipaddress.ip_address(ip)
    if parsed.is_loopback:
        return LOOPBACK
    # With IPv6 everybody has one, and it is not enough: it takes the name of an interface.
    if parsed.is_link_local:
        return SPARE if parsed.version == 6 else UNCONFIGURED
    return ROUTED if is_routed else VIRTUAL if is_virtual else PLUGGED


def _usefulness_of_ipv6(address: OwnAddress) -> tuple[int, bool]:
    return address.rank, not ipaddress.ip_address(address.ip).is_global


def _has_network(addresses: Sequence[OwnAddress]) -> bool:
    return any(address.rank in (ROUTED, PLUGGED) for address in addresses)


class OwnAddresses:
    """The addresses of this machine as they are now, not looked at more often than needed.

    Args:
        look: finds them.
    """

    def __init__(self, look: Callable[[], Sequence[OwnAddress]] = look_at_interfaces) -> None:
        self._look = look
        self._looked_at = -math.inf
        self._all: list[OwnAddress] = []
        self.lost: set[str] = set()
        """Addresses that are not this machine's any more."""

    def __contains__(self, ip: str) -> bool:
        return any(ip == address.ip for address in self._all)

    def told(self) -> list[OwnAddress]:
        """What others are to know, the best first.

        Addresses that nobody has configured lead to a neighbour on the same cable at best: they are told only where
        there is no network. Windows has them on everything that is not plugged in.
        """
        useless = (SPARE, UNCONFIGURED) if _has_network(self._all) else (SPARE,)
        return [address for address in self._all if address.rank not in useless]

    def look(self, now: float) -> bool:
        """Look at the interfaces, and return whether others have something new to know.

        Without a network there is nothing better than what was there before: to be offline is not to have moved.
        """
        is_first, self._looked_at = self._looked_at == -math.inf, now
        found = list(self._look())
        if _has_network(self._all) and not _has_network(found):
            return False
        before, told = {address.ip for address in self._all}, self.told()
        self._all = found
        self.lost = (self.lost | before) - {address.ip for address in found}
        return not is_first and self.told() != told

    def look_if_due(self, now: float) -> bool:
        """The same, if the last time is long ago."""
        return now - self._looked_at >= LOOK_AGAIN_SECONDS and self.look(now)

    def look_if_unknown(self, ip: str, now: float) -> bool:
        """The same, if a connection of this machine has an address that was not there."""
        return ip not in self and not ipaddress.ip_address(ip).is_loopback and self.look(now)


LOCALHOST = "127.0.0.1"


def choose_ip_address(
    maddrs: Iterable[Multiaddr], prefer_global: bool = True, protocol_priority: Sequence[str] = ("ip4", "ip6")
) -> str:
    """The IP address that others are most likely to reach.

    Args:
        maddrs: addresses to choose from; those without an IP address do not count.
        prefer_global: an address of the whole internet before one of the local network.
        protocol_priority: among equals, the earlier protocol, then the earlier address.

    Raises:
        ValueError: no address of these protocols.
    """
    known = list(maddrs)
    found = [maddr.get(protocol) for protocol in protocol_priority for maddr in known]
    addresses = [address for address in found if address is not None]
    if not addresses:
        raise ValueError(f"no address with {' or '.join(protocol_priority)} in {[str(maddr) for maddr in known]}")
    if prefer_global:
        return next((address for address in addresses if ipaddress.ip_address(address).is_global), addresses[0])
    return addresses[0]


def log_visible_maddrs(visible_maddrs: Sequence[Multiaddr], only_p2p: bool = False) -> None:
    """Tell the user how others connect to this peer, with :mod:`shoal.logs`.

    Args:
        visible_maddrs: from ``get_visible_maddrs()``.
        only_p2p: tell only ``/p2p/<peer id>``, where addresses are found by other means.
    """
    logger = get_logger(__name__)
    if only_p2p:
        shortest = list(dict.fromkeys(f"/p2p/{maddr['p2p']}" for maddr in visible_maddrs))
    else:
        shortest = [str(maddr) for maddr in _for_initial_peers(visible_maddrs)]
    logger.info("To connect other peers to this one, use --initial_peers %s", " ".join(shortest))
    logger.info("Full list of visible multiaddresses: %s", " ".join(map(str, visible_maddrs)))


def _for_initial_peers(maddrs: Sequence[Multiaddr]) -> list[Multiaddr]:
    """All addresses with the best IP address, or all if none has one."""
    with_ip = [maddr for maddr in maddrs if "ip4" in maddr or "ip6" in maddr]
    if not with_ip:
        return list(maddrs)
    best = choose_ip_address(with_ip)
    return [maddr for maddr in with_ip if best in (maddr.get("ip4"), maddr.get("ip6"))]


class AddressBook:
    """Addresses by peer, without the ``/p2p`` part; the best first.

    Bounded: forgets peers unused for longest. What the peer itself has told, or where it has answered, comes first and
    is not pushed out by what others tell about it.
    """

    def __init__(self) -> None:
        # For each address: whether it is more than hearsay.
        self._known: OrderedDict[PeerID, dict[Multiaddr, bool]] = OrderedDict()
        self.changes = 0
        """How often something has changed: who keeps what follows from it looks here."""

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._known

    def add(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember addresses of a peer, as told by somebody.

        Raises:
            ValueError: an address belongs to somebody else or is not a multiaddr; nothing is remembered then.
        """
        self.changes += self._add(peer, [_without_peer(peer, address) for address in addresses], certain=False)

    def replace(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """The peer itself has told where it can be dialled: that is now all that counts.

        Addresses that make no sense here are skipped: a newer peer may have more of them.
        """
        plain = []
        for address in list(addresses)[:MAX_ADDRESSES_PER_PEER]:
            try:
                plain.append(_without_peer(peer, address))
            except ValueError:
                continue
        former = list(self._known.pop(peer, {}).items())
        self._add(peer, plain, certain=True)
        self.changes += list(self._known.get(peer, {}).items()) != former

    def _add(self, peer: PeerID, addresses: list[Multiaddr], *, certain: bool) -> bool:
        """Whether any of them is new."""
        if not addresses:
            return False
        known = self._known.setdefault(peer, {})
        self._known.move_to_end(peer)
        is_news = False
        for address in addresses:
            if address not in known and self._has_room(known):
                known[address] = certain
                is_news = True
        while len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)
        return is_news

    @staticmethod
    def _has_room(known: dict[Multiaddr, bool]) -> bool:
        """Make room, if need be, by forgetting the oldest hearsay."""
        if len(known) < MAX_ADDRESSES_PER_PEER:
            return True
        oldest = next((address for address, certain in known.items() if not certain), None)
        if oldest is None:
            return False
        del known[oldest]
        return True

    def get(self, peer: PeerID) -> list[Multiaddr]:
        """Addresses of a peer, the best first; empty if unknown."""
        if peer not in self._known:
            return []
        self._known.move_to_end(peer)
        return list(self._known[peer])

    def peek(self, peer: PeerID) -> tuple[Multiaddr, ...]:
        """The same in any thread. Nothing moves: :meth:`items` may be at work in another one."""
        return tuple(self._known.get(peer, ()))

    def items(self) -> list[tuple[PeerID, list[Multiaddr]]]:
        """Everything that is known."""
        return [(peer, list(addresses)) for peer, addresses in self._known.items()]

    def prefer(self, peer: PeerID, address: Multiaddr) -> None:
        """The peer has answered at this address: try it first next time."""
        known = self._known.get(peer, {})
        if address in known:
            self.changes += address != next(iter(known))
            del known[address]
            self._known[peer] = {address: True, **known}


@functools.lru_cache(4096)
def _parse(text: str) -> Multiaddr:
    """Many tell of the same addresses."""
    return Multiaddr(text)


def _without_peer(peer: PeerID, address: Multiaddr | str) -> Multiaddr:
    plain = address if isinstance(address, Multiaddr) else _parse(address)
    if "p2p" in plain:
        if plain["p2p"] != peer.to_base58():
            raise ValueError(f"{plain} is not an address of peer {peer}")
        plain = plain.decapsulate(f"/p2p/{peer}")
    return plain


logger = logging.getLogger(__name__)

# One failure may be chance; so many in a row, with signs of life between them, are not.
FAILURES_TO_TELL = 3
MAX_UNREACHABLE_PEERS = 1024


class UnreachablePeers:
    """What this peer has experienced with peers that it wanted to call."""

    def __init__(self) -> None:
        # For each peer and kind of sign: how many signs of life went before a failure, and the last one.
        self._failures: OrderedDict[PeerID, dict[str, tuple[int, float]]] = OrderedDict()
        self._told: OrderedDict[PeerID, None] = OrderedDict()

    def note_failure(
        self, peer: PeerID, error: BaseException, addresses: Sequence[Multiaddr], *, company: str, sign_of_life: float
    ) -> None:
        """A call to a peer has failed.

        Args:
            error: how; only a dial that failed counts.
            addresses: where it is said to be.
            company: what this peer and that one take part in.
            sign_of_life: of that peer, growing with each new one. Signs of different companies are not compared.
        """
        if not isinstance(error, DialError):
            return
        failures = self._failures.setdefault(peer, {})
        count, last_sign = failures.get(company, (0, float("-inf")))
        if sign_of_life <= last_sign:
            return  # it may be gone
        failures[company] = count + 1, sign_of_life
        _forget_oldest(self._failures)
        if count + 1 >= FAILURES_TO_TELL and peer not in self._told:
            self._told[peer] = None
            _forget_oldest(self._told)
            logger.warning(
                "peer %s of %s is there, but this peer cannot call it, so that they may not average with each other: "
                "%s. What to do: %s",
                peer,
                company,
                error,
                what_to_do(addresses),
            )

    def note_connection(self, peer: PeerID) -> None:
        """A peer could be called."""
        self._failures.pop(peer, None)


def _forget_oldest(known: OrderedDict[PeerID, Any]) -> None:
    while len(known) > MAX_UNREACHABLE_PEERS:
        known.popitem(last=False)


def what_to_do(addresses: Sequence[Multiaddr]) -> str:
    """How somebody who announces these addresses becomes reachable."""
    client = "or start it with client_mode=True"
    if addresses and all(map(is_loopback, addresses)):
        return (
            "it listens on its own machine alone: start it with host_maddrs=['/ip4/0.0.0.0/tcp/0'], or without "
            f"SHOAL_HOST_MADDRS in its environment, {client}"
        )
    port = next((f" {port}" for address in addresses if (port := address.get("tcp"))), "")
    return (
        f"open port{port} of that machine in its firewall, or forward it in its router (announce_maddrs), {client}; "
        "'shoal doctor' with its address, from here, says more"
    )
