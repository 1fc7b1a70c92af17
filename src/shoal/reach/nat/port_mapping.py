"""Keeps a port of the router forwarded to a peer, for as long as the peer runs.

PCP is tried first, then NAT-PMP, then UPnP if it is installed; for IPv6 only PCP, which opens the router's firewall. A
router's answer is only a claim: the inner one of two routers reports success, too, but nobody can call there. So the
addresses found here do not count until a peer outside has called one of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.base.bounded import Bounded
from shoal.base.tasks import cancel_and_wait, run_in_worker, wait_at_most
from shoal.net.addresses import ip_of
from shoal.net.transport import Transport
from shoal.peers.multiaddr import Multiaddr
from shoal.reach.nat.pcp import TRIES, NatPmp, Pcp
from shoal.reach.nat.routers import Gateway, Lease, Mapper, NoMappingError, find_gateways
from shoal.reach.nat.upnp_search import UpnpIfFound

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MappingPolicy:
    """How often routers are asked, in seconds. All numbers are chosen."""

    lease: int = 3600
    """The lifetime to request; the port is renewed after half of the lifetime that is granted."""
    look: float = 300.0
    """Pause between checks whether this machine has moved or its router has restarted."""
    retry: float = 600.0
    """Least pause after a failure. A router that refuses once will most likely refuse again."""
    longest: float = 86_400.0
    """Longest pause, whatever the router asks for."""
    soonest: float = 10.0
    """Least pause until a renewal, whatever the router grants."""
    farewell: float = 1.0
    """How long giving the port back may take."""
    tries: Sequence[float] = TRIES
    """Seconds to wait for the answer to each copy of a datagram."""


PACE = MappingPolicy()
MakeMappers = Callable[[Gateway, int], Sequence[Mapper]]


def has_upnp() -> bool:
    """Whether the package for UPnP is installed. It reads files."""
    return importlib.util.find_spec("async_upnp_client") is not None


class PortMapping:
    """Asks this machine's routers to forward a port, and keeps asking until it is closed.

    Args:
        port: the TCP port where the peer listens.
        on_address: called with all outer addresses whenever they change.
        listens_at: whether the peer listens at an address of this machine; default: at all of them.
        secret: see :class:`~shoal.reach.nat.pcp.Pcp`.
        find: finds the routers; it may block.
        make_mappers: the ways to ask a router, in the order to try them; it may block.
    """

    def __init__(
        self,
        port: int,
        on_address: Callable[[list[Multiaddr]], object],
        *,
        listens_at: Callable[[str], bool] = lambda ip: True,
        secret: bytes | None = None,
        pace: MappingPolicy = PACE,
        find: Callable[[], Sequence[Gateway]] = find_gateways,
        make_mappers: MakeMappers | None = None,
    ) -> None:
        self._port, self._on_address, self._listens_at, self._secret = port, on_address, listens_at, secret
        self._pace, self._find = pace, find
        self._make_mappers = make_mappers or self._usual_mappers
        self._keepers = [_Keeper(self, is_ipv6) for is_ipv6 in (False, True)]
        self._told: list[Multiaddr] = []

    @property
    def addresses(self) -> list[Multiaddr]:
        """Outer addresses that routers forward to this peer, without ``/p2p``."""
        return [keeper.lease.address for keeper in self._keepers if keeper.lease is not None]

    @property
    def verdicts(self) -> dict[str, str]:
        """The result of each protocol in the last attempt, such as ``{"PCP": "the router does not answer"}``.

        Empty until the first attempt, and if there is no router to ask.
        """
        first, second = self._keepers
        return {**first.verdicts, **{f"{name}, IPv6": text for name, text in second.verdicts.items()}}

    @property
    def is_refused(self) -> bool:
        """Whether a router has answered, but forwards nothing."""
        return not self.addresses and any(keeper.was_answered for keeper in self._keepers)

    def start(self) -> None:
        """Begin to ask, in the background."""
        for keeper in self._keepers:
            keeper.start()

    async def wait_for_first_try(self) -> None:
        """Return when it is known whether a router forwards the port; this may take seconds."""
        await asyncio.gather(*(keeper.has_tried.wait() for keeper in self._keepers))

    def look_again(self) -> None:
        """Check at once: this machine has moved or slept, or all its connections broke."""
        for keeper in self._keepers:
            keeper.wake()

    async def close(self) -> None:
        """Stop asking, and give the ports back, without calling ``on_address``."""
        await asyncio.gather(*(keeper.close() for keeper in self._keepers))

    # --- for keepers --------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Call ``on_address`` if the addresses have changed."""
        if self._told != self.addresses:
            self._told = self.addresses
            self._on_address(list(self._told))

    async def gateway(self, is_ipv6: bool) -> Gateway | None:
        """The router for one version of IP; ``None`` if it need not be asked."""
        for gateway in await run_in_worker(self._find):
            if gateway.is_ipv6 == is_ipv6 and self._listens_at(gateway.own_ip):
                return gateway
        return None

    async def mappers(self, gateway: Gateway) -> Sequence[Mapper]:
        """The ways to ask a router."""
        return await run_in_worker(self._make_mappers, gateway, self._port)

    @property
    def pace(self) -> MappingPolicy:
        return self._pace

    def _usual_mappers(self, gateway: Gateway, port: int) -> Sequence[Mapper]:
        found: list[Mapper] = [Pcp(gateway, port, self._pace.tries, self._secret)]
        if not gateway.is_ipv6:
            found.append(NatPmp(gateway, port, self._pace.tries))
            if has_upnp():
                found.append(UpnpIfFound(gateway, port))
        return found


