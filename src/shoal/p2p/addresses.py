"""Addresses: where this machine can be reached, where other peers can, and which live peers cannot be reached.

*This machine* has many addresses, and most are useless to others: loopback, container bridges, networks of virtual
machines. The address of the default route comes first, then other real networks, then bridges and VPNs, and loopback
last. Addresses change when a laptop moves. So this module looks again from time to time, and whenever a connection is
bound to an address that it did not see the last time.

*Other peers*: a failed dial says little, for the peer may be gone or busy. But a new sign of life, seen through others,
shows that the peer was there. After a few such failures in a row, the way to the peer must be closed, and its user or
the user of this peer has to act. Each such peer is reported once. A successful connection clears its failures.
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
from shoal.logs import Seldom, get_logger, setting
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr

MAX_PEERS = 10_000
MAX_ADDRESSES_PER_PEER = 8

LOOK_AGAIN_SECONDS = 30.0
# Other peers remember no more addresses of one peer than this.
MAX_ANNOUNCED = 8

_FAR_AWAY = {socket.AF_INET: "8.8.8.8", socket.AF_INET6: "2001:4860:4860::8888"}
_VIRTUAL_NAME = re.compile(
    r"(docker|br-|veth|virbr|lxc|lxd|cni|cali|flannel|podman|vmnet|vboxnet|bridge\d{2,}|vnic"
    r"|tun|utun|tap|wg|tailscale|zt|ppp|ipsec|nordlynx|proton)"
)
_VIRTUAL_WORDS = re.compile(r"virtual|hyper-v|vmware|tap-|tunnel|wireguard|tailscale|zerotier|vpn", re.IGNORECASE)

# What an address is good for, the best first. ROUTED: the default route uses it. PLUGGED: another network. VIRTUAL: a
# container bridge, a virtual machine or a VPN. UNCONFIGURED: self-assigned (link-local). LOOPBACK: this machine alone.
# SPARE: it leads to the same place as another address, so others are not told of it.
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
    """Listening addresses for all networks of this machine; port 0 means any free port."""
    hosts = [f"/ip4/0.0.0.0/tcp/{port}"]
    return [*hosts, f"/ip6/::/tcp/{port}"] if _has_ipv6() else hosts


def chosen_host_maddrs() -> list[str]:
    """The listening addresses in ``SHOAL_HOST_MADDRS``; empty if it is not set."""
    return setting("HOST_MADDRS").replace(",", " ").split()


def is_loopback(address: Multiaddr) -> bool:
    """Whether only the machine itself can use an address; a host name never counts as loopback."""
    host = address.get("ip4") or address.get("ip6")
    return host is not None and ipaddress.ip_address(host).is_loopback


def host_of(peer: PeerID, addresses: Iterable[Multiaddr]) -> PeerID | str:
    """What peers of one host have in common: the network of their public address (/24 in IPv4, /48, a site, in IPv6).

    A peer without a public address is a host of its own: peers of one network or one machine know each other.
    """
    return next(filter(None, map(_public_network, addresses)), peer)


@functools.lru_cache(4096)
def _public_network(address: Multiaddr) -> str | None:
    host = address.get("ip4") or address.get("ip6")
    if host is None or not ipaddress.ip_address(host).is_global:
        return None
    return str(ipaddress.ip_network((host, 24 if "." in host else 48), strict=False))


def _has_ipv6() -> bool:
    """Whether IPv6 works: some systems, many containers among them, support it but have it switched off."""
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

    All IPv6 addresses of one interface are equally good, and temporary ones come and go: one is kept, the rest are
    spare.
    """
    routed = {source for family in _FAR_AWAY if (source := source_of_default_route(family)) is not None}
    found: list[OwnAddress] = []
    for adapter in ifaddr.get_adapters():
        is_virtual = bool(_VIRTUAL_NAME.match(str(adapter.name)) or _VIRTUAL_WORDS.search(str(adapter.nice_name)))
        ips = [str(ip.ip if ip.is_IPv4 else ip.ip[0]) for ip in adapter.ips]
        ranked = [OwnAddress(ip, _rank(ip, ip in routed, is_virtual)) for ip in ips]
        found += [each for each in ranked if not each.is_ipv6]
        version_6 = sorted((each for each in ranked if each.is_ipv6), key=_usefulness_of_ipv6)
        found += [*version_6[:1], *(OwnAddress(each.ip, SPARE) for each in version_6[1:])]
    return sorted(found, key=lambda each: (each.rank, each.is_ipv6))


