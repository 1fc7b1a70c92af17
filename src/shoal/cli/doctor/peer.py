"""Checks one address of another peer, from name resolution to bandwidth."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import AsyncIterator

from shoal.access.badges import ANY_ROLE
from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS, UNNOTICEABLE_SECONDS
from shoal.base.tasks import run_in_worker
from shoal.cli.doctor.findings import Finding, accepted, fail, ok, refused, warn
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import PingRequest, PingResponse
from shoal.errors import (
    DialError,
    IdentityMismatchError,
    NotAMemberError,
    P2PDaemonError,
    P2PHandlerError,
    ShoalError,
    no_route_to_neighbours,
    set_the_clock,
)
from shoal.net.addresses import is_loopback, what_to_do
from shoal.net.tcp.connect import Proxies, ProxyError, connect, connect_through, family_of
from shoal.net.tcp.handshake import HANDSHAKE_TIMEOUT, explain, has_no_route
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.p2p.joining import explain_unreachable
from shoal.reach.checkup import (
    CALL_BACK_SECONDS,
    MAX_BULK_BYTES,
    Bulk,
    CallBack,
    Checkup,
    Description,
    Question,
    describe_software,
)
from shoal.reach.presence import check_identity_is_free

ANSWER_SECONDS = 5.0
# Slower lines are worth a warning: averaging 100 MB takes minutes. Chosen, like all numbers here.
SLOW_MEGABITS = 10.0
NO_ANSWER = (ShoalError, OSError)

ASK_FOR_ADDRESS = "ask for the current address of that peer, or start it if it is yours"
OPEN_PORT = "check the port, the firewalls on the way, and that the peer runs and listens on more than 127.0.0.1"


async def look_at_peer(
    p2p: P2P, address: Multiaddr, expected_peer: PeerID | None, *, keeps_identity: bool
) -> AsyncIterator[Finding]:
    """Run all checks in order; stops at the first failure that makes the others impossible.

    Args:
        p2p: the peer of this machine.
        address: without ``/p2p``.
        expected_peer: the peer expected there; ``None`` = any; ``p2p.met`` then tells which one it is.
        keeps_identity: whether this machine's peer uses a stored identity, which others may know.
    """
    if not p2p.transport.supports(address):
        yield fail("address", f"shoal cannot reach {address} yet", "ask for an address with /tcp/")
        return
    for stage in (_resolve, _connect):
        finding = await stage(p2p, address)
        if finding is not None:
            yield finding
            if finding.fix:
                return
    peer, finding = await _shake_hands(p2p, address, expected_peer)
    yield finding
    if finding.fix or peer is None:
        return
    if peer == p2p.peer_id:
        fix = "to examine that peer from outside leave out --identity-path, otherwise stop it before starting another"
        yield fail("identity", "already online: the peer there has the identity of --identity-path", fix)
        return
    if keeps_identity:
        yield await _identity_is_free(p2p, peer)
    try:
        found = await _describe(p2p, peer)
    except NO_ANSWER as error:
        yield _does_not_answer(error)
        return
    membership = accepted(p2p)
    if membership is not None:
        yield membership
    yield _versions(await run_in_worker(describe_software), found)
    told = _told_to_others(p2p, address, peer)
    if told is not None:
        yield told
    yield await _table(p2p, peer)
    round_trip, finding = await _round_trip(p2p, peer)
    yield finding
    yield _clock(p2p, peer)
    if not p2p.client_mode:
        yield await _call_back(p2p, peer, found.seen_at)
    yield await _bandwidth(p2p, peer, round_trip)


def _target(address: Multiaddr) -> tuple[str, str, int]:
    (kind, host), (_, port) = address.items()
    assert host is not None
    assert port is not None
    return kind, host, int(port)


async def _resolve(p2p: P2P, address: Multiaddr) -> Finding | None:
    kind, host, port = _target(address)
    if not kind.startswith("dns") or Proxies.of_environment().for_host(host, port) is not None:
        return None  # a proxy looks names up itself
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, family=family_of(kind), type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError) as error:
        why = explain(error) if isinstance(error, OSError) else "the host name cannot be resolved"
        return fail("name", f"{host}: {why}", "check the spelling and the DNS of this machine")
    ips = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return ok("name", f"{host} is {', '.join(ips)}", addresses=ips)


async def _connect(p2p: P2P, address: Multiaddr) -> Finding | None:
    kind, host, port = _target(address)
    proxy = Proxies.of_environment().for_host(host, port)
    began = time.perf_counter()
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            if proxy is None:
                connection = await connect(host, port, family_of(kind))
            else:
                connection = await connect_through(proxy, host, port)
    except ProxyError as error:
        return fail("connection", explain(error), "see docs/proxies.md; NO_PROXY names what can be reached directly")
    except OSError as error:
        advice = OPEN_PORT + (no_route_to_neighbours() if has_no_route(error) else "")
        return fail("connection", explain(error), p2p.advise(address).removeprefix(". ") or advice)
    seconds = time.perf_counter() - began
    connection.close()
    way = "TCP" if proxy is None else f"TCP through the proxy {proxy.host}"
    return ok("connection", f"{way} in {milliseconds(seconds)}", seconds=seconds)


async def _shake_hands(p2p: P2P, address: Multiaddr, expected: PeerID | None) -> tuple[PeerID | None, Finding]:
    began = time.perf_counter()
    try:
        if expected is None:
            peer = await p2p.meet(address)
        else:
            peer = expected
            await p2p.connect(peer, address)
    except IdentityMismatchError as error:
        return None, fail("identity", _without(address, error).partition(";")[0], ASK_FOR_ADDRESS)
    except NotAMemberError as error:
        return None, refused(error)
    except DialError as error:
        if p2p.met.get(address) == p2p.peer_id:
            return p2p.peer_id, ok("handshake", "TLS 1.3")
        fix = "check the port: it must be that of a shoal peer, which speaks TLS 1.3"
        return None, fail("handshake", _without(address, error), fix)
    seconds = time.perf_counter() - began
    took = f"in {milliseconds(seconds)}"
    if expected is None:
        text = f"TLS 1.3, {took}. Not checked which peer it is, because this address does not say; it is\n{peer}"
        return peer, ok("handshake", text, seconds=seconds, peer_id=str(peer))
    return peer, ok("handshake", f"TLS 1.3 and the expected identity, {took}", seconds=seconds)


def _without(address: Multiaddr, error: DialError) -> str:
    return str(error).removeprefix(f"{address}: ")


async def _identity_is_free(p2p: P2P, peer: PeerID) -> Finding:
    try:
        await check_identity_is_free(p2p, [peer])
    except P2PDaemonError as error:
        return fail("identity", str(error), "stop the other peer, or give each its own --identity-path")
    return ok("identity", "nobody else is online with this peer's identity")


async def _describe(p2p: P2P, peer: PeerID) -> Description:
    handle = Checkup.handle_name("rpc_describe", None)
    return await p2p.call(peer, handle, Question(), Description, timeout=ANSWER_SECONDS, roles=ANY_ROLE)


def _does_not_answer(error: BaseException) -> Finding:
    if isinstance(error, NotAMemberError):
        return refused(error)
    if "no handler" in str(error):
        return warn("versions", "that peer is too old for the rest of these checks", "update shoal there")
    text = str(error) or f"no answer within {ANSWER_SECONDS:g} s"
    return fail("answers", text, "look at the peer's own log: it may be overloaded or about to end")


def _versions(here: Description, there: Description) -> Finding:
    text = f"shoal {there.shoal}, protocol {there.wire}, Python {there.python}, torch {there.torch}"
    values = {"shoal": there.shoal, "python": there.python, "torch": there.torch, "protocol": there.wire}
    if there.shoal != here.shoal:
        return warn("versions", f"{text}; here: shoal {here.shoal}", "use the same version at all peers", **values)
    return ok("versions", text, **values)


def _told_to_others(p2p: P2P, address: Multiaddr, peer: PeerID) -> Finding | None:
    """Warn if the peer was reached, but announces only loopback addresses to others."""
    announced = p2p.get_addresses(peer)
    if not announced or is_loopback(address) or not all(map(is_loopback, announced)):
        return None
    text = f"it tells others {', '.join(map(str, announced))}, where nobody but its own machine reaches it"
    return warn("announces", text, f"{what_to_do(announced)}; or announce {address} (announce_maddrs)")


async def _table(p2p: P2P, peer: PeerID) -> Finding:
    """Check that the peer has a DHT node: others need it to join."""
    handle = DHTProtocol.handle_name("rpc_ping", None)
    try:
        answer = await p2p.call(peer, handle, PingRequest(), PingResponse, timeout=ANSWER_SECONDS, roles=ANY_ROLE)
    except P2PHandlerError as error:
        return warn("table", str(error), "it may be for members only: use the same authorizer")
    except NO_ANSWER as error:
        fix = "join through another peer, or start a DHT there that is not in client mode"
        return fail("table", str(error) or "no answer", fix)
    node_id = None if answer.node_id is None else answer.node_id.hex()
    return ok("table", f"node {node_id} of the DHT", node_id=node_id)


async def _round_trip(p2p: P2P, peer: PeerID) -> tuple[float, Finding]:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        try:
            await _describe(p2p, peer)
        except NO_ANSWER as error:
            return 0.0, fail("round trip", str(error) or "no answer", "the connection is unreliable: try again")
        times.append(time.perf_counter() - began)
    best, middle = min(times), statistics.median(times)
    text = f"{milliseconds(best)}, typically {milliseconds(middle)}"
    return best, ok("round trip", text, best_seconds=best, median_seconds=middle)


def _clock(p2p: P2P, peer: PeerID) -> Finding:
    ahead = p2p.clock.sources.get(peer)
    if ahead is None:
        return warn("clock", "that exchange was too slow to compare the clocks", "try again")
    if abs(ahead) <= UNNOTICEABLE_SECONDS:
        return ok("clock", f"{ahead:+.3f} s there", ahead_seconds=ahead)
    text = f"clock off by {abs(ahead):.1f} s: this machine is {'behind' if ahead > 0 else 'ahead of'} that peer"
    if abs(ahead) > MAX_DHT_TIME_DISCREPANCY_SECONDS:
        text += "; shoal corrects for it if the other peers say the same"
    return warn("clock", text, f"turn on NTP where the time is wrong: {set_the_clock()}", ahead_seconds=ahead)


async def _call_back(p2p: P2P, peer: PeerID, seen_at: str) -> Finding:
    handle = Checkup.handle_name("rpc_call_back", None)
    try:
        limit = CALL_BACK_SECONDS + ANSWER_SECONDS
        answer = await p2p.call(peer, handle, Question(), CallBack, timeout=limit, roles=ANY_ROLE)
    except NO_ANSWER as error:
        return warn("dial back", str(error) or "no answer", "try again")
    reached = [address for address, could in answer.reached.items() if could]
    if reached:
        return ok("dial back", "it reaches this machine at " + ", ".join(reached), reached=answer.reached)
    announced = [str(address) for address in p2p.get_addresses(p2p.peer_id)]
    text, fix = explain_unreachable(peer, announced, seen_at)
    fix += ". The port tried here is that of --host-maddrs: give the one that your peer will use"
    return fail("dial back", text, fix, reached=answer.reached)


async def _bandwidth(p2p: P2P, peer: PeerID, round_trip: float) -> Finding:
    try:
        up = await measure(p2p, peer, round_trip, upwards=True)
        down = await measure(p2p, peer, round_trip, upwards=False)
    except NO_ANSWER as error:
        return warn("bandwidth", str(error) or "too slow to be measured", "try again in a minute")
    text = f"{up:.0f} Mbit/s there, {down:.0f} Mbit/s back"
    values = {"up_megabits": up, "down_megabits": down}
    if min(up, down) < SLOW_MEGABITS:
        fix = "averaging will take long: compress what travels, average less often, or use a faster line"
        return warn("bandwidth", text, fix, **values)
    return ok("bandwidth", text, **values)


async def measure(p2p: P2P, peer: PeerID, round_trip: float, *, upwards: bool) -> float:
    """Measure megabits per second; the exchanges grow until one takes long enough."""
    size, best = 2**16, 0.0
    while True:
        began = time.perf_counter()
        async with (
            asyncio.timeout(2 * ANSWER_SECONDS),
            p2p.open_call(peer, Checkup.handle_name("rpc_bulk", None), roles=ANY_ROLE) as call,
        ):
            payload = [bytes(size)] if upwards else []
            await call.send(Bulk(wanted=0 if upwards else size), *payload, end=True)
            await call.receive(Bulk)
            await call.read_payload(MAX_BULK_BYTES)
            await call.receive(Bulk)
        seconds = time.perf_counter() - began
        best = max(best, size * 8e-6 / max(seconds - round_trip, 1e-4))
        if seconds > 0.2 or size >= MAX_BULK_BYTES:  # long enough to measure
            return best
        size = min(4 * size, MAX_BULK_BYTES)


def milliseconds(seconds: float) -> str:
    """A time for people to read."""
    return f"{seconds * 1000:.1f} ms"
