"""Checks whether others can call this machine, what is in between, and whether another peer works as a relay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from shoal.access.badges import ANY_ROLE
from shoal.base.logs import counted, one_line
from shoal.base.tasks import run_in_worker
from shoal.cli.doctor.findings import Finding, fail, ok, unknown, warn
from shoal.cli.doctor.peer import ANSWER_SECONDS, NO_ANSWER, measure, milliseconds
from shoal.dht.joining import FIRST_SECONDS
from shoal.errors import P2PHandlerError
from shoal.net.addresses import is_global, is_ipv6, is_loopback
from shoal.net.pasted import Target
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.p2p.local_network import LocalNetwork, check_can_look_around
from shoal.peers.identity import circuit_address
from shoal.reach.nat.port_mapping import has_upnp
from shoal.reach.punching import observe, places_of
from shoal.reach.reachability import AddressStatus, Reachability
from shoal.reach.relay.messages import NotReserved, RelayCode, Reserve, ReserveAnswer, Reserved
from shoal.reach.relay.server import RelayServer

NOT_KNOWN = "not known: give the ADDRESS of a peer outside of this network"
LET_IN = "open TCP port {port} in the router, or turn on UPnP or PCP there; or run 'shoal dht' on a public machine"


async def look_at_reach(p2p: P2P, peers: Sequence[PeerID]) -> AsyncIterator[Finding]:
    """Find out how others reach this machine.

    Args:
        p2p: the peer of this machine.
        peers: the peers that could be reached from here.
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


# --- the other peer as a relay ---------------------------------------------------------------------------------------

RESERVE_SECONDS = 10.0  # chosen
RUN_ONE = "run 'shoal dht' on a machine that others can call"


async def ask_for_reservation(p2p: P2P, peer: PeerID) -> ReserveAnswer | None:
    """A peer's answer to the request for a reservation, which is given back at once; ``None`` without an answer.

    Raises:
        ShoalError, OSError: it cannot be asked.
    """
    async with (
        asyncio.timeout(ANSWER_SECONDS),
        p2p.open_call(peer, RelayServer.handle_name("rpc_reserve", None), roles=ANY_ROLE) as call,
    ):
        await call.send(Reserve(), end=True)
        return await call.receive(ReserveAnswer)


async def is_relay(p2p: P2P, peer: PeerID) -> bool:
    """Whether a peer grants a reservation now."""
    try:
        answer = await ask_for_reservation(p2p, peer)
    except NO_ANSWER:
        return False
    return isinstance(answer, Reserved)


async def look_at_relay(
    p2p: P2P, address: Multiaddr, peer: PeerID, round_trip: float, token: str | None
) -> AsyncIterator[Finding]:
    """Ask a peer for a reservation; if it grants one, let this machine call itself through it.

    Args:
        p2p: the peer of this machine, connected to the other one.
        address: where the other one is, without ``/p2p``.
        round_trip: measured seconds to the other one and back.
        token: of the run.
    """
    try:
        answer = await ask_for_reservation(p2p, peer)
    except P2PHandlerError as error:
        yield warn("relay", f"that peer knows nothing of relays: {error}", "update shoal there")
        return
    except NO_ANSWER as error:
        yield warn("relay", str(error) or "no answer", "try again")
        return
    finding = _judged(answer, round_trip)
    yield finding
    if isinstance(answer, Reserved):
        yield await _through(address, peer, token)


def _judged(answer: ReserveAnswer | None, round_trip: float) -> Finding:
    if isinstance(answer, Reserved):
        values = {"code": 0, "rate": answer.rate, "circuits": answer.circuits, "seen_at": answer.seen_at}
        rate = f"{answer.rate * 8e-6:.0f} Mbit/s for all together" if answer.rate else "no limit to their rate"
        text = f"it takes reservations, up to {answer.circuits} circuits, {rate}, {milliseconds(round_trip)} away"
        return ok("relay", text, **values)
    if not isinstance(answer, NotReserved):
        return warn("relay", "it ends the call without an answer", "look at that peer's own log")
    values = {"code": answer.code, "rate": 0.0, "circuits": 0, "seen_at": ""}
    if answer.code == RelayCode.NOT_A_RELAY:
        text = "it is none: others cannot call it, or it does not want to be one"
        return ok("relay", text, **values)
    if answer.code == RelayCode.BUSY:
        return warn("relay", f"it is full: {one_line(answer.text)}", f"use another one, or {RUN_ONE}", **values)
    return warn("relay", f"it refuses: {one_line(answer.text)}", "use a token whose role may train", **values)


async def _through(address: Multiaddr, relay: PeerID, token: str | None) -> Finding:
    """Call from one temporary peer of this machine to another one, through the relay."""
    try:
        guest = await P2P.create(client_mode=True, token=token)
    except NO_ANSWER as error:  # the token is for one identity
        return unknown("circuit", f"not tried, it takes a second identity: {error}")
    caller = await P2P.create(client_mode=True, token=token)
    try:
        async with asyncio.timeout(RESERVE_SECONDS):
            reserved = asyncio.Event()
            guest.reservations.on_change = reserved.set
            guest.reservations.trusted = [(address, relay)]
            guest.reservations.want(True)
            await reserved.wait()
        caller.circuits.punching = None  # measure the relay, not a direct connection
        caller.add_addresses(guest.peer_id, [circuit_address(address, relay)])
        began = time.perf_counter()
        async with asyncio.timeout(RESERVE_SECONDS):
            await caller.prepare(guest.peer_id, 1)
            connection = await caller.dial(guest.peer_id)
        caller.pool.add(connection)
        seconds = time.perf_counter() - began
        megabits = await measure(caller, guest.peer_id, 0.0, upwards=True)
    except TimeoutError:
        fix = "try again; if it stays so, that relay does not do its work: restart it"
        return fail("circuit", f"nothing came through that relay within {RESERVE_SECONDS:g} s", fix)
    except NO_ANSWER as error:
        return fail("circuit", str(error) or "it broke", "try again, or use another relay")
    finally:
        await asyncio.gather(caller.shutdown(), guest.shutdown())
    text = f"this machine called itself through it: ready after {milliseconds(seconds)}, {megabits:.0f} Mbit/s"
    return ok("circuit", text, seconds=seconds, megabits=megabits)
