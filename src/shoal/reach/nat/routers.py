"""The router of the local network: how to find it, and the interface for asking it for a port.

A router at home translates the addresses of its network, so nobody outside can call a peer there. Many routers forward
a port if a machine inside asks for it, in one of several protocols: each is a :class:`Mapper`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shoal.errors import P2PDaemonError
from shoal.net.own_addresses import source_of_default_route
from shoal.peers.multiaddr import Multiaddr

PCP_PORT = 5351
"""The port on which routers listen for PCP and NAT-PMP (RFC 6887, RFC 6886)."""


class NoMappingError(P2PDaemonError):
    """The router forwards no port in this way.

    Args:
        answered: whether the router has answered, so that this is a refusal.
        pause: seconds for which the router asks to be left alone.
    """

    def __init__(self, text: str, *, answered: bool = True, pause: float = 0.0) -> None:
        super().__init__(text)
        self.answered, self.pause = answered, pause


@dataclass(frozen=True)
class Gateway:
    """The router through which this machine sends to the outside."""

    ip: str
    """Its address; a link-local one has the name or number of the interface after a ``%``."""
    own_ip: str
    """This machine's address, as the router sees it."""
    pcp_port: int = PCP_PORT
    ssdp_port: int = 1900
    """Its port for UPnP searches."""

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.ip


@dataclass(frozen=True)
class Lease:
    """A port that the router forwards."""

    address: Multiaddr
    """The outer address. It proves nothing: the router may be behind another one."""
    seconds: float


class Mapper(ABC):
    """Asks one router for one port of this machine, in one protocol, one request at a time.

    Args:
        gateway: the router.
        port: the TCP port of this machine to forward to.
    """

    name: ClassVar[str]

    def __init__(self, gateway: Gateway, port: int) -> None:
        self.gateway, self.port = gateway, port

    @abstractmethod
    async def ask(self, seconds: int) -> Lease:
        """Ask for the port, or for more time.

        Raises:
            NoMappingError: there is no answer, or the router refuses; the text says why.
        """

    @abstractmethod
    async def has_forgotten(self) -> bool:
        """Whether the router has restarted, or got another outer address, since the last request.

        Raises:
            NoMappingError: it does not say.
        """

    @abstractmethod
    async def release(self) -> None:
        """Give the port back.

        Raises:
            NoMappingError: the router does not confirm it.
        """


def outer_address(ip: str, port: int) -> Multiaddr:
    """The outer address that a router reports, as a multiaddr.

    Raises:
        NoMappingError: nobody can be called there.
    """
    try:
        parsed = ipaddress.ip_address(ip)
    except ValueError:
        raise NoMappingError(f"the router reports an invalid outer address: {ip[:50]!r}") from None
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    is_place = not (parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local or parsed.is_loopback)
    if not is_place or parsed.is_reserved or not port:
        raise NoMappingError(f"the router reports an outer address where nobody can be called: {parsed}, port {port}")
    return Multiaddr(f"/ip{parsed.version}/{parsed}/tcp/{port}")