def source_of_default_route(family: int) -> str | None:
    """The address from which this machine would send to a distant host; nothing is sent."""
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
    # In IPv6 every interface has one, and it works only together with the name of the interface.
    if parsed.is_link_local:
        return SPARE if parsed.version == 6 else UNCONFIGURED
    return ROUTED if is_routed else VIRTUAL if is_virtual else PLUGGED


def _usefulness_of_ipv6(address: OwnAddress) -> tuple[int, bool]:
    return address.rank, not ipaddress.ip_address(address.ip).is_global


def _has_network(addresses: Sequence[OwnAddress]) -> bool:
    return any(address.rank in (ROUTED, PLUGGED) for address in addresses)


class OwnAddresses:
    """The current addresses of this machine, looked up no more often than needed.

    Args:
        look: finds them.
    """

    def __init__(self, look: Callable[[], Sequence[OwnAddress]] = look_at_interfaces) -> None:
        self._look = look
        self._looked_at = -math.inf
        self._all: list[OwnAddress] = []
        self.lost: set[str] = set()
        """Addresses that this machine no longer has."""

    def __contains__(self, ip: str) -> bool:
        return any(ip == address.ip for address in self._all)

    def told(self) -> list[OwnAddress]:
        """The addresses to tell others, the best first.

        A self-assigned address reaches a neighbour on the same cable at best, so it is told only if there is no
        network. Windows has one on every interface that is not plugged in.
        """
        useless = (SPARE, UNCONFIGURED) if _has_network(self._all) else (SPARE,)
        return [address for address in self._all if address.rank not in useless]

    def look(self, now: float) -> bool:
        """Look at the interfaces, and return whether there is news for others.

        While the machine is offline, its last addresses stay: being offline does not mean that it has moved.
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
        """Like :meth:`look`, if the last look was long ago."""
        return now - self._looked_at >= LOOK_AGAIN_SECONDS and self.look(now)

    def look_if_unknown(self, ip: str, now: float) -> bool:
        """Like :meth:`look`, if a connection of this machine has an address that was not there before."""
        return ip not in self and not ipaddress.ip_address(ip).is_loopback and self.look(now)


LOCALHOST = "127.0.0.1"


def choose_ip_address(
    maddrs: Iterable[Multiaddr], prefer_global: bool = True, protocol_priority: Sequence[str] = ("ip4", "ip6")
) -> str:
    """The IP address that others are most likely to reach.

    Args:
        maddrs: addresses to choose from; addresses without an IP address are ignored.
        prefer_global: prefer a public address to one of the local network.
        protocol_priority: among equals, the earlier protocol wins, then the earlier address.

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
        only_p2p: show only ``/p2p/<peer id>``, for peers that find addresses by other means.
    """
    logger = get_logger(__name__)
    if only_p2p:
        shortest = list(dict.fromkeys(f"/p2p/{maddr['p2p']}" for maddr in visible_maddrs))
    else:
        shortest = [str(maddr) for maddr in _for_initial_peers(visible_maddrs)]
    logger.info("To connect other peers to this one, use --initial_peers %s", " ".join(shortest))
    logger.info("Full list of visible multiaddresses: %s", " ".join(map(str, visible_maddrs)))


def _for_initial_peers(maddrs: Sequence[Multiaddr]) -> list[Multiaddr]:
    """All addresses with the best IP address, or all addresses if none has an IP address."""
    with_ip = [maddr for maddr in maddrs if "ip4" in maddr or "ip6" in maddr]
    if not with_ip:
        return list(maddrs)
    best = choose_ip_address(with_ip)
    return [maddr for maddr in with_ip if best in (maddr.get("ip4"), maddr.get("ip6"))]


class AddressBook:
    """Addresses by peer, without the ``/p2p`` part; the best first.

    Bounded: it forgets the peers unused for longest. Addresses that the peer itself announced, or where it answered,
    come first, and hearsay does not push them out.

    Args:
        supports: whether this peer can dial an address.
    """

    def __init__(self, supports: Callable[[Multiaddr], bool] = lambda address: True) -> None:
        self._supports = supports
        # For each address: whether it is more than hearsay.
        self._known: OrderedDict[PeerID, dict[Multiaddr, bool]] = OrderedDict()
        self.changes = 0
        """The number of changes so far: caches of derived data compare it."""

    def __contains__(self, peer: PeerID) -> bool:
        return peer in self._known

    def add(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Remember addresses of a peer that a third party has told.

        Raises:
            ValueError: an address belongs to another peer or is not a multiaddr; nothing is remembered then.
        """
        self.changes += self._add(peer, [_without_peer(peer, address) for address in addresses], certain=False)

    def replace(self, peer: PeerID, addresses: Iterable[Multiaddr | str]) -> None:
        """Replace all addresses of a peer by those that the peer itself announces.

        Addresses that make no sense here are skipped: a newer peer may know more kinds. If it announces nothing that
        this peer can dial, what is known besides stays.
        """
        plain = []
        for address in list(addresses)[:MAX_ADDRESSES_PER_PEER]:
            try:
                plain.append(_without_peer(peer, address))
            except ValueError:
                continue
        former = self._known.pop(peer, {})
        kept = {address: is_sure for address, is_sure in former.items() if self._supports(address)}
        if kept and not any(map(self._supports, plain)):
            self._known[peer] = kept
        self._add(peer, plain, certain=True)
        self.changes += list(self._known.get(peer, {}).items()) != list(former.items())

    def _add(self, peer: PeerID, addresses: list[Multiaddr], *, certain: bool) -> bool:
        """Add addresses; returns whether any of them is new."""
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
        """Make room, if need be, by forgetting the oldest hearsay; returns whether there is room."""
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
        """Like :meth:`get`, from any thread. It reorders nothing, because :meth:`items` may run in another thread."""
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
    """Parse an address; cached, because many peers tell the same addresses."""
    return Multiaddr(text)


