"""Connections through proxies: which ones, how the environment names them, and what is said if they refuse."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shoal.errors import DialError, RefusedDialError
from shoal.net.tcp.connect import Proxies, Proxy, ProxyError, connect_through
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Header
from shoal.p2p import P2P, Multiaddr, P2PContext, PeerID, ServicerBase
from shoal.peers.identity import Identity
from tests.net.small_proxy import SmallProxy

OUTSIDE = "seed.example.org"
"""A name that only the proxy can look up."""


class Number(Header):
    value: int


class Echo(ServicerBase):
    async def rpc_echo(self, request: Number, context: P2PContext) -> Number:
        return request


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"HTTPS_PROXY": ""}, None),
        ({"HTTP_PROXY": "http://proxy:3128"}, None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128 (HTTPS_PROXY)"),
        ({"https_proxy": "http://proxy:3128/"}, "http://proxy:3128 (https_proxy)"),
        ({"https_proxy": "http://lower:1", "HTTPS_PROXY": "http://upper:1"}, "http://lower:1 (https_proxy)"),
        ({"ALL_PROXY": "socks5://proxy"}, "socks5://proxy:1080 (ALL_PROXY)"),
        ({"all_proxy": "socks5h://[2001:db8::1]:9"}, "socks5h://[2001:db8::1]:9 (all_proxy)"),
        ({"ALL_PROXY": "socks5://a", "HTTPS_PROXY": "b"}, "http://b:80 (HTTPS_PROXY)"),
        ({"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128 (HTTPS_PROXY)"),
        ({"HTTPS_PROXY": "http://user:se%40cret@proxy:3128"}, "http://proxy:3128 (HTTPS_PROXY)"),
        ({"SHOAL_PROXY": "socks5://a", "HTTPS_PROXY": "http://b"}, "socks5://a:1080 (SHOAL_PROXY)"),
        ({"SHOAL_PROXY": "off", "HTTPS_PROXY": "http://b"}, None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "example.com, *"}, None),
    ],
)
def test_the_environment_names_the_proxy(environment: dict[str, str], found: str | None) -> None:
    proxy = Proxies.of_environment(environment).for_host("1.1.1.1", 443)
    assert (None if proxy is None else str(proxy)) == found
    if proxy is not None and "secret" in str(environment):
        assert (proxy.user, proxy.password) == ("user", "se@cret")
        assert "cret" not in repr(proxy)


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("https://proxy:3128", "without TLS"),
        ("ftp://proxy", "'ftp' is no kind of proxy that shoal knows"),
        ("socks4://user:secret@proxy", "'socks4' is no kind"),
        ("http://proxy:a", "[Pp]ort"),
        ("http://proxy:0", "a port is a number from 1 to 65535"),
        ("http://user:secret@proxy:99999", "the port is a number up to 65535, and special characters"),
        ("user:secret@proxy:a", "special characters"),
        ("http://user:a@secret@proxy:a", "special characters"),
        ("http://user:secret/a@proxy:3128", "special characters"),
        ("http://", "there is no host in it"),
        ("http://[::1", "IPv6"),
        (f"socks5://{'a' * 256}:secret@proxy", "longer than 255 bytes"),
    ],
)
def test_a_value_that_cannot_be_used_is_an_error_that_keeps_the_password(value: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"HTTPS_PROXY must be like http://HOST:PORT or .*{wrong}") as error:
        Proxies.of_environment({"HTTPS_PROXY": value})
    assert "secret" not in str(error.value)


async def test_a_peer_does_not_start_with_such_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://proxy")
    with pytest.raises(ValueError, match="ALL_PROXY must be like"):
        await P2P.create()


LOCAL = [
    "127.0.0.1",
    "::1",
    "10.1.2.3",
    "192.168.1.2",
    "172.16.0.1",
    "169.254.1.1",
    "100.64.0.1",
    "fe80::1%eth0",
    "fd00::1",
]
LOCAL_NAMES = ["localhost", "a.localhost", "printer", "printer.local."]


@pytest.mark.parametrize("host", [*LOCAL, *LOCAL_NAMES])
def test_what_is_in_the_own_network_goes_directly(host: str) -> None:
    assert Proxies(Proxy("http", "proxy", 1)).for_host(host, 4001) is None


@pytest.mark.parametrize(
    ("exceptions", "host", "is_direct"),
    [
        ("", "1.1.1.1", False),
        ("1.1.1.1", "1.1.1.1", True),
        ("1.1.1.2 1.1.1.1", "1.1.1.1", True),
        ("1.1.1.0/24", "1.1.1.1", True),
        ("1.1.2.0/24", "1.1.1.1", False),
        ("1.1.1.0/24", "host.example.org", False),
        ("2606:4700::/32", "2606:4700::1111", True),
        ("[2606:4700::1111]", "2606:4700:0::1111", True),
        ("1.1.1.1:4001", "1.1.1.1", True),
        ("1.1.1.1:4002", "1.1.1.1", False),
        ("example.org", "example.org", True),
        ("example.org", "Host.Example.org", True),
        (".example.org", "host.example.org", True),
        ("*.example.org", "host.example.org", True),
        ("example.org:4001", "host.example.org", True),
        ("example.org:1", "host.example.org", False),
        ("example.org", "bad-example.org", False),
        ("nonsense/x,,", "1.1.1.1", False),
    ],
)
def test_exceptions(exceptions: str, host: str, is_direct: bool) -> None:
    proxies = Proxies.of_environment({"https_proxy": "http://proxy", "no_proxy": exceptions})
    assert (proxies.for_host(host, 4001) is None) == is_direct


# --- connections ------------------------------------------------------------------------------------------------------


def proxies_at(proxy: SmallProxy, scheme: str, *, user: str = "", password: str = "") -> Proxies:
    return Proxies(Proxy(scheme, "127.0.0.1", proxy.port, user, password, "ALL_PROXY"))


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize("user", ["", "user"])
@pytest.mark.parametrize("scheme", ["http", "socks5", "socks5h"])
async def test_a_peer_calls_another_one_through_a_proxy(scheme: str, user: str, piece: int) -> None:
    server = await P2P.create()
    await Echo().add_p2p_handlers(server)
    [address] = await server.get_visible_maddrs()
    port, secret = int(str(address["tcp"])), "päss:w@rd" if user else ""
    async with SmallProxy(names={OUTSIDE: "127.0.0.1"}, user=user, password=secret, piece=piece) as proxy:
        transport = TcpTransport(Identity.generate(), proxies=proxies_at(proxy, scheme, user=user, password=secret))
        there = f"/dns4/{OUTSIDE}/tcp/{port}/p2p/{server.peer_id}"
        client = await P2P.create([there], transport=transport, client_mode=True)
        try:
            client.address_book.add(server.peer_id, [f"/dns4/{OUTSIDE}/tcp/{port}"])
            for value in range(3):
                assert (await Echo.get_stub(client, server.peer_id).rpc_echo(Number(value=value))).value == value
            [stream, *_] = client.pool.streams_to(server.peer_id)
            assert str(stream.remote_address) in (f"/dns4/{OUTSIDE}/tcp/{port}", f"/ip4/127.0.0.1/tcp/{port}")
            assert (OUTSIDE, port) in proxy.asked
        finally:
            await client.shutdown()
            await server.shutdown()


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_sessions_of_relays_go_through_it_too(scheme: str) -> None:
    listening = TcpTransport(Identity.generate())
    [address] = await listening.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), lambda stream: None)
    async with SmallProxy(names={OUTSIDE: "127.0.0.1"}) as proxy:
        dialling = TcpTransport(Identity.generate(), proxies=proxies_at(proxy, scheme))
        there = Multiaddr(f"/dns4/{OUTSIDE}/tcp/{address['tcp']}")
        expected = listening.expect_session(bytes(32))
        session = await dialling.open_session(there, bytes(32), punchable=True)
        other = await expected
        await session.write(b"hello")
        assert await other.read_exactly(5) == b"hello"
        assert session.remote_address == there
        assert not session.is_punchable
        assert dialling.is_proxied
        session.abort()
        other.abort()
        await dialling.close()
    await listening.close()


@pytest.mark.parametrize(
    ("scheme", "options", "wrong"),
    [
        ("http", {"ports": {443}}, r"does not connect to seed.example.org:4001 \(HTTP/1.1 403 Forbidden\).*port 443"),
        ("socks5", {"ports": {443}}, "does not connect to seed.example.org, port 4001: its rules do not allow it"),
        ("http", {"user": "other"}, r"does not accept this user and password \(HTTP/1.1 407"),
        ("socks5", {"user": "other"}, "does not accept this user and password"),
        ("http", {}, r"cannot reach seed.example.org:4001 \(HTTP/1.1 503"),
        ("http", {"answer": b"SSH-2.0-OpenSSH_9.2\r\n\r\n"}, "does not speak HTTP: 'SSH-2.0-OpenSSH_9.2'"),
        ("http", {"answer": b"HTTP/1.1 200 OK\r\n" + b"a" * 20000}, "an answer that does not end"),
        ("http", {"answer": b""}, "has closed the connection instead of an answer"),
        ("socks5", {"answer": b"HTTP/1.1 400 Bad Request\r\n\r\n"}, "does not speak SOCKS5: is it an HTTP proxy"),
        ("socks5", {"answer": b"\x05"}, "has closed the connection instead of an answer"),
        ("socks5", {"answer": b"\x05\x00\x05\x09\x00\x01"}, "does not connect to .*: error 9"),
    ],
)
async def test_what_a_proxy_refuses_is_said_with_what_to_do(
    scheme: str, options: dict[str, object], wrong: str
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with SmallProxy(names={OUTSIDE: "127.0.0.1"}, piece=100000, **options) as proxy:
            proxies = proxies_at(proxy, scheme, user="user", password="secret")
            transport = TcpTransport(Identity.generate(), proxies=proxies)
            if "cannot reach" in wrong:
                port = unused.getsockname()[1]
                wrong = wrong.replace("4001", str(port))
            else:
                port = 4001
            address = Multiaddr(f"/dns4/{OUTSIDE}/tcp/{port}")
            with pytest.raises(DialError, match=wrong) as error:
                await transport.dial(address, PeerID(bytes(34)))
            assert f"{address}: the proxy {scheme}://127.0.0.1:{proxy.port} (ALL_PROXY)" in str(error.value)
            assert "secret" not in str(error.value)
            assert not isinstance(error.value, RefusedDialError), "the peer may well be there"


@pytest.mark.parametrize(
    ("scheme", "wrong"), [("http", r"\(HTTP/1.1 407.*write http://USER"), ("socks5", "write socks5://USER")]
)
async def test_a_proxy_that_wants_a_password(scheme: str, wrong: str) -> None:
    async with SmallProxy(user="user") as proxy:
        for_outside = proxies_at(proxy, scheme).proxy
        assert for_outside is not None
        with pytest.raises(ProxyError, match=f"wants a user and a password.*{wrong}"):
            await connect_through(for_outside, OUTSIDE, 4001)


async def test_a_proxy_that_is_not_there_is_not_a_peer_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = Proxy("http", "127.0.0.1", unused.getsockname()[1], variable="HTTPS_PROXY")
        transport = TcpTransport(Identity.generate(), proxies=Proxies(proxy))
        with pytest.raises(
            DialError, match=r"the proxy http://127.0.0.1:\d+ \(HTTPS_PROXY\) cannot be reached"
        ) as error:
            await transport.dial(Multiaddr(f"/dns4/{OUTSIDE}/tcp/1"), PeerID(bytes(34)))
        assert not isinstance(error.value, RefusedDialError)


async def test_a_port_where_nobody_listens_is_refused_by_a_socks_proxy_as_well() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with SmallProxy(names={OUTSIDE: "127.0.0.1"}) as proxy:
            transport = TcpTransport(Identity.generate(), proxies=proxies_at(proxy, "socks5"))
            with pytest.raises(RefusedDialError):
                await transport.dial(Multiaddr(f"/dns4/{OUTSIDE}/tcp/{unused.getsockname()[1]}"), PeerID(bytes(34)))


async def test_a_name_that_cannot_exist_is_a_failed_dial() -> None:
    """Others announce names, which may be anything."""
    async with SmallProxy() as proxy:
        transport = TcpTransport(Identity.generate(), proxies=proxies_at(proxy, "socks5"))
        with pytest.raises(DialError):
            await transport.dial(Multiaddr(f"/dns4/{'ü' * 60}.example.org/tcp/1"), PeerID(bytes(34)))


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_a_dial_that_is_given_up_leaves_nothing(scheme: str) -> None:
    never = asyncio.Event()
    accepted: list[asyncio.StreamWriter] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        never.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    proxy = Proxy(scheme, "127.0.0.1", server.sockets[0].getsockname()[1])
    dial = asyncio.ensure_future(connect_through(proxy, OUTSIDE, 1))
    await never.wait()
    dial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dial
    [writer] = accepted
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