def is_private(ip: str) -> bool:
    """Whether an address is private, so that others outside cannot call it."""
    parsed = ipaddress.ip_address(ip)
    return not (parsed.is_global or parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def find_gateways() -> list[Gateway]:
    """Routers that may be asked for a port: at most one for IPv4 and one for IPv6. It blocks.

    For IPv4 both sides of the link must be private: otherwise nothing is translated. For IPv6 nothing is translated,
    but the router lets nobody in unless asked.
    """
    found: list[Gateway] = []
    ip = gateway_of(socket.AF_INET)
    if ip is not None and is_private(ip):
        own_ip = source_towards(ip)
        if own_ip is not None and is_private(own_ip):
            found.append(Gateway(ip, own_ip))
    ip = gateway_of(socket.AF_INET6)
    if ip is not None:
        # The router's address is link-local, but the request must come from the address to open.
        own_ip = source_of_default_route(socket.AF_INET6)
        if own_ip is not None and ipaddress.ip_address(own_ip).is_global:
            found.append(Gateway(ip, own_ip))
    return found


def source_towards(ip: str) -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            probe.connect((ip, PCP_PORT))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def gateway_of(family: socket.AddressFamily) -> str | None:
    """The next hop of the default route; ``None`` if there is none, or the system does not tell."""
    if sys.platform == "win32":
        return gateway_of_windows(family)
    tables = Path("/proc/net/route"), Path("/proc/net/ipv6_route")
    if tables[0].exists():
        is_ipv6 = family == socket.AF_INET6
        if not tables[is_ipv6].exists():
            return None
        text = tables[is_ipv6].read_text(encoding="ascii", errors="replace")
        return gateway_in_ipv6_route(text) if is_ipv6 else gateway_in_route(text)
    version = ["-inet6"] if family == socket.AF_INET6 else []
    try:
        told = subprocess.run(
            ["route", "-n", "get", *version, "default"],
            capture_output=True,
            text=True,
            timeout=5.0,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return gateway_in_route_command(told)


_RTF_UP, _RTF_GATEWAY = 1, 2  # of linux/route.h


def gateway_in_route(text: str) -> str | None:
    """The router in ``/proc/net/route`` of Linux."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines()[1:]:
        words = line.split()
        try:
            target, hop, flags, mask = (int(words[i], 16) for i in (1, 2, 3, 7))
            metric = int(words[6])
        except (IndexError, ValueError):
            continue
        if not target and not mask and hop and flags & _RTF_UP and flags & _RTF_GATEWAY:
            found.append((metric, socket.inet_ntoa(struct.pack("=I", hop & 0xFFFFFFFF))))
    return min(found)[1] if found else None


def gateway_in_ipv6_route(text: str) -> str | None:
    """The router in ``/proc/net/ipv6_route`` of Linux."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        words = line.split()
        try:
            target, bits, hop, metric, flags = (int(words[i], 16) for i in (0, 1, 4, 5, 8))
            interface = words[9]
        except (IndexError, ValueError):
            continue
        if not target and not bits and 0 < hop < 2**128 and flags & _RTF_UP and flags & _RTF_GATEWAY:
            found.append((metric, _with_interface(ipaddress.IPv6Address(hop), interface)))
    return min(found)[1] if found else None


def gateway_in_route_command(text: str) -> str | None:
    """The router in what ``route -n get default`` of macOS prints."""
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    try:
        parsed = ipaddress.ip_address(told.get("gateway", "").partition("%")[0])
    except ValueError:
        return None  # none, or a link without a router
    return str(parsed) if parsed.version == 4 else _with_interface(parsed, told.get("interface", ""))


def _with_interface(ip: ipaddress.IPv6Address, interface: str) -> str:
    return f"{ip}%{interface}" if ip.is_link_local else str(ip)


_SOCKADDR_BYTES = 28  # a SOCKADDR_INET of Windows
_WINDOWS_AF_INET, _WINDOWS_AF_INET6 = 2, 23


def gateway_of_windows(family: socket.AddressFamily, get_best_route: Callable[..., int] | None = None) -> str | None:
    """The router according to ``GetBestRoute2`` of Windows."""
    if get_best_route is None:
        load: Any = getattr(ctypes, "WinDLL", None)
        if load is None:
            return None  # only Python for Windows can ask it
        get_best_route = load("iphlpapi").GetBestRoute2
    if family == socket.AF_INET:
        target = struct.pack("=HH4s", _WINDOWS_AF_INET, 0, socket.inet_aton("8.8.8.8"))
    else:
        far = ipaddress.IPv6Address("2001:4860:4860::8888").packed
        target = struct.pack("=HHI16sI", _WINDOWS_AF_INET6, 0, 0, far, 0)
    to = ctypes.create_string_buffer(target.ljust(_SOCKADDR_BYTES, b"\0"), _SOCKADDR_BYTES)
    row = ctypes.create_string_buffer(104)  # a MIB_IPFORWARD_ROW2: the interface is at 8, the next hop at 44
    source = ctypes.create_string_buffer(_SOCKADDR_BYTES)
    if get_best_route(None, 0, None, ctypes.byref(to), 0, ctypes.byref(row), ctypes.byref(source)):
        return None
    (interface,) = struct.unpack_from("=I", row, 8)
    hop = row.raw[44 : 44 + _SOCKADDR_BYTES]
    (kind,) = struct.unpack_from("=H", hop)
    if kind == _WINDOWS_AF_INET and family == socket.AF_INET:
        ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv4Address(hop[4:8])
    elif kind == _WINDOWS_AF_INET6 and family == socket.AF_INET6:
        ip = ipaddress.IPv6Address(hop[8:24])
    else:
        return None
    if ip.is_unspecified:
        return None  # a link without a router
    return str(ip) if isinstance(ip, ipaddress.IPv4Address) else _with_interface(ip, str(interface))
