"""Checks whether others can call this machine, and what is in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from shoal.base.logs import counted
from shoal.base.tasks import run_in_worker
from shoal.cli.doctor.findings import Finding, fail, ok, unknown, warn
from shoal.dht.joining import FIRST_SECONDS
from shoal.net.addresses import is_global, is_ipv6, is_loopback
from shoal.net.pasted import Target
from shoal.p2p import P2P, PeerID
from shoal.p2p.local_network import LocalNetwork, check_can_look_around
from shoal.reach.nat.port_mapping import has_upnp
from shoal.reach.punching import observe, places_of
from shoal.reach.reachability import AddressStatus, Reachability

NOT_KNOWN = "not known: give the ADDRESS of a peer outside of this network"
LET_IN = "open TCP port {port} in the router, or turn on UPnP or PCP there; or run 'shoal dht' on a public machine"


async def look_at_reach(p2p: P2P, peers: Sequence[PeerID]) -> AsyncIterator[Finding]:
    """Find out how others reach this machine.

    Args:
        p2p: the peer of this machine.
        peers: those that could be reached from here.
    """
    if p2p.client_mode:
        return
    mapping = p2p.outlook.mapping
    if mapping is not None:
        await mapping.wait_for_first_try()
    if peers:
        await p2p.outlook.check()
        await p2p.outlook.settle()
    yield _reachable(p2p)
    yield await _nat(p2p, peers)
    yield _ipv6(p2p)
    yield await _port_mapping(p2p)


async def look_around(p2p: P2P) -> tuple[list[Target], Finding]:
    """The peers that are announced in the local network, each at its first address."""
    check = "local network"
    try:
        check_can_look_around()
    except ModuleNotFoundError as error:
        return [], fail(check, str(error).partition(":")[0], "pip install 'shoal[local]'")
    network = LocalNetwork(p2p, lambda peer: None, announces=False)
    try:
        await network.start()
        await asyncio.sleep(FIRST_SECONDS)
        found: list[Target] = [(addresses[0], peer) for peer, addresses in network.present.items()]
    finally:
        await network.close()
    if found:
        return found, ok(check, f"{counted(len(found), 'peer')} found", peers=[str(peer) for _, peer in found])
    fix = "start a peer there with initial_peers='local'. Guest and company networks may block multicast: use addresses"
    return [], warn(check, "no peer is announced", fix, peers=[])


def _reachable(p2p: P2P) -> Finding:
    outlook, now = p2p.outlook, p2p.outlook.now()
    confirmed = [str(address) for address in outlook.evidence.confirmed(now)]
    values = {"reachability": outlook.state.value, "confirmed": confirmed, "seen_at": outlook.seen_at()}
    seen = f"others see it at {', '.join(outlook.seen_at())}" if outlook.seen_at() else "nobody outside has seen it"
    if confirmed:
        witnesses = counted(max(outlook.evidence.witnesses, 1), "host")
        return ok("reachable", f"public: {', '.join(confirmed)} (asked: {witnesses})", **values)
    if outlook.state is Reachability.PUBLIC:
        return unknown("reachable", f"from this machine's own networks; from outside {NOT_KNOWN}", **values)
    if outlook.state is Reachability.UNKNOWN:
        return unknown("reachable", NOT_KNOWN, **values)
    if outlook.state is Reachability.RELAYED:
        through = counted(len(p2p.reservations.held), "relay")
        return ok("reachable", f"private: {seen}, and call it through {through}", **values)
    port = next((port for own in outlook.evidence.own if (port := own.get("tcp"))), "PORT")
    text = f"private: {seen}, and no relay takes it, so nobody can call it"
    return fail("reachable", text, LET_IN.format(port=port), **values)


async def _nat(p2p: P2P, peers: Sequence[PeerID]) -> Finding:
    own = [address for address in p2p.outlook.evidence.own if not is_ipv6(address)]
    if any(is_global(address) for address in own):
        return ok("NAT", "none: this machine has a global address", nat="none")
    by_host: dict[PeerID | str, PeerID] = {p2p.host_of(peer): peer for peer in peers if places_of(p2p, peer)}
    seen = await observe(p2p, list(by_host.values()))
    ports = [there.get("tcp") for _, there in seen]
    values = {"seen_at": [str(there) for _, there in seen]}
    if not seen:
        return unknown("NAT", NOT_KNOWN, **values)
    if len(seen) == 1:
        text = f"seen at {seen[0][1]}; the ADDRESS of one more peer, on another host, would tell what the router does"
        return unknown("NAT", text, **values)
    if ports[0] != ports[1]:
        text = f"hard: one port of this machine is seen at ports {ports[0]} and {ports[1]}"
        fix = "some private peers will be called by a relay, unless the router opens a port"
        return warn("NAT", text, fix, nat="hard", **values)
    local = seen[0][0]
    kept = "the same port" if local is not None and local.get("tcp") == ports[0] else "another port"
    return ok("NAT", f"easy: connections keep one outer port, here {kept} as inside", nat="easy", **values)


def _ipv6(p2p: P2P) -> Finding:
    now = p2p.outlook.now()
    own = [address for address in p2p.outlook.evidence.own if is_ipv6(address) and is_global(address)]
    if not own:
        local = [str(each["ip6"]) for each in p2p.transport.addresses() if is_ipv6(each) and not is_loopback(each)]
        alone = f" ({', '.join(local)}: within this network only)" if local else ""
        return ok("IPv6", f"no global address{alone}", global_addresses=[])
    standings = {address: p2p.outlook.evidence.standing(now, address) for address in own}
    values = {"global_addresses": [str(address) for address in own]}
    if AddressStatus.CONFIRMED in standings.values():
        return ok("IPv6", "global, and reachable from outside", **values)
    if AddressStatus.REFUTED in standings.values():
        return ok("IPv6", "global, behind a firewall: peers get through it together", **values)
    return unknown("IPv6", f"global; whether others can call it is {NOT_KNOWN}", **values)


async def _port_mapping(p2p: P2P) -> Finding:
    mapping = p2p.outlook.mapping
    if mapping is None or not mapping.verdicts:
        return ok("port mapping", "not needed: no router in front of this machine translates its addresses")
    values = {"verdicts": mapping.verdicts, "addresses": [str(address) for address in mapping.addresses]}
    told = "; ".join(f"{name}: {verdict}" for name, verdict in mapping.verdicts.items())
    now = p2p.outlook.now()
    confirmed = set(p2p.outlook.evidence.confirmed(now))
    if confirmed.intersection(mapping.addresses):
        return ok("port mapping", f"{told}, and others reach this machine there", **values)
    behind = [each for each in mapping.addresses if not is_global(each)]
    if behind:
        fix = "turn on UPnP or PCP in the outer router too, or set it to forward to the inner one"
        return warn("port mapping", f"{told}, which is behind another router", fix, **values)
    if mapping.addresses:
        standings = [p2p.outlook.evidence.standing(now, address) for address in mapping.addresses]
        if AddressStatus.REFUTED in standings:
            fix = "look for another firewall, in the router or at the provider, or open the port there by hand"
            return warn("port mapping", f"{told}, but others do not reach this machine there", fix, **values)
        return unknown("port mapping", f"{told}; nobody outside has tried it yet", **values)
    if confirmed:
        return ok("port mapping", f"not needed. {told}", **values)
    fix = "turn on UPnP or PCP in the router, or open the port by hand"
    if not await run_in_worker(has_upnp):
        fix += "; for UPnP also: pip install shoal[upnp]"
    what = "the router refuses" if mapping.is_refused else "no answer"
    return warn("port mapping", f"{what}. {told}", fix, **values)
