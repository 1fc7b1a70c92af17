"""Ports forwarded by PCP (RFC 6887) or its predecessor NAT-PMP (RFC 6886): one datagram to the router, one back.

A lost datagram is sent again. Answers count only if they come from the router's address and port and match the request.
So others in the network can only fake answers if they can impersonate the router anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.base.tasks import cancel_and_wait
from shoal.errors import ProtocolError
from shoal.net.tcp.stream import OwnSocket
from shoal.reach.nat.routers import Gateway, Lease, Mapper, NoMappingError, outer_address

T = TypeVar("T")

TRIES = (0.25, 0.5, 1.0)
"""Seconds to wait for the answer to each copy of a request. RFC 6886 begins with 0.25 and doubles; three are chosen."""
FAREWELL_TRIES = (0.25, 0.25)
"""The same for the last request, which is a courtesy, so that closing does not take long. Chosen."""

# The numbers of PCP are those of RFC 6887, those of NAT-PMP (the old version) of RFC 6886.
_VERSION, _OLD_VERSION = 2, 0
_ANSWER = 0x80
_ANNOUNCE, _MAP = 0, 1
_TCP = 6
_HEAD = struct.Struct(">BBHI16s")
_ANSWER_HEAD = struct.Struct(">BBBBII12x")
_MAPPING = struct.Struct(">12sB3xHH16s")
NONCE_BYTES = 12

_OLD_ADDRESS, _OLD_MAP_TCP = 0, 2
_OLD_MAPPING = struct.Struct(">BBHHHI")
_OLD_ANSWER_HEAD = struct.Struct(">BBHI")
_OLD_ANSWER_MAPPING = struct.Struct(">BBHIHHI")
_OLD_ANSWER_ADDRESS = struct.Struct(">BBHI4s")

_NOT_ALLOWED = "the router does not allow it: turn on PCP, NAT-PMP or UPnP in its settings"
RESULTS = {
    1: "it does not speak this version",
    2: _NOT_ALLOWED,
    3: "it calls the request malformed",
    4: "it cannot forward ports",
    5: "it does not know an option",
    6: "it calls an option malformed",
    7: "it has no connection to the outside at the moment",
    8: "it has no room for more ports at the moment",
    9: "it cannot forward TCP",
    10: "this machine has as many ports as it may have",
    11: "it cannot give the port or the address that was asked for",
    12: "another router is on the way to it, which translates addresses as well",
    13: "too many peers",
}
OLD_RESULTS = {1: RESULTS[1], 2: _NOT_ALLOWED, 3: RESULTS[7], 4: RESULTS[8], 5: RESULTS[4]}


class OtherVersionError(NoMappingError):
    """The router speaks another version of the protocol."""


@dataclass(frozen=True)
class Granted:
    """A router's answer; fields that an answer lacks are empty."""

    epoch: int
    """Seconds since the router last lost its mappings."""
    ip: str = ""
    port: int = 0
    seconds: int = 0


def _packed(ip: str) -> bytes:
    parsed = ipaddress.ip_address(ip.partition("%")[0])
    return parsed.packed if parsed.version == 6 else b"\0" * 10 + b"\xff\xff" + parsed.packed


def pcp_map(own_ip: str, nonce: bytes, port: int, seconds: int, outer_port: int, outer_ip: str = "") -> bytes:
    """A request for a port; 0 seconds give it back."""
    outer_ip = outer_ip or ("::" if ":" in own_ip else "0.0.0.0")
    head = _HEAD.pack(_VERSION, _MAP, 0, seconds, _packed(own_ip))
    return head + _MAPPING.pack(nonce, _TCP, port, outer_port, _packed(outer_ip))


def pcp_announce(own_ip: str) -> bytes:
    """A request that changes nothing; its answer tells the router's epoch."""
    return _HEAD.pack(_VERSION, _ANNOUNCE, 0, 0, _packed(own_ip))


