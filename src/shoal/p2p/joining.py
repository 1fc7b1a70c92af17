"""Reaching the first peers of a swarm, with a verdict on each address that could not be used.

A peer also helps others to find out how well the two can reach each other (:class:`Checkup`). Anybody may ask, so the
answers must be useless for attacks on third parties: a peer that asks to be called back learns no more than yes or no,
the bytes for measuring bandwidth go to the asking peer alone, and both are limited per host and in total.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from shoal.errors import (
    BootstrapError,
    BusyError,
    IdentityMismatchError,
    InterruptedDialError,
    NotAMemberError,
    ProtocolError,
    ShoalError,
)
from shoal.p2p.addresses import MAX_ADDRESSES_PER_PEER, Judge, ip_text_of, is_name
from shoal.p2p.badges import ANY_ROLE, Roles
from shoal.p2p.connection import Call
from shoal.p2p.identity import PeerID, is_circuit, relay_of
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.own_addresses import is_of_one_network
from shoal.p2p.pasted import Target, describe_target, read_targets, short_form
from shoal.p2p.service import P2PContext, ServicerBase
from shoal.p2p.tcp_listener import HostRates, host_charged
from shoal.p2p.transport import VERSION, Header
from shoal.tasks import cancel_and_wait, run_in_worker

if TYPE_CHECKING:
    from shoal.p2p.p2p import P2P


Reach = Callable[[Multiaddr, "PeerID | None"], Awaitable[None]]
"""Connects to a peer at an address, or to any peer there, or raises."""

# The most in one direction of one exchange.
MAX_BULK_BYTES = 2 * 2**20
# The average rate for one host.
BULK_BYTES_PER_SECOND = 2**20

BULK_BURST_BYTES = 32 * 2**20
# The average rate for all hosts together.
BULK_TOTAL_BYTES_PER_SECOND = 8 * 2**20

BULK_TOTAL_BURST_BYTES = 128 * 2**20
# The average rate for one host; each call back dials the few addresses that the caller claims as its own.
CALLS_BACK_PER_SECOND = 0.2

CALLS_BACK_BURST = 5
CALLS_BACK_TOTAL_PER_SECOND = 2.0
CALLS_BACK_TOTAL_BURST = 20
# Exchanges in progress at the same time, and calls back; further peers are told to try again.
MAX_AT_ONCE = 8

# For an exchange, there and back. Whoever is slower learns nothing that it does not know.
BULK_SECONDS = 60.0
CALL_BACK_SECONDS = 4.0
MAX_ADDRESS_CHARACTERS = 256
_EVERYBODY = ""


def parse_peer_addresses(initial_peers: Any) -> list[Target]:
    """Check addresses from the user. A circuit also stands for its relay, which is a peer like others.

    Raises:
        TypeError: neither a sequence of addresses nor a text with some.
        ValueError: one of them is not an address of a peer.
    """
    targets = read_targets(initial_peers, may_be_local=True)
    relays: list[Target] = [relay for place, _ in targets if (relay := relay_of(place)) is not None]
    return list(dict.fromkeys([*targets, *relays]))


# Dials per address. Only a connection that broke is dialled again, because chance may have caused it; pauses double.
DIAL_ATTEMPTS = 4

FIRST_PAUSE_SECONDS = 0.1


async def reach_first(
    targets: Sequence[Target], reach: Reach, limit: float, advise: Callable[[Multiaddr], str] = lambda _: ""
) -> None:
    """Try all addresses at once; return when the first one is connected.

    Args:
        advise: what else to say about an address that nobody could reach.

    Raises:
        BootstrapError: none was connected within ``limit`` seconds; it says why, for each address.
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


def advise_on_private(p2p: P2P, address: Multiaddr) -> str:
    """What to do about an address that cannot be reached, if it is private and of another network; empty otherwise.

    Two machines can only find each other through one that both can call, so it says which address to give instead.
    """
    if not p2p.transport.is_elsewhere(address):
        return ""
    what = f". {ip_text_of(address)} is a private address of another network"
    if not p2p.transport.addresses():  # nobody else can join through it
        return f"{what}: run `shoal dht` on a machine that both can call, and give its address to both"
    own = (short_form(each) for each in p2p.outlook.announced() if _is_public(each))
    public = [each if p2p.port_stays else f"{each.rpartition(':')[0]}:PORT" for each in own if each is not None]
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
            broken[target] = e  # the verdict, if the time limit comes before a better one
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
    """What is wrong with this peer if another one cannot dial it, and what its user can do.

    Args:
        witness: the peer that has tried.
        announced: the addresses it has tried, without ``/p2p``.
        seen_at: where the witness sees this peer; empty if it does not know.
    """
    where = ", ".join(announced) or "any address, because it announces none"
    what = f"cannot be dialled back: peer {witness} cannot call this node back at {where}"
    client = "or run `shoal dht` on a machine that can be called from outside, and others call this one through it"
    addresses = [Multiaddr(address) for address in announced]
    ips = [ip for address in addresses if (ip := _ip_of(address)) is not None]
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


