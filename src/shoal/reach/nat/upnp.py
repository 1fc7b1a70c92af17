"""Ports forwarded by UPnP, which most home routers have switched on; it is the slowest way to ask.

Needs ``pip install shoal[upnp]``. Anybody in the network may answer a search with any description, so only answers of
the gateway itself count, and nothing is fetched from elsewhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import aiohttp
from async_upnp_client.client import UpnpAction, UpnpDevice, UpnpRequester, UpnpService
from async_upnp_client.client_factory import UpnpFactory
from async_upnp_client.const import HttpRequest, HttpResponse
from async_upnp_client.exceptions import UpnpActionError, UpnpConnectionError

from shoal.base.logs import one_line, quoted
from shoal.reach.nat.routers import Gateway, Lease, Mapper, NoMappingError, outer_address
from shoal.reach.nat.upnp_search import SEARCH_SECONDS, find_description, is_of_host

MAX_ANSWER_BYTES = 2**18  # chosen: many times the size of a router's description

_SERVICES = tuple(f"urn:schemas-upnp-org:service:{name}:" for name in ("WANIPConnection", "WANPPPConnection"))
# Error codes of the UPnP services WANIPConnection:1 and WANIPConnection:2.
_NO_SUCH_ENTRY, _TAKEN, _ONLY_PERMANENT = 714, 718, 725
_REASONS = {
    501: "it failed",
    606: "it does not allow it",
    _TAKEN: "its ports belong to other machines",
    728: "it has no room for more ports",
}


class _Requester(UpnpRequester):
    """Fetches only from one host, and at most :data:`MAX_ANSWER_BYTES`."""

    def __init__(self, host: str) -> None:
        self._host = host

    async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
        if not is_of_host(http_request.url, self._host):
            raise UpnpConnectionError(f"the router {self._host} sends elsewhere: {quoted(http_request.url)}")
        timeout = aiohttp.ClientTimeout(total=3.0)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(
                http_request.method,
                http_request.url,
                headers=http_request.headers,
                data=http_request.body,
                allow_redirects=False,
            ) as response,
        ):
            body = bytearray()
            async for piece in response.content.iter_chunked(2**16):
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise UpnpConnectionError(f"the router answers with more than {MAX_ANSWER_BYTES} bytes")
            return HttpResponse(response.status, response.headers, body.decode("utf-8", "replace"))


class Upnp(Mapper):
    """Asks by UPnP, for a port of IPv4.

    Args:
        search_seconds: how long to wait for the router's answer to a search.
        location: the URL of the router's description, if it was found already.
    """

    name = "UPnP"

    def __init__(self, gateway: Gateway, port: int, search_seconds: float = SEARCH_SECONDS, location: str = "") -> None:
        super().__init__(gateway, port)
        self._search_seconds, self._location = search_seconds, location
        self._service: UpnpService | None = None
        self._outer_ip, self._outer_port = "", port

    async def ask(self, seconds: int) -> Lease:
        if self._service is None:
            self._service = await self._find_service()
        try:
            told = await self._call("GetExternalIPAddress")
            ip = str(told.get("NewExternalIPAddress") or "")
            outer_address(ip, self.port)  # a router without an outer address is not asked for a port
            # For when the first port belongs to another machine, or the router wants to choose.
            ports = [secrets.choice(range(20_000, 60_000)) for _ in range(3)]
            for port in (self._outer_port, *ports):
                try:
                    await self._add(port, seconds)
                except UpnpActionError as e:
                    if e.error_code != _TAKEN or port == ports[-1]:
                        raise
                else:
                    break
        except UpnpActionError as e:
            said = one_line(f"{e.error_code} {e.error_desc or ''}"[:200]).strip()
            reason = _REASONS.get(e.error_code or 0, said)
            raise NoMappingError(f"the router refuses: {reason}") from e
        except NoMappingError:
            self._service = None  # it may have moved: search again next time
            raise
        self._outer_ip, self._outer_port = ip, port
        return Lease(outer_address(ip, port), float(seconds))

    async def has_forgotten(self) -> bool:
        told = await self._call("GetExternalIPAddress")
        if told.get("NewExternalIPAddress") != self._outer_ip:
            return True
        try:
            await self._call(
                "GetSpecificPortMappingEntry",
                NewRemoteHost="",
                NewExternalPort=self._outer_port,
                NewProtocol="TCP",
            )
        except UpnpActionError as e:
            return e.error_code == _NO_SUCH_ENTRY
        return False

    async def release(self) -> None:
        try:
            await self._call("DeletePortMapping", NewRemoteHost="", NewExternalPort=self._outer_port, NewProtocol="TCP")
        except UpnpActionError as e:
            raise NoMappingError(f"the router does not take the port back: {quoted(e.error_code)}") from e

    async def _add(self, port: int, seconds: int) -> None:
        wanted = {
            "NewRemoteHost": "",
            "NewExternalPort": port,
            "NewProtocol": "TCP",
            "NewInternalPort": self.port,
            "NewInternalClient": self.gateway.own_ip,
            "NewEnabled": True,
            "NewPortMappingDescription": "shoal",
        }
        try:
            await self._call("AddPortMapping", **wanted, NewLeaseDuration=seconds)
        except UpnpActionError as e:
            if e.error_code != _ONLY_PERMANENT:
                raise
            await self._call("AddPortMapping", **wanted, NewLeaseDuration=0)

    async def _find_service(self) -> UpnpService:
        url, self._location = self._location, ""  # used once: the next time it may have moved
        url = url or await find_description(self.gateway, self._search_seconds)
        try:
            factory = UpnpFactory(_Requester(self.gateway.ip), non_strict=True)
            service = _service_of(await factory.async_create_device(url))
        except Exception as e:  # a router's description may contain anything
            raise NoMappingError(f"the router's description of itself is of no use: {_told(e)}") from e
        if service is None:
            raise NoMappingError("the router has UPnP, but forwards no ports by it")
        return service

    async def _call(self, action: str, **values: Any) -> Mapping[str, Any]:
        """Call an action of the router.

        Raises:
            UpnpActionError: it refuses; the code says why.
            NoMappingError: there is no answer, or none that can be read.
        """
        if self._service is None or not self._service.has_action(action):
            raise NoMappingError(f"the router does not know {action}")
        called: UpnpAction = self._service.action(action)
        try:
            return await called.async_call(**values)
        except UpnpActionError:
            raise
        except (TimeoutError, OSError, aiohttp.ClientConnectionError) as e:
            raise NoMappingError(f"the router does not answer: {_told(e)}", answered=False) from e
        except Exception as e:  # the answer may contain anything
            raise NoMappingError(f"the router's answer to {action} is of no use: {_told(e)}") from e


def _service_of(device: UpnpDevice) -> UpnpService | None:
    """The service of a router through which it forwards ports."""
    for service in device.all_services:
        if service.service_type.startswith(_SERVICES) and service.has_action("AddPortMapping"):
            return service
    return None


def _told(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}"[:200])
