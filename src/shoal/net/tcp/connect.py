"""Connecting to hosts by TCP, directly or through a proxy.

A host may have several addresses, some of which lead nowhere. They are tried as in RFC 8305: the IP versions take
turns, each attempt starts a little later than the one before, and the first address that answers wins. So an address
that answers late (Windows takes two seconds to refuse a port) or never delays the others only for a moment.

Some computers reach the internet only through a proxy. The usual environment variables name it: ``HTTPS_PROXY`` or
``ALL_PROXY``, and ``NO_PROXY`` for hosts to reach directly. It speaks HTTP CONNECT or SOCKS5. Both take a few lines, so
no extra package is needed. Private addresses, such as 192.168.1.2, never go through it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import ipaddress
import itertools
import os
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote, urlsplit

from shoal.base.logs import one_line
from shoal.net.tcp.stream import WRITE_HIGH_WATER, OwnSocket

# Seconds until the next address of a host is tried in parallel with those that have not answered yet (RFC 8305).
CONNECT_STAGGER = 0.25
# Chosen: a host that vanishes silently is noticed after a minute (20 + 4 * 10 seconds), even while nobody writes.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}

_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

AddressInfo = tuple[int, int, int, str, "tuple[str | int, ...]"]


def family_of(kind: str) -> socket.AddressFamily:
    """The IP version that a part of a multiaddr, such as ``dns4``, asks for."""
    return _FAMILIES.get(kind, socket.AF_UNSPEC)


async def connect(
    host: str,
    port: int,
    family: socket.AddressFamily,
    prepare: Callable[[socket.socket], object] | None = None,
    judge: Callable[[str], bool] | None = None,
) -> socket.socket:
    """Connect a socket to the first address of a host that answers.

    Args:
        prepare: called with each socket before it connects, for example to bind it.
        judge: says whether to connect to an IP address.

    Raises:
        OSError: no address answers; it is the error of the address that was tried first.
    """
    found = await _resolve(host, port, family)
    waiting = in_turn([each for each in found if judge is None or judge(str(each[4][0]))])
    if not waiting:
        raise OSError(errno.EPERM, "it leads into a private network, and that peer is seen elsewhere")
    attempts: dict[asyncio.Task[socket.socket], None] = {}
    pending: set[asyncio.Task[socket.socket]] = set()
    try:
        while waiting or pending:
            if waiting:
                attempt = asyncio.get_running_loop().create_task(_connect_to(waiting.pop(0), prepare))
                attempts[attempt] = None
                pending.add(attempt)
            done, pending = await asyncio.wait(
                pending, timeout=CONNECT_STAGGER if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                if not attempt.cancelled() and attempt.exception() is None:
                    del attempts[attempt]
                    return attempt.result()
        errors = [error for attempt in attempts if isinstance(error := attempt.exception(), OSError)]
        raise errors[0]
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_close_late)
            attempt.cancel()


def in_turn(found: Sequence[AddressInfo]) -> list[AddressInfo]:
    """Addresses in the order to try them: the system's order, but with the IP versions taking turns."""
    families = list(dict.fromkeys(each[0] for each in found))
    queues = [[each for each in found if each[0] == family] for family in families]
    return [each for row in itertools.zip_longest(*queues) for each in row if each is not None]


