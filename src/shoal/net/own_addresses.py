"""Addresses of this machine, and which of them to tell others.

A machine has many addresses, and most are useless to others: loopback, container bridges, networks of virtual
machines. The address of the default route ranks first, then other real networks, then bridges and VPNs, and loopback
last. Addresses change when a laptop moves. So this module looks again from time to time, and whenever a connection is
bound to an address that it did not see the last time.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import ifaddr

from shoal.base.bounded import Bounded
from shoal.base.logs import get_logger, setting
from shoal.peers.multiaddr import Multiaddr

LOOK_AGAIN_SECONDS = 15.0  # chosen: a moved laptop notices soon, and a look takes about a millisecond
# Networks that the internet does not route: private (RFC 1918), carrier-grade NAT (RFC 6598), self-assigned (RFC 3927),
# and the same in IPv6 (RFC 4193, RFC 4291).
_OF_ONE_NETWORK = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
        *("fc00::/7", "fe80::/10"),
    )
)
# The most addresses that a peer announces and that others remember of it. Chosen.
MAX_ADDRESSES_PER_PEER = 8

# Public name servers; nothing is sent to them, see `source_of_default_route`.
_FAR_AWAY = {socket.AF_INET: "8.8.8.8", socket.AF_INET6: "2001:4860:4860::8888"}
_VIRTUAL_NAME = re.compile(
    r"(docker|br-|veth|virbr|lxc|lxd|cni|cali|flannel|podman|vmnet|vboxnet|bridge\d{2,}|vnic"
    r"|tun|utun|tap|wg|tailscale|zt|ppp|ipsec|nordlynx|proton)"
)
_VIRTUAL_WORDS = re.compile(r"virtual|hyper-v|vmware|tap-|tunnel|wireguard|tailscale|zerotier|vpn", re.IGNORECASE)

# Ranks of addresses, the best first. ROUTED: the default route uses it. PLUGGED: another network. VIRTUAL: a container
# bridge, a virtual machine or a VPN. UNCONFIGURED: self-assigned (link-local). LOOPBACK: this machine alone. SPARE: it
# leads to the same place as another address, so others are not told of it.
ROUTED, PLUGGED, VIRTUAL, UNCONFIGURED, LOOPBACK, SPARE = range(6)


def is_of_one_network(ip: str) -> bool:
    """Whether an IP address is valid only within one network or one machine."""
    parsed = ipaddress.ip_address(ip)
    return parsed.is_loopback or any(parsed in network for network in _OF_ONE_NETWORK)


@dataclass(frozen=True)
class OwnAddress:
    """An IP address of this machine."""

    ip: str
    rank: int
    prefix: int | None = None
    """Length of the network's prefix in bits; ``None`` = it has no network."""

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.ip

    @functools.cached_property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """The network in which hosts reach each other without a router, at most."""
        longest = 128 if self.is_ipv6 else 32
        return ipaddress.ip_network((self.ip, longest if self.prefix is None else self.prefix), strict=False)


def everywhere(port: int = 0) -> list[str]:
    """Listening addresses for all networks of this machine; port 0 means any free port."""
    hosts = [f"/ip4/0.0.0.0/tcp/{port}"]
    return [*hosts, f"/ip6/::/tcp/{port}"] if _has_ipv6() else hosts


