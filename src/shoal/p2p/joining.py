"""Reaching the first peers of a swarm, with a verdict on each address that could not be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shoal.base.tasks import cancel_and_wait
from shoal.errors import (
    BootstrapError,
    IdentityMismatchError,
    InterruptedDialError,
    NotAMemberError,
)
from shoal.net.addresses import IP, ip_of, ip_text_of
from shoal.net.own_addresses import is_of_one_network
from shoal.net.pasted import Target, describe_target, read_targets, short_form
from shoal.net.transport import Transport
from shoal.peers.identity import PeerID, is_circuit, relay_of
from shoal.peers.multiaddr import Multiaddr

Reach = Callable[[Multiaddr, "PeerID | None"], Awaitable[None]]
"""Connects to a peer at an address, or to any peer there, or raises."""


def parse_peer_addresses(initial_peers: Any) -> list[Target]:
    """Check addresses from the user. A circuit also stands for its relay, which is a peer like others.

    Raises:
        TypeError: neither a sequence of addresses nor a text with some.
        ValueError: one of them is not an address of a peer.
    """
    targets = read_targets(initial_peers, may_be_local=True)
    relays: list[Target] = [relay for place, _ in targets if (relay := relay_of(place)) is not None]
    return list(dict.fromkeys([*targets, *relays]))


# Chosen: dials per address. Only a connection that broke is dialled again, because that may be chance; pauses double.
DIAL_ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.1


async def reach_first(
    targets: Sequence[Target], reach: Reach, limit: float, advise: Callable[[Multiaddr], str] = lambda _: ""
) -> None:
    """Try all addresses at once; return when the first one is connected.

    Args:
        advise: adds advice about an address at which no peer was reached.

    Raises:
        BootstrapError: none was connected within ``limit`` seconds; it says why for each address.
    """
    broken: dict[Target, InterruptedDialError] = {}
    tasks = {target: asyncio.ensure_future(_keep_trying(target, reach, broken)) for target in targets}
    deadline = asyncio.get_running_loop().time() + limit
    pending = list(tasks.values())
    try:
        while pending:
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.wait(pending, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in pending if task.done()]
            if any(task.exception() is None for task in done):
                return
            if not done:
                break
            pending = [task for task in pending if not task.done()]
    finally:
        await cancel_and_wait(*pending)
    raise BootstrapError(
        {
            describe_target(target): _verdict(task, target, broken, limit) + _advice(task, target, advise)
            for target, task in tasks.items()
        }
    )


def advise_on_private(
    transport: Transport, announced: Sequence[Multiaddr], address: Multiaddr, *, port_stays: bool
) -> str:
    """What to do about an unreachable address that is private and in another network; empty for other addresses.

    Two machines can only find each other through one that both can call, so it says which address to give instead.

    Args:
        announced: the addresses that this peer announces.
        port_stays: whether the user has chosen this peer's port.
    """
    if not transport.is_elsewhere(address):
        return ""
    what = f". {ip_text_of(address)} is a private address of another network"
    if not transport.addresses():  # nobody else can join through it
        return f"{what}: run `shoal dht` on a machine that both can call, and give its address to both"
    own = (short_form(each) for each in announced if _is_public(each))
    public = [each if port_stays else f"{each.rpartition(':')[0]}:PORT" for each in own if each is not None]
    instead = f"{what}: let that machine join this one instead"
    if public:
        return f"{instead}. Start this one without that address, and give {public[0]} to that machine"
    return (
        f"{instead}, if this one has a public address, which its own interfaces do not show; otherwise run `shoal dht` "
        "on a machine that has one, and give its address to both"
    )


def _is_public(address: Multiaddr) -> bool:
    ip = ip_text_of(address)
    return not is_circuit(address) and (ip is None or not is_of_one_network(ip))


async def _keep_trying(target: Target, reach: Reach, broken: dict[Target, InterruptedDialError]) -> None:
    address, peer = target
    for attempt in range(DIAL_ATTEMPTS - 1):
        try:
            return await reach(address, peer)
        except InterruptedDialError as e:
            broken[target] = e  # the verdict if no better one comes before the time limit
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    return await reach(address, peer)


def _verdict(
    task: asyncio.Future[None], target: Target, broken: dict[Target, InterruptedDialError], limit: float
) -> str:
    error = broken.get(target) if task.cancelled() else task.exception()
    return f"no answer within {limit:g} s" if error is None else str(error).removeprefix(f"{target[0]}: ")


def _advice(task: asyncio.Future[None], target: Target, advise: Callable[[Multiaddr], str]) -> str:
    """Advice about an address where no peer was reached, not even a wrong one."""
    error = None if task.cancelled() else task.exception()
    return "" if isinstance(error, (IdentityMismatchError, NotAMemberError)) else advise(target[0])


def explain_unreachable(witness: PeerID, announced: Sequence[str], seen_at: str) -> tuple[str, str]:
    """Why another peer cannot dial this one, and what its user can do.

    Args:
        witness: the peer that has tried.
        announced: the addresses that it has tried, without ``/p2p``.
        seen_at: where the witness sees this peer; empty if it does not know.
    """
    where = ", ".join(announced) or "any address, because it announces none"
    what = f"cannot be dialled back: peer {witness} cannot call this node back at {where}"
    client = "or run `shoal dht` on a machine that can be called from outside, and others call this one through it"
    addresses = [Multiaddr(address) for address in announced]
    ips = [ip for address in addresses if (ip := ip_of(address)) is not None]
    seen = _ip_seen(seen_at)
    if seen is None or seen in ips:
        return what, f"open the port in the firewall, {client}"
    if all(ip.is_loopback for ip in ips) and not any(map(is_circuit, addresses)):
        everywhere = 'host_maddrs=["/ip4/0.0.0.0/tcp/0"] or without SHOAL_HOST_MADDRS in the environment'
        return (
            f"{what}, which is this machine alone",
            f"listen on all addresses, /ip4/0.0.0.0/tcp/0: start it with {everywhere}, {client}",
        )
    port = next((port for address in addresses if (port := address.get("tcp"))), "PORT")
    outside = f"/ip{seen.version}/{seen}/tcp/{port}"
    if seen.is_global and not any(ip.is_global for ip in ips):
        return (
            f"{what}, but sees it at {seen}, so it is behind a router",
            f"forward port {port} there and announce {outside} (announce_maddrs), {client}",
        )
    return f"{what}, but sees it at {seen}", f"open the port in the firewall and announce {outside}, {client}"


def _ip_seen(text: str) -> IP | None:
    """The IP address in another peer's claim; ``None`` if there is none, because the claim may be anything."""
    try:
        return ip_of(Multiaddr(text))
    except ValueError:
        return None