def read_pcp(data: bytes, nonce: bytes | None = None, port: int = 0) -> Granted:
    """Read the answer to a request for a port; without a nonce, the answer to an announcement.

    Raises:
        NoMappingError: the router refuses.
        ProtocolError: this is not the answer.
    """
    if len(data) < 4 or not data[1] & _ANSWER:
        raise ProtocolError(f"no answer of PCP: {data[:60].hex()}")
    if data[0] != _VERSION:
        raise OtherVersionError(f"the router speaks version {data[0]} and not PCP")
    wanted = _ANNOUNCE if nonce is None else _MAP
    if len(data) < _ANSWER_HEAD.size or data[1] != _ANSWER | wanted:
        raise ProtocolError(f"the answer to another request: {data[:60].hex()}")
    _, _, _, result, seconds, epoch = _ANSWER_HEAD.unpack_from(data)
    if nonce is None:
        return Granted(epoch)  # the epoch is true, whatever the result
    granted = Granted(epoch)
    if len(data) >= _ANSWER_HEAD.size + _MAPPING.size:
        echoed, protocol, inner_port, outer_port, ip = _MAPPING.unpack_from(data, _ANSWER_HEAD.size)
        if (echoed, protocol, inner_port) != (nonce, _TCP, port):
            raise ProtocolError("the answer to the request of somebody else")
        parsed = ipaddress.IPv6Address(ip)
        granted = Granted(epoch, str(parsed.ipv4_mapped or parsed), outer_port, seconds)
    elif not result:
        raise ProtocolError(f"a port was granted without saying which: {data[:60].hex()}")
    if result:
        error = OtherVersionError if result == 1 else NoMappingError
        raise error(RESULTS.get(result, f"it refuses for reason {result}"), pause=float(seconds))
    return granted


def nat_pmp_map(port: int, seconds: int, outer_port: int) -> bytes:
    """A request for a port; 0 seconds give it back."""
    return _OLD_MAPPING.pack(_OLD_VERSION, _OLD_MAP_TCP, 0, port, outer_port, seconds)


def nat_pmp_address() -> bytes:
    """A request for the outer address."""
    return bytes([_OLD_VERSION, _OLD_ADDRESS])


def read_nat_pmp(data: bytes, port: int = 0) -> Granted:
    """Read the answer to a request for a port; without a port, the answer to the request for the outer address.

    Raises:
        NoMappingError: the router refuses.
        ProtocolError: this is not the answer.
    """
    wanted = _OLD_MAP_TCP if port else _OLD_ADDRESS
    if len(data) < _OLD_ANSWER_HEAD.size or data[1] != _ANSWER | wanted:
        raise ProtocolError(f"no answer of NAT-PMP: {data[:60].hex()}")
    version, _, result, epoch = _OLD_ANSWER_HEAD.unpack_from(data)
    if version != _OLD_VERSION:
        raise OtherVersionError(f"the router speaks version {version} and not NAT-PMP")
    if result:
        raise NoMappingError(OLD_RESULTS.get(result, f"it refuses for reason {result}"))
    layout = _OLD_ANSWER_MAPPING if port else _OLD_ANSWER_ADDRESS
    if len(data) < layout.size:
        raise ProtocolError(f"an answer that is cut off: {data[:60].hex()}")
    if not port:
        return Granted(epoch, str(ipaddress.IPv4Address(layout.unpack_from(data)[4])))
    _, _, _, _, inner_port, outer_port, seconds = layout.unpack_from(data)
    if inner_port != port:
        raise ProtocolError(f"the answer for port {inner_port}, not {port}")
    return Granted(epoch, "", outer_port, seconds)


