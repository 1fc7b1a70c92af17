"""Finding peers in the local network without an address, by multicast DNS (RFC 6762, RFC 6763).

Each peer announces its id and where it listens, but nothing about its runs, and hears what others announce. All of them
use one kind of service; which peers belong together shows when they connect. An announcement proves nothing, so the
peer that answers there must prove that id. The package zeroconf speaks the protocol, in the event loop of this peer.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import ipaddress
import logging
from collections.abc import Callable, Sequence
from typing import Any

from shoal.base.logs import Seldom, quoted
from shoal.base.tasks import cancel_and_wait, run_in_worker
from shoal.net.addresses import is_loopback
from shoal.net.endpoint import Endpoint
from shoal.net.own_addresses import LOCALHOST, LOOK_AGAIN_SECONDS
from shoal.net.pasted import LOCAL
from shoal.peers.identity import PeerID
from shoal.peers.multiaddr import Multiaddr

logger = logging.getLogger(__name__)

SERVICE = "_shoal._tcp.local."
# Chosen, like the limits below. How long a service has to answer.
ASK_SECONDS = 3.0
# The most peers to remember: anybody in the network can announce any number of them.
MAX_PRESENT = 64
# How many services are asked at a time, and how many wait: those that never answer must not fill the memory.
MAX_ASKED, MAX_WAITING = 64, 1024
CANNOT_LOOK = "this machine cannot look for peers in its local network now: %s. It tries again"
_ID = b"id"


def check_can_look_around() -> None:
    """Check that the package for finding peers in the local network is installed.

    Raises:
        ModuleNotFoundError: it is not; the text says how to install it.
    """
    if importlib.util.find_spec("zeroconf") is None:
        raise ModuleNotFoundError(
            f"initial_peers={LOCAL!r} needs zeroconf, which is not installed: pip install 'shoal[local]'",
            name="zeroconf",
        )


class LocalNetwork:
    """Announces a peer in its local network, and keeps looking for others.

    Args:
        endpoint: of the peer. In client mode it announces nothing, because nobody can call it.
        on_found: called with each peer that is found, and again when it has other addresses.
        announces: whether others are to find this peer.
    """

    def __init__(self, endpoint: Endpoint, on_found: Callable[[PeerID], object], *, announces: bool = True) -> None:
        self._endpoint = endpoint
        self._announces = announces
        self._on_found = on_found
        self.present: dict[PeerID, list[Multiaddr]] = {}
        """The peers that are announced at present, with their addresses."""
        self._names: dict[str, PeerID] = {}  # by the name of its service
        self._zeroconf: Any = None
        self._module: Any = None
        self._announced: list[Multiaddr] | None = None
        self._asking: dict[asyncio.Task[None], None] = {}
        self._waiting: dict[str, Any] = {}  # by the name of a service to ask: the zeroconf object to ask through
        self._life: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._warn_seldom = Seldom(logger.warning)

    async def start(self) -> None:
        """Announce this peer and look for others until :meth:`close`. A machine without a network may get one later.

        Raises:
            ValueError: the peer is not on a real network, as in a simulation.
        """
        if not self._endpoint.transport.is_behind_routers:
            raise ValueError(f"{LOCAL!r} looks around in real networks, and this peer is not on one: give it addresses")
        self._module = await run_in_worker(importlib.import_module, "zeroconf.asyncio")
        await self._open()
        self._life = asyncio.get_running_loop().create_task(self._follow_moves())

    async def close(self) -> None:
        """Withdraw the announcement, and stop looking."""
        if self._life is not None:
            await cancel_and_wait(self._life)
        await self._end()

    async def _follow_moves(self) -> None:
        """Open new sockets and announce again whenever the networks of this machine change."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
            try:
                if self._zeroconf is None or self._own() != self._announced:
                    await self._end()
                    await self._open()
            except Exception as e:  # zeroconf has errors of its own, and this peer keeps looking
                self._warn_seldom(CANNOT_LOOK, f"{type(e).__name__}: {e}")

    def _own(self) -> list[Multiaddr]:
        return [] if self._endpoint.client_mode else self._endpoint.transport.addresses()

    async def _open(self) -> None:
        own = self._own()
        try:
            if own and all(map(is_loopback, own)):  # nobody elsewhere could call it
                self._zeroconf = self._module.AsyncZeroconf(interfaces=[LOCALHOST])
            else:
                self._zeroconf = self._module.AsyncZeroconf()
            from zeroconf import DNSQuestionType

            core = self._zeroconf.zeroconf
            # Answers must go to the group: several programs share the port, and a direct answer reaches only one.
            browser = self._module.AsyncServiceBrowser
            browser(core, SERVICE, handlers=[self._note], question_type=DNSQuestionType.QM)
            if own and self._announces:
                # Names are peer ids, so that no two peers can want the same.
                await self._zeroconf.async_register_service(self._described(own), cooperating_responders=True)
            self._announced = own
        except OSError as e:
            self._warn_seldom(CANNOT_LOOK, e)
            await self._end()

    def _described(self, own: Sequence[Multiaddr]) -> Any:
        """The announcement: all addresses with the port of the first one; loopback only if there is no other."""
        port = own[0]["tcp"]
        told = [each for each in own if each["tcp"] == port]
        told = [each for each in told if not is_loopback(each)] or told
        name = str(self._endpoint.peer_id)
        return self._module.AsyncServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            port=int(port or 0),
            properties={_ID: name.encode()},
            server=f"{name}.local.",
            parsed_addresses=[str(each.values()[0]) for each in told],
        )

    async def _end(self) -> None:
        self._waiting.clear()
        await cancel_and_wait(*self._asking)
        # After a move the peers of the old network are out of sight, and nothing tells when they end.
        self.present.clear()
        self._names.clear()
        ended, self._zeroconf = self._zeroconf, None
        if ended is not None:
            # A task of its own: if close() comes in the middle of a move, the sockets are closed all the same.
            self._ending = asyncio.get_running_loop().create_task(ended.async_close())
        if self._ending is not None:
            try:
                await asyncio.shield(self._ending)
            finally:
                if self._ending.done():  # if it has failed, the next one may succeed
                    self._ending = None

    # --- others -------------------------------------------------------------------------------------------------------

    def _note(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if state_change.name == "Removed":
            self.present.pop(self._names.pop(name, self._endpoint.peer_id), None)
        elif (len(self.present) < MAX_PRESENT or name in self._names) and len(self._waiting) < MAX_WAITING:
            self._waiting[name] = zeroconf
            self._ask_next()

    def _ask_next(self) -> None:
        """Ask the services that wait, in order."""
        while self._waiting and len(self._asking) < MAX_ASKED:
            name = next(iter(self._waiting))
            task = asyncio.get_running_loop().create_task(self._ask(self._waiting.pop(name), name))
            self._asking[task] = None
            task.add_done_callback(self._has_asked)

    def _has_asked(self, task: asyncio.Task[None]) -> None:
        self._asking.pop(task, None)
        self._ask_next()

    async def _ask(self, zeroconf: Any, name: str) -> None:
        from zeroconf import BadTypeInNameException, DNSQuestionType

        try:
            info = self._module.AsyncServiceInfo(SERVICE, name)
        except BadTypeInNameException:  # anybody can announce any name
            logger.debug("%s is announced in this network, but is not the name of a service", quoted(name))
            return
        if not await info.async_request(zeroconf, ASK_SECONDS * 1000, question_type=DNSQuestionType.QM):
            return
        try:
            peer = PeerID.from_base58((info.properties.get(_ID) or b"").decode())
            addresses = _addresses_of(info)
        except ValueError as e:
            logger.debug("%s is announced in this network, but is not a peer: %s", name, e)
            return
        if peer.public_key is None or peer == self._endpoint.peer_id or not addresses:
            return
        is_news = self.present.get(peer) != addresses
        self._names[name] = peer
        self.present[peer] = addresses
        if is_news:
            logger.debug("peer %s is announced in this network at %s", peer, ", ".join(map(str, addresses)))
            self._on_found(peer)


def _addresses_of(info: Any) -> list[Multiaddr]:
    found = [ipaddress.ip_address(text.partition("%")[0]) for text in info.parsed_addresses()]
    usable = [ip for ip in found if ip.version == 4 or not ip.is_link_local]
    return [Multiaddr(f"/ip{ip.version}/{ip}/tcp/{info.port}") for ip in usable if info.port]