_IP = ipaddress.IPv4Address | ipaddress.IPv6Address


def _ip_of(address: Multiaddr) -> _IP | None:
    text = ip_text_of(address)
    return None if text is None else ipaddress.ip_address(text)


def _ip_seen(text: str) -> _IP | None:
    """The IP address in what another peer claims, or ``None``: the claim may be anything."""
    try:
        return _ip_of(Multiaddr(text))
    except ValueError:
        return None


class Question(Header):
    """Nothing but the question."""


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
        list[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARACTERS)]],
        msgspec.Meta(max_length=MAX_ADDRESSES_PER_PEER),
    ] = msgspec.field(default_factory=list)
    """Where, without ``/p2p``; if there are none, at the addresses that the asking peer has announced."""


class CallBack(Header):
    """For each address of the asking peer, whether it could be dialled there."""

    reached: dict[str, bool] = msgspec.field(default_factory=dict)
    """Addresses that could not be tried from here, or that may not be the caller's, are left out."""
    seen_at: str = ""
    """Where the asking peer is seen from here; empty if that is not known."""


class Bulk(Header):
    """Comes with a payload, and asks for a payload of ``wanted`` bytes."""

    wanted: int = 0


class Checkup(ServicerBase):
    """Answers a peer that checks how well it reaches this one."""

    roles: ClassVar[Roles] = ANY_ROLE

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
        self._calling_back = asyncio.Semaphore(MAX_AT_ONCE)
        self._exchanging = asyncio.Semaphore(MAX_AT_ONCE)

    async def rpc_describe(self, request: Question, context: P2PContext) -> Description:
        """Describe the software that runs here."""
        found = await run_in_worker(describe_software)  # it reads files
        found.seen_at = self._p2p.address_seen_of(context.remote_id)
        return found

    async def rpc_call_back(self, request: CallMe, context: P2PContext) -> CallBack:
        """Dial the caller at the addresses that it names, or else at those that it has announced.

        Only at addresses that it may have, see :func:`~.addresses.may_be_dialled_for`. A failure is told after a fixed
        time, so that it does not show whether a port there is closed, filtered, or open for something else.
        """
        deadline = asyncio.get_running_loop().time() + CALL_BACK_SECONDS
        async with _one_of(self._calling_back):
            self._calls_back.spend(self._host_of(context.remote_id), 1)
            known = _parsed(request.addresses) or self._p2p.get_addresses(context.remote_id)[:MAX_ADDRESSES_PER_PEER]
            judge = self._p2p.judge_for(self._p2p.seen_of(context.remote_id))
            allowed = [address for address in known if is_name(address) or judge(address)]
            addresses = self._p2p.transport.worth_dialling(allowed)
            dials = [self._can_dial(context.remote_id, address, deadline, judge) for address in addresses]
            reached = await asyncio.gather(*dials)
            return CallBack(
                reached={str(a): found for a, found in zip(addresses, reached, strict=True) if found is not None},
                seen_at=self._p2p.address_seen_of(context.remote_id),
            )

    async def _can_dial(self, peer: PeerID, address: Multiaddr, deadline: float, judge: Judge) -> bool | None:
        """Whether the peer can be dialled there; ``None`` if this machine has no way there, which says nothing."""
        try:
            async with asyncio.timeout_at(deadline):
                (await self._p2p.dial_without_greeting(peer, address, judge)).abort()
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
        return host_charged(self._p2p.address_seen_of(peer), peer)


@asynccontextmanager
async def _one_of(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Take a place without waiting for it."""
    if places.locked():
        raise BusyError("too many others are checked at the moment: try again in a few seconds")
    async with places:
        yield


def _parsed(texts: Sequence[str]) -> list[Multiaddr]:
    try:
        return [Multiaddr(text) for text in texts]
    except ValueError as e:
        raise ProtocolError(f"asked to call back at what is no address: {e}") from None


class _Budget:
    """Limits how much of something is done for one host and for all hosts together."""

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
