"""Reaching the first peers of a swarm, with a verdict on each address that could not be used."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Sequence

from shoal.errors import BootstrapError, InterruptedDialError
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.peer_id import PeerID, split_peer_address
from shoal.tasks import cancel_and_wait

Target = tuple[Multiaddr, PeerID]
Reach = Callable[[PeerID, Multiaddr], Awaitable[None]]
"""Connects to a peer at an address, or raises."""


def parse_peer_addresses(initial_peers: Sequence[Multiaddr | str]) -> list[Target]:
    """Check addresses that users give.

    Raises:
        TypeError: not a sequence of addresses.
        ValueError: one of them is not a multiaddr that ends with a peer id.
    """
    if isinstance(initial_peers, (str, bytes, Multiaddr)) or not isinstance(initial_peers, Iterable):
        raise TypeError(
            f"initial_peers must be a list of addresses, got {initial_peers!r}: write [{str(initial_peers)!r}] for one"
        )
    for address in initial_peers:
        if not isinstance(address, (str, Multiaddr)):
            raise TypeError(f"initial_peers must contain str or Multiaddr, got {address!r}")
    return [split_peer_address(Multiaddr(address)) for address in initial_peers]


DIAL_ATTEMPTS = 4
"""A connection may break by chance; only then is an address dialled again, after a pause that grows."""
FIRST_PAUSE_SECONDS = 0.1


async def reach_first(targets: Sequence[Target], reach: Reach, limit: float) -> None:
    """Try all addresses at once; return when the first one is connected.

    Raises:
        BootstrapError: none could be within ``limit`` seconds; it says why, for each of them.
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
        {f"{target[0]}/p2p/{target[1]}": _verdict(task, target, broken, limit) for target, task in tasks.items()}
    )


async def _keep_trying(target: Target, reach: Reach, broken: dict[Target, InterruptedDialError]) -> None:
    address, peer = target
    for attempt in range(DIAL_ATTEMPTS - 1):
        try:
            return await reach(peer, address)
        except InterruptedDialError as e:
            broken[target] = e  # in case that there is no time for a better answer
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    return await reach(peer, address)


def _verdict(
    task: asyncio.Future[None], target: Target, broken: dict[Target, InterruptedDialError], limit: float
) -> str:
    error = broken.get(target) if task.cancelled() else task.exception()
    return f"no answer within {limit:g} s" if error is None else str(error).removeprefix(f"{target[0]}: ")


def explain_unreachable(witness: PeerID, announced: Sequence[str], seen_at: str) -> tuple[str, str]:
    """What is wrong with a peer that another one cannot dial, and what its user can do.

    Args:
        witness: who has tried.
        announced: where, without ``/p2p``.
        seen_at: where the witness sees this peer; empty if it does not know.
    """
    where = ", ".join(announced) or "any address, because it announces none"
    what = f"cannot be dialled back: peer {witness} cannot call this node back at {where}"
    client = "or use client_mode=True, which needs no open port"
    addresses = [Multiaddr(address) for address in announced]
    ips = [ip for address in addresses if (ip := _ip_of(address)) is not None]
    seen = _ip_seen(seen_at)
    if seen is None or seen in ips:
        return what, f"open the port in the firewall, {client}"
    if all(ip.is_loopback for ip in ips):
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


_IP = ipaddress.IPv4Address | ipaddress.IPv6Address


def _ip_of(address: Multiaddr) -> _IP | None:
    text = address.get("ip4") or address.get("ip6")
    return None if text is None else ipaddress.ip_address(text)


def _ip_seen(text: str) -> _IP | None:
    """Told by another peer, which may tell anything."""
    try:
        return _ip_of(Multiaddr(text))
    except ValueError:
        return None