class _Keeper:
    """Keeps the port forwarded for one version of IP.

    Its many attributes are the state of one conversation with one router.
    """

    def __init__(self, mapping: PortMapping, is_ipv6: bool) -> None:
        self._mapping, self._is_ipv6, self._pace = mapping, is_ipv6, mapping.pace
        self.lease: Lease | None = None
        self.verdicts: dict[str, str] = {}
        self.was_answered = False
        self.has_tried = asyncio.Event()
        self._mapper: Mapper | None = None
        self._gateway: Gateway | None = None
        self._renew_at = self._expires_at = math.inf
        # By router: when it may be asked again after a failure.
        self._not_before: Bounded[Gateway, float] = Bounded()
        self._woken = asyncio.Event()
        self._is_urgent = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        self._is_urgent = True
        self._woken.set()

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        if self._mapper is None:
            return
        mapper, self._mapper, self.lease = self._mapper, None, None
        try:
            async with asyncio.timeout(self._pace.farewell):
                await mapper.release()
        except (NoMappingError, TimeoutError) as e:
            logger.debug("the router keeps a port until its time is up: %s", e)

    async def _run(self) -> None:
        while True:
            try:
                pause = await self._step()
            except Exception:
                # There are routers of all kinds, and a peer also works without a forwarded port.
                logger.exception("keeping a port of the router has failed; trying again in %g s", self._pace.retry)
                pause = self._pace.retry
            self.has_tried.set()
            if await wait_at_most(self._woken, pause):
                self._woken.clear()

    async def _step(self) -> float:
        """Do what is due now; returns the seconds until the next step."""
        is_urgent, self._is_urgent = self._is_urgent, False
        gateway = await self._mapping.gateway(self._is_ipv6)
        if gateway != self._gateway:
            # The port cannot be given back to a router that is out of reach.
            self._lose()
            self._gateway, self.verdicts, self.was_answered = gateway, {}, False
        if gateway is None:
            return self._pace.look
        now = self._now()
        if now >= self._expires_at:
            logger.info("the router no longer forwards a port to this peer: it did not renew that")
            self._lose()
        has_forgotten = self._mapper is not None and await self._has_forgotten(self._mapper)
        if now >= self._not_before.get(gateway, 0.0):
            if self._mapper is None:
                await self._begin(gateway)
            elif is_urgent or has_forgotten or now >= self._renew_at:
                await self._renew(gateway, self._mapper, has_forgotten)
        return self._pause(gateway)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _pause(self, gateway: Gateway) -> float:
        now = self._now()
        due = self._not_before.get(gateway, 0.0)
        if self._mapper is not None:
            due = min(max(due, self._renew_at), self._expires_at)
        return min(self._pace.look, max(due - now, 0.0))

    async def _has_forgotten(self, mapper: Mapper) -> bool:
        try:
            return await mapper.has_forgotten()
        except NoMappingError:
            return False  # the router does not say; renewing will show it

    async def _begin(self, gateway: Gateway) -> None:
        verdicts: dict[str, str] = {}
        was_answered, pause = False, 0.0
        for mapper in await self._mapping.mappers(gateway):
            try:
                lease = await mapper.ask(self._pace.lease)
            except NoMappingError as e:
                verdicts[mapper.name] = str(e)
                was_answered |= e.answered
                pause = max(pause, e.pause)
                continue
            verdicts[mapper.name] = f"forwards {lease.address}"
            self.verdicts, self.was_answered, self._mapper = verdicts, True, mapper
            self._keep(lease)
            logger.info("the router forwards %s to this peer, by %s", lease.address, mapper.name)
            return
        self.verdicts, self.was_answered = verdicts, was_answered
        self._rest(gateway, pause)
        logger.debug("no router forwards a port to this peer: %s", verdicts)

    async def _renew(self, gateway: Gateway, mapper: Mapper, has_forgotten: bool) -> None:
        try:
            self._keep(await mapper.ask(self._pace.lease))
        except NoMappingError as e:
            self.verdicts[mapper.name] = str(e)
            self._rest(gateway, e.pause)
            logger.debug("a port of the router was not renewed: %s", e)
            if has_forgotten:
                self._lose()

    def _keep(self, lease: Lease) -> None:
        seconds = min(lease.seconds, self._pace.lease)
        now = self._now()
        self._renew_at = now + max(seconds / 2, self._pace.soonest)
        self._expires_at = now + max(seconds, self._pace.soonest * 2)
        self.lease = lease
        self._mapping.tell()

    def _lose(self) -> None:
        self.lease = self._mapper = None
        self._renew_at = self._expires_at = math.inf
        self._mapping.tell()

    def _rest(self, gateway: Gateway, pause: float) -> None:
        """Leave the router alone for a while, and longer if it asks for that."""
        self._not_before[gateway] = self._now() + min(max(self._pace.retry, pause), self._pace.longest)


def forward_port(transport: Transport, on_address: Callable[[list[Multiaddr]], object]) -> PortMapping | None:
    """Let the router forward a peer's port, in the background; ``None`` if no router can be in front of the peer.

    Args:
        transport: of the peer.
        on_address: as for :class:`PortMapping`.
    """
    port = next(
        (
            own["tcp"]
            for own in transport.addresses()
            if "tcp" in own and (ip := ip_of(own)) is not None and not ip.is_loopback
        ),
        None,
    )
    if not (transport.is_behind_routers and port):
        return None

    def listens_at(ip: str) -> bool:
        return any(ip in (own.get("ip4"), own.get("ip6")) for own in transport.addresses())

    # Only this peer can make this signature, and makes it again at its next start.
    secret = hashlib.sha256(transport.identity.sign(b"shoal port mapping")).digest()
    mapping = PortMapping(int(port), on_address, listens_at=listens_at, secret=secret)
    mapping.start()
    return mapping