def chosen_host_maddrs() -> list[str]:
    """The listening addresses in ``SHOAL_HOST_MADDRS``; empty if it is not set."""
    return setting("HOST_MADDRS").replace(",", " ").split()


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

    All IPv6 addresses of one interface are equally good, and temporary ones come and go, so all but one are spare.
    """
    routed = {source for family in _FAR_AWAY if (source := source_of_default_route(family)) is not None}
    found: list[OwnAddress] = []
    for adapter in ifaddr.get_adapters():
        is_virtual = bool(_VIRTUAL_NAME.match(str(adapter.name)) or _VIRTUAL_WORDS.search(str(adapter.nice_name)))
        ips = [(str(ip.ip if ip.is_IPv4 else ip.ip[0]), ip.network_prefix) for ip in adapter.ips]
        ranked = [OwnAddress(ip, _rank(ip, ip in routed, is_virtual), prefix) for ip, prefix in ips]
        found += [each for each in ranked if not each.is_ipv6]
        version_6 = sorted((each for each in ranked if each.is_ipv6), key=_usefulness_of_ipv6)
        found += [*version_6[:1], *(replace(each, rank=SPARE) for each in version_6[1:])]
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
    # In IPv6 every interface has a link-local address, and it works only together with the name of the interface.
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
        self.looks = 0
        """How often it has looked: caches of derived data compare it."""
        self._all: list[OwnAddress] = []
        # Cache by IP address: whether it is inside; cleared by each look.
        self._inside: Bounded[str, bool] = Bounded()
        self.lost: set[str] = set()
        """Addresses that this machine no longer has."""

    def __contains__(self, ip: str) -> bool:
        return any(ip == address.ip for address in self._all)

    def is_here(self, ip: str) -> bool:
        """Whether an IP address is one of this machine."""
        return ip in self or ipaddress.ip_address(ip).is_loopback

    def is_inside(self, ip: str) -> bool:
        """Whether an IP address belongs to this machine or to one of its networks."""
        is_inside = self._inside.get(ip)
        if is_inside is None:
            parsed = ipaddress.ip_address(ip)
            is_near = parsed.is_loopback or parsed.is_link_local
            is_inside = self._inside[ip] = is_near or any(parsed in address.network for address in self._all)
        return is_inside

    def is_elsewhere(self, ip: str) -> bool:
        """Whether an IP address is private and outside all networks of this machine.

        A VPN may give this machine an address without a network. Other addresses of that kind may then be near.
        """
        parsed = ipaddress.ip_address(ip)
        kind = next((network for network in _OF_ONE_NETWORK if parsed in network), None)
        if kind is None:
            return False
        return not any(
            parsed in own.network or (own.network.num_addresses == 1 and ipaddress.ip_address(own.ip) in kind)
            for own in self._all
        )

    def in_order_to_dial(self, addresses: Sequence[Multiaddr], *, have_others: bool = False) -> list[Multiaddr]:
        """The addresses of another peer that may work from here: near ones, then global ones in the order given.

        Left out are: a loopback address if the peer is on another machine, where it would lead to another process;
        private addresses of other networks; and IPv6 if this machine has none. If nothing else is known they are tried
        all the same, unless the peer has other addresses, such as those at relays.
        """
        by_distance: dict[int, list[Multiaddr]] = {}
        is_here = any(self._distance(address, is_here=False) == 0 for address in addresses)
        for address in addresses:
            by_distance.setdefault(self._distance(address, is_here=is_here), []).append(address)
        usable = [address for distance in range(-1, 3) for address in by_distance.get(distance, ())]
        if usable or have_others:
            return usable
        return next((by_distance[distance] for distance in sorted(by_distance)), [])

    def _distance(self, address: Multiaddr, *, is_here: bool) -> int:
        host = address.get("ip4") or address.get("ip6")
        if host is None:
            return 2
        parsed = ipaddress.ip_address(host)
        if parsed.is_loopback:
            return -1 if is_here else 5
        if host in self:
            return 0
        if not parsed.is_global:
            return 1 if self.is_inside(host) else 4
        has_route = parsed.version == 4 or any(own.is_ipv6 and own.rank == ROUTED for own in self._all)
        return 2 if has_route else 3

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
        self._all, self.looks = found, self.looks + 1
        self._inside.clear()
        self.lost = (self.lost | before) - {address.ip for address in found}
        return not is_first and self.told() != told

    def look_if_due(self, now: float) -> bool:
        """Like :meth:`look`, if the last look was long ago."""
        return now - self._looked_at >= LOOK_AGAIN_SECONDS and self.look(now)

    def look_if_unknown(self, ip: str, now: float) -> bool:
        """Like :meth:`look`, if the last look did not see this address, to which a connection is bound."""
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
    """Tell the user how others connect to this peer, with :mod:`shoal.base.logs`.

    Args:
        visible_maddrs: from ``get_visible_maddrs()``.
        only_p2p: show only ``/p2p/<peer id>``, for peers that find addresses by other means.
    """
    logger = get_logger(__name__)
    if only_p2p:
        shortest = list(dict.fromkeys(f"/p2p/{maddr.values()[-1]}" for maddr in visible_maddrs))
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
