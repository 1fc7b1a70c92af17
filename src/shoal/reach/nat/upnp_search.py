"""Searches for a router that speaks UPnP. The module that speaks to it (:mod:`.upnp`) is loaded only if one answers.

Loading takes a fifth of a second of processor time and 13 MB, and many peers have no such router.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from typing import Any
from urllib.parse import urlsplit

from shoal.base.tasks import run_in_worker
from shoal.net.tcp.stream import OwnSocket
from shoal.reach.nat.routers import Gateway, Lease, Mapper, NoMappingError

GROUP = "239.255.255.250"  # the multicast address of UPnP Device Architecture 1.1
SEARCH_SECONDS = 1.0  # derived: MX in the search below, the most seconds that a device waits before it answers
_DEVICES = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
_SEARCH = f'M-SEARCH * HTTP/1.1\r\nHOST: {GROUP}:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\nST: {{device}}\r\n\r\n'


def location_in(answer: bytes) -> str:
    """The URL of the router's description in its answer to a search; empty if it does not say."""
    lines = answer[:4096].decode("latin-1").split("\r\n")
    if not lines[0].startswith("HTTP/1.1 200"):
        return ""
    named = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return named.get("location", "")


def is_of_host(url: str, host: str) -> bool:
    """Whether a URL leads to this host, over plain HTTP as UPnP requires."""
    try:
        split = urlsplit(url)
        return split.scheme == "http" and split.hostname == host and split.port != 0
    except ValueError:
        return False


class _Search(asyncio.DatagramProtocol):
    """Waits for the router's answer to a search."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.location: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        location = location_in(data)
        is_of_gateway = addr[0] == self._gateway.ip and is_of_host(location, self._gateway.ip)
        if is_of_gateway and not self.location.done():
            self.location.set_result(location)

    def connection_lost(self, exc: Exception | None) -> None:
        self.location.cancel()


async def find_description(gateway: Gateway, seconds: float = SEARCH_SECONDS) -> str:
    """The URL of the router's description of itself.

    Raises:
        NoMappingError: the router does not answer.
    """
    unbound = OwnSocket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        unbound.setblocking(False)
        unbound.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        unbound.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(gateway.own_ip))
        unbound.bind((gateway.own_ip, 0))
        transport, search = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Search(gateway), sock=unbound
        )
    except OSError as e:
        unbound.close()
        raise NoMappingError(f"the router cannot be searched for: {e.strerror or e}", answered=False) from e
    try:
        for _ in range(2):
            for device in _DEVICES:
                packet = _SEARCH.format(device=device).encode()
                # The standard asks for the group, but some access points do not pass it on.
                for host in (GROUP, gateway.ip):
                    transport.sendto(packet, (host, gateway.ssdp_port))
            await asyncio.wait([search.location], timeout=seconds / 2)
            if search.location.done():
                return search.location.result()
    finally:
        transport.close()
    raise NoMappingError("the router does not answer", answered=False)


class UpnpIfFound(Mapper):
    """Asks by UPnP if the router answers a search."""

    name = "UPnP"

    def __init__(self, gateway: Gateway, port: int) -> None:
        super().__init__(gateway, port)
        self._found: Mapper | None = None

    async def ask(self, seconds: int) -> Lease:
        if self._found is None:
            location = await find_description(self.gateway)
            upnp = await run_in_worker(importlib.import_module, "shoal.reach.nat.upnp")
            self._found = upnp.Upnp(self.gateway, self.port, location=location)
        return await self._found.ask(seconds)

    async def has_forgotten(self) -> bool:
        return self._found is not None and await self._found.has_forgotten()

    async def release(self) -> None:
        if self._found is not None:
            await self._found.release()
