"""Addresses of the own peer as people want to see them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from shoal.logs import get_logger
from shoal.p2p.multiaddr import Multiaddr

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