async def _connect_to(info: AddressInfo, prepare: Callable[[socket.socket], object] | None) -> socket.socket:
    family, kind, protocol, _, address = info
    connecting = OwnSocket(family, kind, protocol)
    try:
        connecting.setblocking(False)
        set_options(connecting)
        if prepare is not None:
            prepare(connecting)
        await asyncio.get_running_loop().sock_connect(connecting, address)
        hurry_within_host(connecting)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _close_late(attempt: asyncio.Task[socket.socket]) -> None:
    """Close a late success: another address was faster, or nobody waits any more."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


async def _resolve(host: str, port: int, family: socket.AddressFamily) -> list[AddressInfo]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except UnicodeError as e:  # not a valid domain name
        raise socket.gaierror(socket.EAI_NONAME, str(e)) from e
    return cast("list[AddressInfo]", found)


def set_options(connection: socket.socket) -> None:
    """Send small messages at once, keep the unsent backlog short, and notice hosts that vanish."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_HIGH_WATER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # each system offers its own subset
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hurry_within_host(connection: socket.socket) -> None:
    """Switch off pacing within this host: it protects networks, and here it would only cost a quarter of the time."""
    with contextlib.suppress(OSError):  # the connection is over already, or the system has no such option
        if hasattr(socket, "TCP_CONGESTION") and connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def share_port(unbound: socket.socket) -> None:
    """Let other sockets of this process have the same local port, as those of a punch do.

    On Windows ``SO_REUSEADDR`` is enough, and ``SO_REUSEPORT`` does not exist. It would let any program take the port,
    so it is only for ports that live for seconds.
    """
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def bind_to_shared_port(unbound: socket.socket, port: int = 0) -> None:
    """Bind a socket to a port on all networks, by default a fresh one, which others of this process can share."""
    share_port(unbound)
    if unbound.family == socket.AF_INET6:  # IPv4 has sockets of its own
        unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    unbound.bind(("", port))


# --- proxies ----------------------------------------------------------------------------------------------------------

