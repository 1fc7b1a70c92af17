"""Checks for other peers: how well they reach this one, and how well it reaches them.

Anybody may ask, so the answers must be useless for attacks on third parties: a peer that asks to be called back learns
only yes or no, and the bytes for measuring bandwidth go to the asking peer alone. Both are limited per host and in
total.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar

import msgspec

from shoal.access.badges import ANY_ROLE, Roles
from shoal.base.backoff import TokenBuckets
from shoal.base.tasks import run_in_worker
from shoal.errors import BusyError, ProtocolError, ShoalError
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER, Judge, host_charged, is_name
from shoal.net.connection import Call
from shoal.net.endpoint import Endpoint
from shoal.net.service import P2PContext, ServicerBase
from shoal.net.transport import VERSION, Header
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.relay.messages import Text

# All limits here are chosen. The most bytes in one direction of one exchange.
MAX_BULK_BYTES = 2 * 2**20
# Rate per second and burst of the bytes that are exchanged to measure a line.
BULK_OF_HOST = 2**20, 32 * 2**20
BULK_OF_ALL = 8 * 2**20, 128 * 2**20
# Rate per second and burst of calls back, each of which dials the few addresses that the caller claims as its own.
CALLS_BACK_OF_HOST = 0.2, 5
CALLS_BACK_OF_ALL = 2.0, 20
# The most exchanges in progress, and the most calls back; further peers are told to try again.
MAX_AT_ONCE = 8

# Seconds for an exchange in both directions; a line that is slower need not be measured.
BULK_SECONDS = 60.0
# A failed call back is reported after exactly this long.
CALL_BACK_SECONDS = 4.0
_EVERYBODY = ""


class Question(Header):
    """A request without any fields."""


class Description(Header):
    """The software that a peer runs, and where it sees the asking peer."""

    shoal: str = ""
    python: str = ""
    torch: str = ""
    wire: int = 0
    seen_at: str = ""


class CallMe(Header):
    """Asks to be dialled."""

    addresses: Annotated[
        list[Text],
        msgspec.Meta(max_length=MAX_ADDRESSES_PER_PEER),
    ] = msgspec.field(default_factory=list)
    """Where to dial, without ``/p2p``; if empty, at the addresses that the asking peer has announced."""


class CallBack(Header):
    """For each address of the asking peer, whether it could be dialled there."""

    reached: dict[str, bool] = msgspec.field(default_factory=dict)
    """Without addresses that could not be tried from here, or that the caller may not claim."""
    seen_at: str = ""
    """Where the asking peer is seen from here; empty if that is not known."""


class Bulk(Header):
    """Comes with a payload, and asks for a payload of ``wanted`` bytes."""

    wanted: int = 0


class Checkup(ServicerBase):
    """Answers a peer that checks how well it reaches this one."""

    roles: ClassVar[Roles] = ANY_ROLE

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._bulk = _Budget(
            TokenBuckets(*BULK_OF_HOST),
            TokenBuckets(*BULK_OF_ALL),
        )
        self._calls_back = _Budget(
            TokenBuckets(*CALLS_BACK_OF_HOST),
            TokenBuckets(*CALLS_BACK_OF_ALL),
        )
        self._calling_back = asyncio.Semaphore(MAX_AT_ONCE)
        self._exchanging = asyncio.Semaphore(MAX_AT_ONCE)

    async def rpc_describe(self, request: Question, context: P2PContext) -> Description:
        """Describe the software that runs here."""
        found = await run_in_worker(describe_software)  # it reads files
        found.seen_at = self._endpoint.address_seen_of(context.remote_id)
        return found

    async def rpc_call_back(self, request: CallMe, context: P2PContext) -> CallBack:
        """Dial the caller at the addresses that it names, or else at those that it has announced.

        Only addresses that it may claim are dialled, see :func:`~shoal.net.addresses.may_be_dialled_for`. A failure is
        reported after a fixed time, so that it does not show whether a port there is closed, filtered, or open for
        another program.
        """
        deadline = asyncio.get_running_loop().time() + CALL_BACK_SECONDS
        async with _one_of(self._calling_back):
            self._calls_back.spend(self._host_of(context.remote_id), 1)
            known = (
                _parsed(request.addresses) or self._endpoint.get_addresses(context.remote_id)[:MAX_ADDRESSES_PER_PEER]
            )
            judge = self._endpoint.judge_for(self._endpoint.seen_of(context.remote_id))
            allowed = [address for address in known if is_name(address) or judge(address)]
            addresses = self._endpoint.transport.worth_dialling(allowed)
            dials = [self._can_dial(context.remote_id, address, deadline, judge) for address in addresses]
            reached = await asyncio.gather(*dials)
            return CallBack(
                reached={str(a): found for a, found in zip(addresses, reached, strict=True) if found is not None},
                seen_at=self._endpoint.address_seen_of(context.remote_id),
            )

    async def _can_dial(self, peer: PeerID, address: Multiaddr, deadline: float, judge: Judge) -> bool | None:
        """Whether the peer can be dialled there; ``None`` if this machine has no route there, which proves nothing."""
        try:
            async with asyncio.timeout_at(deadline):
                (await self._endpoint.dial_without_greeting(peer, address, judge)).abort()
                return True
        except (ShoalError, ConnectionError, TimeoutError) as e:
            no_way = isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.ENETUNREACH
        if no_way and not is_name(address):
            return None
        await asyncio.sleep(deadline - asyncio.get_running_loop().time())
        return False

    async def rpc_bulk(self, call: Call, context: P2PContext) -> None:
        """Receive some bytes, and send some."""
        async with _one_of(self._exchanging):
            try:
                async with asyncio.timeout(BULK_SECONDS):
                    await self._exchange(call, context.remote_id)
            except TimeoutError:
                raise BusyError(f"this line is too slow to be measured within {BULK_SECONDS:g} s") from None

    async def _exchange(self, call: Call, peer: PeerID) -> None:
        request = await call.receive(Bulk)
        if request is None:
            return
        wanted = max(0, min(request.wanted, MAX_BULK_BYTES))
        self._bulk.spend(self._host_of(peer), min(call.payload_size, MAX_BULK_BYTES) + wanted)
        await call.read_payload(MAX_BULK_BYTES)
        await call.send(Bulk(), bytes(wanted))

    def _host_of(self, peer: PeerID) -> str:
        return host_charged(self._endpoint.address_seen_of(peer), peer)


@asynccontextmanager
async def _one_of(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Take a place, or fail at once if none is free."""
    if places.locked():
        raise BusyError("too many others are checked at the moment: try again in a few seconds")
    async with places:
        yield


def _parsed(texts: Sequence[str]) -> list[Multiaddr]:
    try:
        return [Multiaddr(text) for text in texts]
    except ValueError as e:
        raise ProtocolError(f"asked to call back at an invalid address: {e}") from None


class _Budget:
    """Limits how much of something is done for one host and for all hosts together."""

    def __init__(self, by_host: TokenBuckets, by_all: TokenBuckets) -> None:
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
    torch = _version_of("torch", "not installed")
    return Description(shoal=_version_of("shoal"), python=python, torch=torch, wire=VERSION)


@functools.cache
def _version_of(package: str, otherwise: str = "unknown") -> str:
    # Loaded on demand: it takes longer to load than the rest of this package.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return otherwise
