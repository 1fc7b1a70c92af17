"""How routers of each kind translate and filter, as rules of nftables.

An *easy* router has one outer port for an inner one, whoever is called; these keep the number, as most do. A *hard*
one, which is called symmetric, takes another port for each destination. Who may answer is decided by the filter:

| kind | outer port | lets in |
|---|---|---|
| full cone | easy | everybody, at a port from which something went out |
| address-restricted | easy | hosts that were called from that port |
| port-restricted | easy | addresses and ports that were called from that port |
| symmetric | hard | the same |

Whatever is not let in is dropped, or refused by a RST with ``rst``.
"""

from __future__ import annotations

from enum import Enum

WAN, LAN = "wan", "lan"
"""The interfaces of every router."""


class Kind(Enum):
    """What is between a host and the internet."""

    PUBLIC = "public"
    FULL_CONE = "full cone"
    ADDRESS_RESTRICTED = "address-restricted"
    PORT_RESTRICTED = "port-restricted"
    CGNAT = "CGNAT"
    """A port-restricted router behind another one, which the provider has."""
    SYMMETRIC = "symmetric"


def translation(kind: Kind, address: str, *, rst: bool, hairpin: bool, only_port: int | None) -> str:
    """What a router does with IPv4, as a script for ``nft -f``.

    Args:
        kind: any but PUBLIC and CGNAT.
        address: its own, outside.
        rst: refuse what is not let in instead of dropping it.
        hairpin: hosts inside reach each other through the outer address.
        only_port: connections to other ports than this one are dropped.
    """
    outwards = f"iifname {LAN} oifname {WAN}"
    let_in = {
        Kind.FULL_CONE: f"iifname {WAN} dnat to meta l4proto . th dport map @used",
        Kind.ADDRESS_RESTRICTED: f"iifname {WAN} dnat to meta l4proto . th dport . ip saddr map @called",
    }.get(kind, "")
    around_in = f"iifname {LAN} ip daddr {address} dnat to meta l4proto . th dport map @used" if hairpin else ""
    around_out = f"iifname {LAN} oifname {LAN} snat to {address}" if hairpin else ""
    closed = f"ip daddr {address} ct state {{ new, invalid }} drop" if not rst else ""
    shut = f"{outwards} th dport != {only_port} ct state new drop" if only_port else ""
    return f"""
table ip home {{
    map used {{
        type inet_proto . inet_service : ipv4_addr; flags dynamic, timeout; timeout 10m; size 65535;
    }}
    map called {{
        type inet_proto . inet_service . ipv4_addr : ipv4_addr; flags dynamic, timeout; timeout 10m; size 65535;
    }}
    chain forwarded {{
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat;
        jump forwarded
        {let_in}
        {around_in}
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat;
        oifname {WAN} masquerade {"fully-random" if kind is Kind.SYMMETRIC else ""}
        {around_out}
    }}
    chain input {{
        type filter hook input priority filter;
        {closed}
    }}
    chain forward {{
        type filter hook forward priority filter;
        ct state invalid drop
        {shut}
        {outwards} ct state new update @used {{ meta l4proto . th sport : ip saddr }}
        {outwards} ct state new update @called {{ meta l4proto . th sport . ip daddr : ip saddr }}
        ct status dnat accept
        iifname {WAN} ct state new drop
    }}
}}
"""


def firewall_6(*, rst: bool, only_port: int | None) -> str:
    """What a router does with IPv6: it lets in what belongs to a connection that began inside."""
    refusal = "meta l4proto tcp reject with tcp reset" if rst else "drop"
    return f"""
table ip6 home {{
    chain forward {{
        type filter hook forward priority filter;
        {f"iifname {LAN} oifname {WAN} th dport != {only_port} ct state new drop" if only_port else ""}
        ct state established, related accept
        iifname {WAN} {refusal}
    }}
    chain input {{
        type filter hook input priority filter;
        {"" if rst else f"iifname {WAN} meta l4proto tcp drop"}
    }}
}}
"""
