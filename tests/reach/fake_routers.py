"""Routers of loopback: a server for PCP and NAT-PMP, and one for UPnP, as honest or dishonest as a test wants."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web

from shoal.reach.nat.routers import Gateway

LOOPBACK = "127.0.0.1"
OUTER_IP = "198.51.100.7"


class Router(asyncio.DatagramProtocol):
    """Answers PCP and NAT-PMP on a free port of loopback.

    Everything that tests change is an attribute.
    """

    def __init__(self) -> None:
        self.versions: tuple[int, ...] = (0, 2)
        self.result = 0
        self.results: dict[int, int] = {}
        """By version, instead of ``result``."""
        self.lost = 0
        """How many of the next requests do not arrive."""
        self.outer_ip = OUTER_IP
        self.lifetime = 3600
        self.pause = 30
        """Seconds for which it wants to be left alone after a refusal."""
        self.epoch = 1000
        self.change: Callable[[bytes], list[bytes]] = lambda answer: [answer]
        """What it sends instead of the true answer."""
        self.requests: list[bytes] = []
        self.mappings: dict[int, tuple[int, bytes]] = {}
        """Of inner ports: the outer port, and the nonce."""
        self._closed = asyncio.Event()
        self.came = asyncio.Event()
        """Set at each request."""

    async def __aenter__(self) -> Router:
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, local_addr=(LOOPBACK, 0)
        )
        self._other, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            asyncio.DatagramProtocol, local_addr=(LOOPBACK, 0)
        )
        port = self._transport.get_extra_info("sockname")[1]
        self.gateway = Gateway(LOOPBACK, LOOPBACK, pcp_port=port, ssdp_port=port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._transport.close()
        self._other.close()
        await self._closed.wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.requests.append(data)
        self.came.set()
        if self.lost:
            self.lost -= 1
            return
        for answer in self.change(self.answer_to(data)):
            self._transport.sendto(answer, addr)

    def send_from_elsewhere(self, data: bytes, addr: Any) -> None:
        self._other.sendto(data, addr)

    def asked(self) -> list[str]:
        """The requests, in words."""
        return [_in_words(request) for request in self.requests]

    def answer_to(self, request: bytes) -> bytes:
        version, opcode = request[0], request[1]
        if version not in self.versions:
            return struct.pack(">BBHI", max(self.versions), 0x80 | opcode, 1, self.epoch).ljust(24, b"\0")
        result = self.results.get(version, self.result)
        return self._new(request, opcode, result) if version == 2 else self._old(request, opcode, result)

    def _new(self, request: bytes, opcode: int, result: int) -> bytes:
        lifetime = struct.unpack_from(">I", request, 4)[0] and self.lifetime
        head = struct.pack(">BBBBII12x", 2, 0x80 | opcode, 0, result, self.pause if result else lifetime, self.epoch)
        if opcode == 0:
            return head
        nonce, protocol, inner, outer, _ = struct.unpack_from(">12sB3xHH16s", request, 24)
        if not result:
            self._keep(inner, outer, nonce, lifetime)
        ip = b"\0" * 10 + b"\xff\xff" + bytes(map(int, self.outer_ip.split(".")))
        return head + struct.pack(">12sB3xHH16s", nonce, protocol, inner, outer, ip)

    def _old(self, request: bytes, opcode: int, result: int) -> bytes:
        head = struct.pack(">BBHI", 0, 0x80 | opcode, result, self.epoch)
        if opcode == 0:
            return head + bytes(map(int, self.outer_ip.split(".")))
        inner, outer, lifetime = struct.unpack_from(">HHI", request, 4)
        if not result:
            self._keep(inner, outer, b"", lifetime)
        return head + struct.pack(">HHI", inner, outer, lifetime and self.lifetime)

    def _keep(self, inner: int, outer: int, nonce: bytes, lifetime: int) -> None:
        if lifetime:
            self.mappings[inner] = outer, nonce
        else:
            self.mappings.pop(inner, None)


def _in_words(request: bytes) -> str:
    if request[0] == 2:
        name = "PCP announce" if request[1] == 0 else "PCP map"
    else:
        name = "NAT-PMP address" if request[1] == 0 else "NAT-PMP map"
    lifetime = struct.unpack_from(">I", request, 4 if request[0] == 2 else 8)[0] if name.endswith("map") else None
    return f"{name} 0" if lifetime == 0 else name


_DESCRIPTION = """<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType>
<friendlyName>router</friendlyName><manufacturer>tests</manufacturer><modelName>fake</modelName><UDN>uuid:1</UDN>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType>
<friendlyName>wan</friendlyName><manufacturer>tests</manufacturer><modelName>fake</modelName><UDN>uuid:2</UDN>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType>
<friendlyName>line</friendlyName><manufacturer>tests</manufacturer><modelName>fake</modelName><UDN>uuid:3</UDN>
<serviceList><service><serviceType>{service}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<SCPDURL>/service.xml</SCPDURL><controlURL>{control}</controlURL><eventSubURL>/events</eventSubURL></service>
</serviceList></device></deviceList></device></deviceList></device></root>"""

_ARGUMENTS = {
    "GetExternalIPAddress": [("NewExternalIPAddress", "out", "ip")],
    "AddPortMapping": [
        ("NewRemoteHost", "in", "ip"),
        ("NewExternalPort", "in", "port"),
        ("NewProtocol", "in", "text"),
        ("NewInternalPort", "in", "port"),
        ("NewInternalClient", "in", "ip"),
        ("NewEnabled", "in", "switch"),
        ("NewPortMappingDescription", "in", "text"),
        ("NewLeaseDuration", "in", "seconds"),
    ],
    "DeletePortMapping": [
        ("NewRemoteHost", "in", "ip"),
        ("NewExternalPort", "in", "port"),
        ("NewProtocol", "in", "text"),
    ],
    "GetSpecificPortMappingEntry": [
        ("NewRemoteHost", "in", "ip"),
        ("NewExternalPort", "in", "port"),
        ("NewProtocol", "in", "text"),
        ("NewInternalPort", "out", "port"),
    ],
}
_TYPES = {"ip": "string", "text": "string", "port": "ui2", "switch": "boolean", "seconds": "ui4"}


def _service_xml() -> str:
    actions = "".join(
        f"<action><name>{action}</name><argumentList>"
        + "".join(
            f"<argument><name>{name}</name><direction>{direction}</direction>"
            f"<relatedStateVariable>{kind}</relatedStateVariable></argument>"
            for name, direction, kind in arguments
        )
        + "</argumentList></action>"
        for action, arguments in _ARGUMENTS.items()
    )
    variables = "".join(
        f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{kind}</dataType></stateVariable>'
        for name, kind in _TYPES.items()
    )
    return (
        '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0"><specVersion><major>1</major>'
        f"<minor>0</minor></specVersion><actionList>{actions}</actionList>"
        f"<serviceStateTable>{variables}</serviceStateTable></scpd>"
    )


class Igd(asyncio.DatagramProtocol):
    """A router with UPnP on loopback: answers searches, describes itself, and forwards ports.

    Everything that tests change is an attribute.
    """

    def __init__(self) -> None:
        self.service = "urn:schemas-upnp-org:service:WANIPConnection:1"
        self.control = "/control"
        self.description = _DESCRIPTION
        self.location = ""
        """Where it says that its description is; empty: where it is."""
        self.answers_searches = True
        self.outer_ip = OUTER_IP
        self.errors: dict[str, int] = {}
        """By action: it fails with this code."""
        self.taken: set[int] = set()
        self.only_permanent = False
        self.mappings: dict[int, dict[str, str]] = {}
        """By outer port: all that was asked."""
        self.searches = 0
        self._closed = asyncio.Event()
        self.fetched: list[str] = []

    async def __aenter__(self) -> Igd:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, local_addr=(LOOPBACK, 0)
        )
        ssdp_port = self._transport.get_extra_info("sockname")[1]
        self.gateway = Gateway(LOOPBACK, LOOPBACK, pcp_port=ssdp_port, ssdp_port=ssdp_port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._transport.close()
        await self._closed.wait()
        await self._runner.cleanup()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    async def stop_serving(self) -> None:
        """From now on it answers searches alone."""
        await self._runner.cleanup()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if not data.startswith(b"M-SEARCH"):
            return  # it knows nothing but UPnP
        self.searches += 1
        if self.answers_searches:
            location = self.location or f"http://{LOOPBACK}:{self.port}/device.xml"
            answer = f"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nLocation: {location}\r\nST: x\r\n\r\n"
            self._transport.sendto(answer.encode(), addr)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.fetched.append(request.path)
        if request.path == "/device.xml":
            return web.Response(text=self.description.format(service=self.service, control=self.control))
        if request.path == "/service.xml":
            return web.Response(text=_service_xml())
        if request.path == "/control":
            return self._act(await request.text())
        return web.Response(status=404)

    def _act(self, body: str) -> web.Response:
        named = re.search(r"<(?:\w+:)?(\w+) xmlns:\w+=[\"']urn:schemas-upnp-org:service", body)
        assert named is not None, body
        action = named[1]
        given = dict(re.findall(r"<(New\w+)>([^<]*)</New\w+>", body))
        code, told = self.errors.get(action, 0), ""
        port = int(given.get("NewExternalPort", 0))
        if not code and action == "AddPortMapping":
            if port in self.taken:
                code = 718
            elif self.only_permanent and given["NewLeaseDuration"] != "0":
                code = 725
            else:
                self.mappings[port] = given
        elif not code and action != "GetExternalIPAddress":
            if port not in self.mappings:
                code = 714
            elif action == "DeletePortMapping":
                del self.mappings[port]
            else:
                told = f"<NewInternalPort>{self.mappings[port]['NewInternalPort']}</NewInternalPort>"
        elif not code:
            told = f"<NewExternalIPAddress>{self.outer_ip}</NewExternalIPAddress>"
        if code:
            inside = (
                "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
                f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode>'
                "<errorDescription>no</errorDescription></UPnPError></detail></s:Fault>"
            )
        else:
            inside = f'<u:{action}Response xmlns:u="{self.service}">{told}</u:{action}Response>'
        text = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            f's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{inside}</s:Body></s:Envelope>'
        )
        return web.Response(text=text, content_type="text/xml", status=500 if code else 200)
