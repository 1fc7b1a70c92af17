"""Reaching the first peers of a swarm, with a verdict on each address that could not be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from shoal.errors import BootstrapError
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.peer_id import PeerID, split_peer_address
from shoal.reactor import cancel_and_wait

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


async def reach_first(targets: Sequence[Target], reach: Reach, limit: float) -> None:
    """Try all addresses at once; return when the first one is connected.

    Raises:
        BootstrapError: none could be within ``limit`` seconds; it says why, for each of them.
    """
    tasks = {target: asyncio.ensure_future(reach(target[1], target[0])) for target in targets}
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
        {f"{address}/p2p/{peer}": _verdict(task, address, limit) for (address, peer), task in tasks.items()}
    )


def _verdict(task: asyncio.Future[None], address: Multiaddr, limit: float) -> str:
    error = None if task.cancelled() else task.exception()
    return f"no answer within {limit:g} s" if error is None else str(error).removeprefix(f"{address}: ")