def _without_peer(peer: PeerID, address: Multiaddr | str) -> Multiaddr:
    plain = address if isinstance(address, Multiaddr) else _parse(address)
    if "p2p" in plain:
        if plain["p2p"] != peer.to_base58():
            raise ValueError(f"{plain} is not an address of peer {peer}")
        plain = plain.decapsulate(f"/p2p/{peer}")
    return plain


logger = logging.getLogger(__name__)

# One failure may be chance; this many in a row, with signs of life between them, are not.
FAILURES_TO_TELL = 3
MAX_UNREACHABLE_PEERS = 1024


class UnreachablePeers:
    """Counts failed dials of peers that are alive, and tells the user about each such peer once."""

    def __init__(self) -> None:
        # For each peer and company: the number of failures with a new sign of life, and the last sign.
        self._failures: OrderedDict[PeerID, dict[str, tuple[int, float]]] = OrderedDict()
        self._told: OrderedDict[PeerID, None] = OrderedDict()
        self._warn_seldom = Seldom(logger.warning)

    def note_failure(
        self, peer: PeerID, error: BaseException, addresses: Sequence[Multiaddr], *, company: str, sign_of_life: float
    ) -> None:
        """A call to a peer has failed.

        Args:
            error: the failure; only a failed dial counts.
            addresses: the addresses known for the peer.
            company: what both peers take part in.
            sign_of_life: of that peer; it grows with each new sign. Signs of different companies are not compared.
        """
        if not isinstance(error, DialError):
            return
        failures = self._failures.setdefault(peer, {})
        count, last_sign = failures.get(company, (0, float("-inf")))
        if sign_of_life <= last_sign:
            return  # without a new sign of life the peer may be gone
        failures[company] = count + 1, sign_of_life
        _forget_oldest(self._failures)
        if count + 1 >= FAILURES_TO_TELL and peer not in self._told:
            self._told[peer] = None
            _forget_oldest(self._told)
            self._warn_seldom(
                "peer %s of %s is there, but this peer cannot call it, so that they may not average with each other: "
                "%s. What to do: %s",
                peer,
                company,
                error,
                what_to_do(addresses),
                about=peer,
            )

    def note_connection(self, peer: PeerID) -> None:
        """A dial of the peer has succeeded."""
        self._failures.pop(peer, None)


def _forget_oldest(known: OrderedDict[PeerID, Any]) -> None:
    while len(known) > MAX_UNREACHABLE_PEERS:
        known.popitem(last=False)


def what_to_do(addresses: Sequence[Multiaddr]) -> str:
    """Advice on how a peer that announces these addresses becomes reachable."""
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


def checked_announcement(text: Multiaddr | str) -> Multiaddr:
    """An address that the user wants to be told to others.

    Raises:
        ValueError: others could not use it.
    """
    address = Multiaddr(text)
    if "0" in (address.get("tcp"), address.get("udp")):
        raise ValueError(f"cannot announce {address}: others need a real port, not 0; fix the port in host_maddrs too")
    unknown = next((protocol for protocol in address.protocols() if protocol.code is None), None)
    if unknown is not None:
        raise ValueError(f"cannot announce {address}: no peer knows the protocol {unknown!r}; announce /ip4/…/tcp/…")
    return address