async def ask(
    gateway: Gateway, request: Callable[[str], bytes], read: Callable[[bytes], T], tries: Sequence[float] = TRIES
) -> T:
    """Send a request until there is an answer.

    Args:
        request: makes the request, from this machine's address as the router sees it.
        read: parses an answer; it raises ``ProtocolError`` if the datagram is not the answer.

    Raises:
        NoMappingError: the router refuses, or does not answer.
    """
    with OwnSocket(socket.AF_INET6 if gateway.is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.setblocking(False)
            if gateway.is_ipv6:
                asking.bind((gateway.own_ip, 0))
            asking.connect(_place_of(gateway))  # from now on it receives datagrams only from the router
            return await _ask(asking, request(asking.getsockname()[0]), read, tries)
        except OSError as e:
            text = f"the router cannot be asked: {e.strerror or e}"
            raise NoMappingError(text, answered=False) from e


async def _ask(asking: socket.socket, datagram: bytes, read: Callable[[bytes], T], tries: Sequence[float]) -> T:
    answer = asyncio.create_task(_wait_for_answer(asking, read))
    try:
        for patience in tries:
            await asyncio.get_running_loop().sock_sendall(asking, datagram)
            await asyncio.wait([answer], timeout=patience)
            if answer.done():
                return answer.result()
    finally:
        await cancel_and_wait(answer)
    raise NoMappingError("the router does not answer", answered=False)


async def _wait_for_answer(asking: socket.socket, read: Callable[[bytes], T]) -> T:
    while True:
        datagram = await asyncio.get_running_loop().sock_recv(asking, 1100)  # the most that PCP sends
        with contextlib.suppress(ProtocolError):  # it is not the answer, which may still come
            return read(datagram)


def _place_of(gateway: Gateway) -> tuple[str, int] | tuple[str, int, int, int]:
    if not gateway.is_ipv6:
        return gateway.ip, gateway.pcp_port
    ip, _, interface = gateway.ip.partition("%")
    number = int(interface) if interface.isdigit() else socket.if_nametoindex(interface) if interface else 0
    return ip, gateway.pcp_port, 0, number


class Epoch:
    """Tells from the epochs in a router's answers whether it has lost its mappings since the last answer."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def has_restarted(self, epoch: int, now: float) -> bool:
        """Note an epoch and this machine's time, and compare them with the last ones (RFC 6887, section 8.5)."""
        last, self._last = self._last, (epoch, now)
        if last is None:
            return False
        there, here = epoch - last[0], now - last[1]
        return there < -1 or there + 2 < here - here / 16 or here + 2 < there - there / 16


class _OfDatagrams(Mapper):
    """Base class of both protocols.

    Args:
        tries: see :data:`TRIES`.
    """

    def __init__(self, gateway: Gateway, port: int, tries: Sequence[float] = TRIES) -> None:
        super().__init__(gateway, port)
        self._tries = tries
        self._epoch = Epoch()
        self._outer_ip, self._outer_port = "", port

    async def _ask(
        self,
        request: Callable[[str], bytes],
        read: Callable[[bytes], Granted],
        tries: Sequence[float] | None = None,
    ) -> tuple[Granted, bool]:
        """Send a request; returns the answer, and whether it shows that the router has restarted."""
        granted = await ask(self.gateway, request, read, tries or self._tries)
        return granted, self._epoch.has_restarted(granted.epoch, asyncio.get_running_loop().time())

    def _leased(self, ip: str, granted: Granted) -> Lease:
        address = outer_address(ip, granted.port)
        if not granted.seconds:
            raise NoMappingError("the router forwards the port for 0 seconds")
        self._outer_ip, self._outer_port = ip, granted.port
        return Lease(address, float(granted.seconds))


class Pcp(_OfDatagrams):
    """Asks by PCP, for a port of IPv4, or for a hole in the firewall of IPv6.

    Args:
        secret: the same at each start of this peer, and known to nobody else. With it, this peer can renew its mapping
            after a crash, and others cannot delete it. Without it a mapping ends with the process, or after an hour.
    """

    name = "PCP"

    def __init__(
        self, gateway: Gateway, port: int, tries: Sequence[float] = TRIES, secret: bytes | None = None
    ) -> None:
        super().__init__(gateway, port, tries)
        self._nonce = (secret or secrets.token_bytes(NONCE_BYTES))[:NONCE_BYTES].ljust(NONCE_BYTES, b"\0")

    async def ask(self, seconds: int) -> Lease:
        granted, _ = await self._ask(
            lambda own: pcp_map(own, self._nonce, self.port, seconds, self._outer_port, self._outer_ip), self._read
        )
        return self._leased(granted.ip, granted)

    async def has_forgotten(self) -> bool:
        return (await self._ask(pcp_announce, read_pcp))[1]

    async def release(self) -> None:
        await self._ask(lambda own: pcp_map(own, self._nonce, self.port, 0, 0), self._read, FAREWELL_TRIES)

    def _read(self, data: bytes) -> Granted:
        return read_pcp(data, self._nonce, self.port)


class NatPmp(_OfDatagrams):
    """Asks by NAT-PMP, which knows IPv4 alone."""

    name = "NAT-PMP"

    async def ask(self, seconds: int) -> Lease:
        # The address first: a router that has none, or does not answer, is not asked for a port.
        address, _ = await self._ask(lambda _: nat_pmp_address(), read_nat_pmp)
        granted, _ = await self._ask(lambda _: nat_pmp_map(self.port, seconds, self._outer_port), self._read)
        return self._leased(address.ip, granted)

    async def has_forgotten(self) -> bool:
        address, has_restarted = await self._ask(lambda _: nat_pmp_address(), read_nat_pmp)
        return has_restarted or address.ip != self._outer_ip

    async def release(self) -> None:
        await self._ask(lambda _: nat_pmp_map(self.port, 0, 0), self._read, FAREWELL_TRIES)

    def _read(self, data: bytes) -> Granted:
        return read_nat_pmp(data, self.port)