VARIABLES = ("SHOAL_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
"""Variables that may name a proxy; the first one that is set and not empty counts, as in curl and Python."""
EXCEPTIONS = ("no_proxy", "NO_PROXY")
NONE = "off"
"""As the value of ``SHOAL_PROXY``: no proxy, whatever the other variables say."""

DEFAULT_PORTS = {"http": 80, "socks5": 1080, "socks5h": 1080}
MAX_REPLY_BYTES = 2**14  # chosen: several times what proxies send
MAX_TEXT_BYTES = 255  # of a name or password in SOCKS5, by RFC 1929

_SOCKS_ERRORS = {
    1: "it has failed",
    2: "its rules do not allow it",
    3: "the network cannot be reached from there",
    4: "that host cannot be reached from there",
    6: "it has given up waiting",
    7: "it does not know this command",
    8: "it does not know this kind of address",
}
_NO_SUCH_PORT = 5
# Methods of SOCKS5 (RFC 1928): user name and password; none of those offered.
_BY_NAME, _NOBODY = 2, 0xFF


class ProxyError(OSError):
    """A proxy cannot be reached, or does not connect."""


@dataclass(frozen=True)
class Proxy:
    """A proxy, as an environment variable names it."""

    scheme: str
    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)
    variable: str = ""
    """The name of that variable."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port} ({self.variable})"

    @classmethod
    def parse(cls, text: str, variable: str) -> Proxy:
        """Read the value of a variable.

        Raises:
            ValueError: it names no proxy that can be used here.
        """
        told = re.sub(r"^(\w+://)?.*@", r"\1…@", text, flags=re.DOTALL)  # without the password
        wanted = f"{variable} must be like http://HOST:PORT or socks5://USER:PASSWORD@HOST:PORT, got {told!r}"
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as e:
            # If the password has a slash, the reason may repeat the beginning of it.
            hint = "the port is a number up to 65535, and special characters of a password are written as %XX"
            reason = hint if "@" in text else str(e)
            raise ValueError(f"{wanted}: {reason}") from None
        if parts.scheme == "https":
            raise ValueError(
                f"{wanted}: proxies are spoken to without TLS. What goes through them is encrypted in any case, so "
                "write http:// if the proxy takes that, too"
            )
        if parts.scheme not in DEFAULT_PORTS:
            raise ValueError(f"{wanted}: {parts.scheme!r} is no kind of proxy that shoal knows")
        if not host:
            raise ValueError(f"{wanted}: there is no host in it")
        if port == 0:
            raise ValueError(f"{wanted}: a port is a number from 1 to 65535")
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if max(len(user.encode()), len(password.encode())) > MAX_TEXT_BYTES:
            raise ValueError(f"{wanted}: its user name or password is longer than {MAX_TEXT_BYTES} bytes")
        return cls(parts.scheme, host, DEFAULT_PORTS[parts.scheme] if port is None else port, user, password, variable)


class Proxies:
    """Decides which connections go through the proxy.

    Args:
        proxy: for hosts outside this network; ``None`` = connect directly to all.
        exceptions: hosts to reach directly all the same, in the form of ``NO_PROXY``, separated by commas: addresses,
            networks such as ``1.2.0.0/16``, or names, which also match their subdomains; each may have a port. ``*`` =
            all hosts.
    """

    def __init__(self, proxy: Proxy | None = None, exceptions: str = "") -> None:
        words = [word.strip().lower() for word in re.split(r"[,\s]+", exceptions) if word.strip()]
        self.proxy = None if "*" in words else proxy
        self.exceptions = [] if self.proxy is None else words

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Proxies:
        """Read the environment variables.

        Raises:
            ValueError: one of them is malformed.
        """
        variable = next((name for name in VARIABLES if environment.get(name)), "")
        text = environment.get(variable, "").strip()
        exceptions = next((environment[name] for name in EXCEPTIONS if environment.get(name)), "")
        proxy = Proxy.parse(text, variable) if text and text.lower() != NONE else None
        return cls(proxy, exceptions)

    def for_host(self, host: str, port: int) -> Proxy | None:
        """The proxy through which to reach a host; ``None`` = directly."""
        if self.proxy is None or _is_local(host) or any(_matches(each, host, port) for each in self.exceptions):
            return None
        return self.proxy


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0].strip("[]"))
    except ValueError:
        return None


def _is_local(host: str) -> bool:
    """Whether a host is valid only in one network, of which the proxy may not be part."""
    ip, name = _ip(host), host.rstrip(".").lower()
    return not ip.is_global if ip is not None else "." not in name or name.endswith((".local", ".localhost"))


def _matches(exception: str, host: str, port: int) -> bool:
    """Whether an entry of ``NO_PROXY`` matches a host."""
    ip = _ip(host)
    if "/" in exception:
        try:
            return ip is not None and ip in ipaddress.ip_network(exception, strict=False)
        except ValueError:
            return False  # curl ignores such an entry, too
    name, colon, its_port = exception.rpartition(":")
    if colon and its_port.isdigit() and _ip(exception) is None:
        if int(its_port) != port:
            return False
        exception = name
    if ip is not None:
        return _ip(exception) == ip
    exception, host = exception.lstrip("*").strip("."), host.rstrip(".").lower()
    return host == exception or host.endswith(f".{exception}")


async def connect_through(proxy: Proxy, host: str, port: int) -> socket.socket:
    """A socket that a proxy has connected to a host.

    Raises:
        ProxyError: the proxy cannot be reached, or does not connect.
        ConnectionRefusedError: it says that nothing listens there.
    """
    try:
        connected = await connect(proxy.host, proxy.port, socket.AF_UNSPEC)
    except OSError as e:
        raise ProxyError(f"the proxy {proxy} cannot be reached: {e.strerror or e}") from e
    try:
        ask = _ask_by_http if proxy.scheme == "http" else _ask_by_socks
        await ask(_Talk(connected, proxy), host, port)
    except BaseException:
        connected.close()
        raise
    return connected


class _Talk:
    """The exchange with a proxy before it connects."""

    def __init__(self, connected: socket.socket, proxy: Proxy) -> None:
        self.proxy = proxy
        self._loop, self._socket = asyncio.get_running_loop(), connected

    def error(self, what: str) -> ProxyError:
        return ProxyError(f"the proxy {self.proxy} {what}")

    async def _do(self, work: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        try:
            return await work()
        except OSError as e:
            raise self.error(f"has broken the connection: {e.strerror or e}") from e

    async def write(self, data: bytes) -> None:
        await self._do(lambda: self._loop.sock_sendall(self._socket, data))

    async def read_some(self, most: int) -> bytes:
        arrived = await self._do(lambda: self._loop.sock_recv(self._socket, most))
        if not arrived:
            raise self.error("has closed the connection instead of an answer")
        return arrived

    async def read_exactly(self, size: int) -> bytes:
        arrived = b""
        while len(arrived) < size:
            arrived += await self.read_some(size - len(arrived))
        return arrived


async def _ask_by_http(talk: _Talk, host: str, port: int) -> None:
    proxy, target = talk.proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.user:
        secret = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {secret}")
    await talk.write("\r\n".join([*lines, "", ""]).encode())
    reply = b""
    # Nothing but the reply can come: on each connection, this side speaks first.
    while b"\r\n\r\n" not in reply:
        if len(reply) > MAX_REPLY_BYTES:
            raise talk.error("gives an answer that does not end: is it a proxy?")
        reply += await talk.read_some(MAX_REPLY_BYTES)
    line = reply.split(b"\r\n", 1)[0].decode("latin-1")
    status = re.match(r"HTTP/1\.\d (\d{3})(?: |$)", line)
    if status is None:
        raise talk.error(f"does not speak HTTP: {one_line(line[:100])!r}")
    code, said = int(status[1]), one_line(line[:100])
    if code == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        raise talk.error(
            f"does not accept this user and password ({said})"
            if proxy.user
            else f"wants a user and a password ({said}): write http://USER:PASSWORD@{proxy.host}:{proxy.port}"
        )
    if code in (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT):
        raise talk.error(f"cannot reach {target} ({said})")
    if not 200 <= code < 300:
        raise talk.error(
            f"does not connect to {target} ({said}): it may allow port 443 alone, where that peer could listen; or ask "
            "the owner of the proxy"
        )


async def _ask_by_socks(talk: _Talk, host: str, port: int) -> None:
    proxy = talk.proxy
    await talk.write(bytes([5, 2, 0, _BY_NAME] if proxy.user else [5, 1, 0]))
    version, method = await talk.read_exactly(2)
    if version != 5:
        raise talk.error("does not speak SOCKS5: is it an HTTP proxy?")
    if method == _NOBODY:
        raise talk.error(
            "does not accept this user and password"
            if proxy.user
            else f"wants a user and a password: write {proxy.scheme}://USER:PASSWORD@{proxy.host}:{proxy.port}"
        )
    if method == _BY_NAME:
        await talk.write(b"\x01" + _counted(proxy.user.encode()) + _counted(proxy.password.encode()))
        if (await talk.read_exactly(2))[1]:
            raise talk.error("does not accept this user and password")
    await talk.write(bytes([5, 1, 0]) + _socks_host(host) + struct.pack("!H", port))
    _, failure, _, kind = await talk.read_exactly(4)
    if failure == _NO_SUCH_PORT:
        raise ConnectionRefusedError(f"the proxy {proxy} says that nothing listens at {host}, port {port}")
    if failure:
        raise talk.error(f"does not connect to {host}, port {port}: {_SOCKS_ERRORS.get(failure, f'error {failure}')}")
    size = {1: 4, 4: 16}.get(kind)
    if size is None:
        size = (await talk.read_exactly(1))[0]
    await talk.read_exactly(size + 2)  # the address from which it has connected, which is of no use


def _socks_host(host: str) -> bytes:
    ip = _ip(host)
    if ip is None:
        try:
            return b"\x03" + _counted(host.encode("idna"))
        except ValueError as e:  # not a valid domain name, or too long
            raise socket.gaierror(socket.EAI_NONAME, str(e)) from e
    return (b"\x01" if ip.version == 4 else b"\x04") + ip.packed


def _counted(text: bytes) -> bytes:
    return bytes([len(text)]) + text
