"""What a peer does for another one that wants to know how well the two can reach each other.

Anybody may ask, so nothing here can be turned against others: a peer that asks to be called back is told no more than
yes or no, what is sent for measuring the bandwidth goes to the asking peer alone, and both are limited for each host
and for all together.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import TYPE_CHECKING

import msgspec

from shoal.errors import BusyError, ShoalError
from shoal.p2p.addresses import MAX_ADDRESSES_PER_PEER
from shoal.p2p.connection import Call
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.service import P2PContext, ServicerBase
from shoal.p2p.tcp_listener import HostRates
from shoal.p2p.wire import VERSION, Header
from shoal.tasks import run_in_worker

if TYPE_CHECKING:
    from shoal.p2p.p2p import P2P

# In one direction of one exchange, at most.
MAX_BULK_BYTES = 2 * 2**20
# What one host may cause on average.
BULK_BYTES_PER_SECOND = 2**20

BULK_BURST_BYTES = 32 * 2**20
# What all hosts together may cause on average.
BULK_TOTAL_BYTES_PER_SECOND = 8 * 2**20

BULK_TOTAL_BURST_BYTES = 128 * 2**20
# For one host on average; each dials the few addresses that the caller claims to be its own.
CALLS_BACK_PER_SECOND = 0.2

CALLS_BACK_BURST = 5
CALLS_BACK_TOTAL_PER_SECOND = 2.0
CALLS_BACK_TOTAL_BURST = 20
# Exchanges and calls back in progress; who comes then is told to try again.
MAX_AT_ONCE = 8

CALL_BACK_SECONDS = 4.0
_EVERYBODY = ""


class Question(Header):
    """Nothing but the question."""


class Description(Header):
    """Which software a peer runs, and where it sees the one that asks."""

    shoal: str = ""
    python: str = ""
    torch: str = ""
    wire: int = 0
    seen_at: str = ""


class CallBack(Header):
    """Whether the asking peer could be dialled at each address where it listens."""

    reached: dict[str, bool] = msgspec.field(default_factory=dict)


class Bulk(Header):
    """Comes with a payload, and asks for one of another size."""

    wanted: int = 0


class Checkup(ServicerBase):
    """Answers a peer that checks how well it reaches this one."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        self._bulk = _Budget(
            HostRates(BULK_BYTES_PER_SECOND, BULK_BURST_BYTES),
            HostRates(BULK_TOTAL_BYTES_PER_SECOND, BULK_TOTAL_BURST_BYTES),
        )
        self._calls_back = _Budget(
            HostRates(CALLS_BACK_PER_SECOND, CALLS_BACK_BURST),
            HostRates(CALLS_BACK_TOTAL_PER_SECOND, CALLS_BACK_TOTAL_BURST),
        )
        self._at_work = 0

    async def rpc_describe(self, request: Question, context: P2PContext) -> Description:
        """Say which versions run here."""
        found = await run_in_worker(describe_software)  # it reads files
        found.seen_at = self._p2p.address_seen_of(context.remote_id)
        return found

    async def rpc_call_back(self, request: Question, context: P2PContext) -> CallBack:
        """Dial the caller at the addresses that it has told."""
        self._begin()
        try:
            self._calls_back.spend(self._host_of(context.remote_id), 1)
            known = self._p2p.get_addresses(context.remote_id)[:MAX_ADDRESSES_PER_PEER]
            addresses = self._p2p.transport.worth_dialling(known)
            reached = await asyncio.gather(*(self._can_dial(context.remote_id, address) for address in addresses))
            return CallBack(reached=dict(zip(map(str, addresses), reached, strict=True)))
        finally:
            self._at_work -= 1

    async def _can_dial(self, peer: PeerID, address: Multiaddr) -> bool:
        try:
            async with asyncio.timeout(CALL_BACK_SECONDS):
                (await self._p2p.dial_without_greeting(peer, address)).abort()
        except (ShoalError, ConnectionError, TimeoutError):
            return False
        return True

    async def rpc_bulk(self, call: Call, context: P2PContext) -> None:
        """Take some bytes, and send some."""
        self._begin()
        try:
            request = await call.receive(Bulk)
            if request is None:
                return
            wanted = max(0, min(request.wanted, MAX_BULK_BYTES))
            self._bulk.spend(self._host_of(context.remote_id), min(call.payload_size, MAX_BULK_BYTES) + wanted)
            await call.read_payload(MAX_BULK_BYTES)
            await call.send(Bulk(), bytes(wanted))
        finally:
            self._at_work -= 1

    def _begin(self) -> None:
        if self._at_work >= MAX_AT_ONCE:
            raise BusyError("too many others are checked at the moment: try again in a few seconds")
        self._at_work += 1

    def _host_of(self, peer: PeerID) -> str:
        """Identities cost nothing, hosts do."""
        seen = self._p2p.address_seen_of(peer)
        return str(Multiaddr(seen).values()[0]) if seen else str(peer)


class _Budget:
    """How much of something is done for one host and for all together."""

    def __init__(self, by_host: HostRates, by_all: HostRates) -> None:
        self._by_host, self._by_all = by_host, by_all

    def spend(self, host: str, amount: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._by_host.is_exhausted(host, now) or self._by_all.is_exhausted(_EVERYBODY, now):
            raise BusyError("enough has been measured for now: try again in a minute")
        self._by_host.spend(host, now, amount)
        self._by_all.spend(_EVERYBODY, now, amount)


def describe_software() -> Description:
    """The versions that run in this process."""
    python = ".".join(map(str, sys.version_info[:3]))
    return Description(shoal=_version_of("shoal"), python=python, torch=_version_of("torch"), wire=VERSION)


@functools.cache
def _version_of(package: str) -> str:
    # On demand: it takes longer to load than the rest of this package.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
