"""Connections over TLS: who answers, who asks, and everything that may go wrong until both are known."""

from __future__ import annotations

import array
import asyncio
import contextlib
import datetime
import errno
import gc
import re
import socket
import ssl
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.errors import DialError, IdentityMismatchError, P2PDaemonError, StreamClosedError
from shoal.net.limits import Limits
from shoal.net.tcp import handshake as handshake_module
from shoal.net.tcp import listener as strangers_module
from shoal.net.tcp import transport as tcp_module
from shoal.net.tcp.handshake import (
    ALPN,
    CHALLENGE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    dialler_context,
    explain,
    listener_context,
    proof_message,
    with_badge,
)
from shoal.net.tcp.stream import WRITE_HIGH_WATER, TcpStream
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Stream
from shoal.p2p import Identity, Multiaddr
from tests.p2p.peers import end_of, until

pytestmark = pytest.mark.oldest

SOME_PEER = Identity.generate().peer_id
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Listening:
    """A listening transport and the streams that it has let in."""

    def __init__(self, limits: Limits | None = None) -> None:
        identity = Identity.generate()
        self.transport = TcpTransport(identity) if limits is None else TcpTransport(identity, limits=limits)
        self.peer_id = identity.peer_id
        self.dropped = self.transport.metrics.connections_dropped
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.all_streams: list[Stream] = []

    def take(self, stream: Stream) -> None:
        self.all_streams.append(stream)
        self.streams.put_nowait(stream)

    async def __aenter__(self) -> Listening:
        [self.address] = await self.transport.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), self.take)
        self.port = int(self.address["tcp"] or 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()
        for stream in self.all_streams:
            stream.abort()

    async def drop_reason(self) -> str:
        """Why the first connection was dropped."""
        await until(lambda: sum(self.dropped.values()) > 0)
        [(reason, count)] = self.dropped.items()
        assert count == 1
        return reason


async def read(stream: Stream, size: int) -> bytes:
    data = bytearray(size)
    await stream.read_exactly_into(memoryview(data))
    return bytes(data)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of a connection."""
    async with Listening() as listening:
        dialler = TcpTransport(Identity.generate())
        near = await dialler.dial(listening.address, listening.peer_id)
        far = await listening.streams.get()
        assert far.remote == dialler.identity.peer_id
        assert near.remote == listening.peer_id
        try:
            yield near, far
        finally:
            near.abort()


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_bytes_go_both_ways() -> None:
    async with pair() as (near, far):
        await near.write(b"hello", bytearray(b" "), memoryview(b"world"))
        assert await read(far, 11) == b"hello world"
        await far.write(b"x" * 100_000)
        assert await read(near, 1) == b"x"
        assert await read(near, 99_999) == b"x" * 99_999
        await near.write(b"")
        await near.write()
        assert await read(far, 0) == b""


async def test_both_ends_know_the_address_of_the_other() -> None:
    async with pair() as (near, far):
        assert near.remote_address is not None
        assert far.remote_address is not None
        assert near.remote_address["ip4"] == far.remote_address["ip4"] == "127.0.0.1"


@pytest.mark.parametrize("end", ["near", "far"])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_end_of_a_connection_is_seen_on_both_sides(end: str, how: str) -> None:
    async with pair() as (near, far):
        first, second = (near, far) if end == "near" else (far, near)
        ended = asyncio.Event()
        second.on_closed(ended.set)
        reading = asyncio.ensure_future(read(second, 1))
        await asyncio.sleep(0)
        getattr(first, how)()
        getattr(first, how)()
        assert first.closed
        assert isinstance(await end_of(reading), StreamClosedError)
        await asyncio.wait_for(ended.wait(), 5)
        assert second.closed
        for stream in (first, second):
            with pytest.raises(StreamClosedError):
                await stream.write(b"x")
            with pytest.raises(StreamClosedError):
                await read(stream, 1)


async def test_closing_delivers_what_was_written() -> None:
    async with pair() as (near, far):
        data = bytes(range(256)) * 4000
        await near.write(data)
        near.close()
        assert await read(far, len(data)) == data


async def test_what_has_arrived_can_be_read_after_the_end() -> None:
    async with pair() as (near, far):
        await near.write(b"last words")
        assert await read(far, 5) == b"last "
        near.close()
        await until(lambda: far.closed)
        assert await read(far, 5) == b"words"
        with pytest.raises(StreamClosedError, match="the other side closed"):
            await read(far, 1)


async def test_close_callback() -> None:
    """Called once, the last one counts, and at once for a connection that has ended."""
    async with pair() as (near, far):
        calls: list[str] = []
        far.on_closed(lambda: calls.append("replaced"))
        far.on_closed(lambda: calls.append("called"))
        near.abort()
        await until(lambda: far.closed)
        assert calls == ["called"]
        far.on_closed(lambda: calls.append("late"))
        assert calls == ["called"], "never from inside on_closed itself"
        await asyncio.sleep(0)
        assert calls == ["called", "late"]
        far.on_closed(lambda: calls.append("taken back"))
        far.on_closed(None)
        far.abort()
        far.close()
        await asyncio.sleep(0)
        assert calls == ["called", "late"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_the_memory_of_an_ended_connection_is_free_at_once(how: str) -> None:
    """Its TLS buffers are large: they must not wait for the garbage collector, which comes when it likes."""
    async with Listening() as listening:
        near = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
        ends = [weakref.ref(near), weakref.ref(await listening.streams.get())]
        listening.all_streams.clear()
        gc.collect()
        gc.disable()
        try:
            getattr(near, how)()
            del near
            await until(lambda: not any(end() for end in ends))
        finally:
            gc.enable()


async def test_cancelled_read_ends_the_stream() -> None:
    """Part of what was to be read may be in the caller's buffer: nobody could go on from there."""
    async with pair() as (near, far):
        reading = asyncio.ensure_future(read(far, 10))
        await near.write(b"half")
        await asyncio.sleep(0.01)
        reading.cancel()
        assert isinstance(await end_of(reading), asyncio.CancelledError)
        assert far.closed
        await until(lambda: near.closed)


async def test_a_writer_waits_for_a_slow_reader() -> None:
    async with pair() as (near, far):
        sent = 0

        async def write() -> None:
            nonlocal sent
            for _ in range(64):
                await near.write(bytes(2**20))
                sent += 1

        writing = asyncio.ensure_future(write())
        await asyncio.wait([writing], timeout=0.5)
        assert not writing.done()
        assert sent < 32
        await read(far, 64 * 2**20)
        await writing


async def test_what_waits_unsent_is_limited() -> None:
    async with pair() as (near, _):
        assert isinstance(near, TcpStream)
        assert near.transport is not None
        writing = asyncio.ensure_future(write_forever(near, 2**12))
        await until(lambda: near.write_paused)  # what the system takes, it has taken
        assert 2**14 < near.transport.get_write_buffer_size() <= WRITE_HIGH_WATER + 2**13
        writing.cancel()
        await end_of(writing)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell how much is unsent")
async def test_what_waits_unsent_can_be_limited_further() -> None:
    """Also in the kernel, and in the buffers of TLS and of the transport."""
    limit = 2**13
    async with pair() as (near, far):
        assert isinstance(near, TcpStream)
        assert near.transport is not None
        descriptor = near.transport.get_extra_info("socket").fileno()
        near.limit_backlog(limit)
        unsent: list[int] = []

        def note() -> None:
            assert near.transport is not None
            unsent.append(near.transport.get_write_buffer_size() + unsent_in_kernel(descriptor))

        writing = asyncio.ensure_future(write_forever(near, 2**14, note))
        await until(lambda: near.is_held_up)
        before = len(unsent)
        await read(far, 2**21)
        await until(lambda: near.is_held_up)
        assert len(unsent) - before > 64
        assert max(unsent) < limit
        writing.cancel()
        await end_of(writing)
        near.limit_backlog(None)
        writing = asyncio.ensure_future(write_forever(near, 2**14, note))
        await until(lambda: near.write_paused)
        assert max(unsent) > limit
        near.abort()
        await end_of(writing)
        near.limit_backlog(limit)  # there is nothing to limit any more


def unsent_in_kernel(descriptor: int) -> int:
    import fcntl

    answer = array.array("i", [0])
    fcntl.ioctl(descriptor, 0x894B, answer)  # SIOCOUTQNSD
    return answer[0]


async def write_forever(stream: Stream, size: int, after: Callable[[], object] = lambda: None) -> None:
    while True:
        await stream.write(bytes(size))
        after()


@pytest.mark.parametrize("limit", [None, 2**13])
@pytest.mark.parametrize("side", ["near", "far"])
async def test_a_waiting_writer_learns_of_the_end(side: str, limit: int | None) -> None:
    async with pair() as (near, far):
        near.limit_backlog(limit)
        writing = asyncio.ensure_future(write_forever(near, 2**20))
        await asyncio.wait([writing], timeout=0.2)
        {"near": near, "far": far}[side].abort()
        assert isinstance(await end_of(writing), StreamClosedError)


async def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side reads nothing, so what was written can never be delivered."""
    monkeypatch.setattr("shoal.net.tcp.stream.CLOSE_TIMEOUT", 0.1)
    async with pair() as (near, far):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(near.write(bytes(2**26)), 0.1)
        ended = asyncio.Event()
        near.on_closed(ended.set)
        near.close()
        assert not ended.is_set()
        await asyncio.wait_for(ended.wait(), 5)
        far.abort()


# --- listening --------------------------------------------------------------------------------------------------------


async def test_listening_on_a_taken_port() -> None:
    async with Listening() as listening:
        with pytest.raises(P2PDaemonError, match=f"cannot listen on {listening.address}: port .* is in use"):
            await TcpTransport(Identity.generate()).listen(listening.address, listening.take)


OUT_OF_FILES = """
import os, resource, socket, threading
import shoal
from shoal.net.tcp import listener as tcp_listener

failures, enough, tell = [], threading.Event(), tcp_listener._warn_seldom

def note(*values):
    failures.append(values)
    tell(*values)
    if len(failures) >= 5:
        enough.set()

tcp_listener._warn_seldom = note
dht = shoal.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
caller = socket.socket()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
caller.connect(("127.0.0.1", int(dht.get_visible_maddrs()[0]["tcp"])))
assert enough.wait(30)
for each in held:
    os.close(each)
dht.shutdown()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_process_without_files_left_says_so_once() -> None:
    """The listener tries again five times in a second, and each time in vain."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_FILES], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    told = " ".join(line.strip() for line in done.stderr.splitlines())
    assert re.match(
        r"[\d:]+ WARNING shoal: cannot accept connections: Too many open files. This process may open 64 files; allow",
        told,
    )
    assert told.count("WARNING") == 1


@pytest.mark.parametrize("address", ["/ip4/192.0.2.1/tcp/0", "/dns4/no-such-host.invalid/tcp/0"])
async def test_listening_where_it_is_not_possible(address: str) -> None:
    with pytest.raises(P2PDaemonError, match=f"cannot listen on {address}: .+"):
        await TcpTransport(Identity.generate()).listen(Multiaddr(address), lambda stream: None)


@pytest.mark.parametrize("host", ["/ip4/0.0.0.0", "/ip4/127.0.0.1", "/dns4/localhost", "/ip6/::1", "/ip6/::"])
async def test_listening_everywhere(host: str) -> None:
    transport = TcpTransport(Identity.generate())
    streams: asyncio.Queue[Stream] = asyncio.Queue()
    try:
        addresses = await transport.listen(Multiaddr(f"{host}/tcp/0"), streams.put_nowait)
    except P2PDaemonError:
        if "ip6" in host:
            pytest.skip("no IPv6 here")
        raise
    try:
        assert addresses
        for address in addresses:
            assert address["tcp"] != "0"
            assert address.protocols()[0] in ("ip4", "ip6")
            dialled = await TcpTransport(Identity.generate()).dial(address, transport.identity.peer_id)
            dialled.abort()
            (await streams.get()).abort()
    finally:
        await transport.close()


async def test_nothing_is_accepted_after_closing() -> None:
    async with Listening() as listening:
        await listening.transport.close()
        with pytest.raises(DialError, match="connection refused"):
            await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)


# --- dialling something else ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def server(behave: Callable[[Reader, Writer], Awaitable[None]], **options: object) -> AsyncIterator[Multiaddr]:
    """Something that listens and is no peer."""

    async def serve(reader: Reader, writer: Writer) -> None:
        try:
            await behave(reader, writer)
        except OSError:
            pass  # the dialler went away, which is what it should do
        finally:
            writer.transport.abort()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, **options)  # type: ignore[arg-type]
    try:
        yield Multiaddr(f"/ip4/127.0.0.1/tcp/{listening.sockets[0].getsockname()[1]}")
    finally:
        listening.close()


async def dial_in_vain(address: Multiaddr, error_type: type[DialError] = DialError) -> str:
    transport = TcpTransport(Identity.generate())
    with pytest.raises(error_type) as error:
        await transport.dial(address, SOME_PEER)
    assert transport.metrics.dials_failed == 1
    assert transport.metrics.connections_dialled == 0
    assert str(error.value).startswith(f"{address}: ")
    return str(error.value)


async def silent(reader: Reader, writer: Writer) -> None:
    await reader.read()


async def hang_up(reader: Reader, writer: Writer) -> None:
    pass


async def hang_up_after_hello(reader: Reader, writer: Writer) -> None:
    await reader.read(100)


async def talk_plain(reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\nwhat do you mean?\r\n" * 10)
    await reader.read()


def web_server_context(tmp_path: Path, alpn: str | None) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "www.example.org")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    pem = tmp_path / "server.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    return context


async def test_dead_port() -> None:
    with socket.socket() as silent:  # which has the port, so that nobody else gets it, but does not listen
        silent.bind(("127.0.0.1", 0))
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}")
        assert "connection refused" in await dial_in_vain(address)


async def test_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_module, "HANDSHAKE_TIMEOUT", 0.2)
    monkeypatch.setattr(handshake_module, "HANDSHAKE_TIMEOUT", 0.2)
    async with server(silent) as address:
        assert "no answer within 0.2 s" in await dial_in_vain(address)


@pytest.mark.parametrize("behave", [hang_up, hang_up_after_hello])
async def test_server_that_hangs_up(behave: Callable[[Reader, Writer], Awaitable[None]]) -> None:
    async with server(behave) as address:
        assert "closed during the handshake" in await dial_in_vain(address)


async def test_server_without_tls() -> None:
    async with server(talk_plain) as address:
        assert "does not speak TLS" in await dial_in_vain(address)


@pytest.mark.parametrize("alpn", [None, "h2", "http/1.1"])
async def test_web_server(tmp_path: Path, alpn: str | None) -> None:
    async with server(silent, ssl=web_server_context(tmp_path, alpn)) as address:
        text = await dial_in_vain(address)
    assert "no shoal peer" in text or "TLS handshake failed" in text


async def test_shoal_server_with_a_key_of_another_kind(tmp_path: Path) -> None:
    async with server(silent, ssl=web_server_context(tmp_path, ALPN)) as address:
        text = await dial_in_vain(address, IdentityMismatchError)
    assert "a peer without an Ed25519 key" in text


async def test_wrong_identity() -> None:
    async with Listening() as listening:
        text = await dial_in_vain(listening.address, IdentityMismatchError)
        assert str(listening.peer_id) in text
        assert str(SOME_PEER) in text
        assert "closed before" in await listening.drop_reason()


async def test_server_that_hangs_up_after_tls() -> None:
    identity = Identity.generate()
    async with server(hang_up, ssl=listener_context(identity)[0]) as address:
        with pytest.raises(DialError, match="closed during the handshake"):
            await TcpTransport(Identity.generate()).dial(address, identity.peer_id)


async def test_server_that_is_silent_after_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_module, "HANDSHAKE_TIMEOUT", 0.2)
    identity = Identity.generate()
    async with server(silent, ssl=listener_context(identity)[0]) as address:
        with pytest.raises(DialError, match="no answer within"):
            await TcpTransport(Identity.generate()).dial(address, identity.peer_id)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "é" * 63, "xn--a"])
async def test_names_that_do_not_resolve(host: str) -> None:
    assert "cannot be resolved" in await dial_in_vain(Multiaddr(f"/dns4/{host}/tcp/1"))


@pytest.mark.parametrize("address", ["/ip4/1.2.3.4/udp/1", "/tcp/1", "/ip4/1.2.3.4/tcp/1/ws", "/memory/1"])
async def test_unsupported_addresses(address: str) -> None:
    transport = TcpTransport(Identity.generate())
    assert not transport.supports(Multiaddr(address))
    with pytest.raises(DialError, match="is not supported"):
        await transport.dial(Multiaddr(address), SOME_PEER)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(), "connection refused"),
        (TimeoutError(), "no answer within"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "no route to that host"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to that host"),
        (ConnectionResetError(), "closed during the handshake"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (ssl.SSLError(1, "[SSL: BAD_SIGNATURE] bad signature"), "TLS handshake failed"),
    ],
)
def test_every_failure_has_words(error: OSError, words: str) -> None:
    assert words in explain(error)


# --- being dialled by something else ----------------------------------------------------------------------------------


async def open_tls(listening: Listening) -> tuple[Reader, Writer, bytes, bytes]:
    """A TLS connection to a peer, its certificate, and the nonce that it has sent."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", listening.port, ssl=dialler_context(), server_hostname=""
    )
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return reader, writer, certificate, (await reader.readexactly(CHALLENGE_BYTES))[:NONCE_BYTES]


async def prove(listening: Listening, make_proof: Callable[[bytes, bytes], bytes]) -> str:
    """Dial with a proof that does not hold; returns why it was dropped."""
    reader, writer, certificate, nonce = await open_tls(listening)
    writer.write(make_proof(certificate, nonce))
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        said = await asyncio.wait_for(reader.read(), 5)
        assert said == b"", "nothing is said to somebody who has not proven who he is"
    writer.transport.abort()
    return await listening.drop_reason()


DIALLER = Identity.generate()
VICTIM = Identity.generate()


def signed(message: bytes, signer: Identity = DIALLER, claimed: Identity = DIALLER) -> bytes:
    return with_badge(claimed.public_key + signer.sign(message), b"")


async def test_right_proof_by_hand() -> None:
    """The forged proofs below differ from this one in one thing each."""
    async with Listening() as listening:
        _, writer, certificate, nonce = await open_tls(listening)
        writer.write(signed(proof_message(listening.peer_id, certificate, nonce)))
        stream = await listening.streams.get()
        assert stream.remote == DIALLER.peer_id
        assert listening.transport.metrics.connections_accepted == 1
        writer.transport.abort()


async def test_forged_proofs() -> None:
    """A key that the dialler does not have, and signatures that were made for something else."""
    other_certificate = ssl.PEM_cert_to_DER_cert(VICTIM.certificate_pem()[0].decode())
    async with Listening() as template:
        me = template.peer_id
    forgeries: list[Callable[[bytes, bytes], bytes]] = [
        lambda certificate, nonce: signed(proof_message(me, certificate, nonce), claimed=VICTIM),
        lambda certificate, nonce: signed(proof_message(me, certificate, nonce), signer=VICTIM),
        lambda certificate, nonce: signed(proof_message(me, other_certificate, nonce)),
        lambda certificate, nonce: signed(proof_message(me, certificate, bytes(NONCE_BYTES))),
        lambda certificate, nonce: signed(proof_message(VICTIM.peer_id, certificate, nonce)),
        lambda certificate, nonce: signed(proof_message(me, certificate, nonce)[1:]),
        lambda certificate, nonce: signed(proof_message(me, certificate, nonce, b"a badge that is not shown")),
        lambda certificate, nonce: signed(proof_message(me, certificate, nonce))[:-2] + b"\x00\x01x",
        lambda certificate, nonce: with_badge(DIALLER.public_key + bytes(64), b""),
        lambda certificate, nonce: bytes(PROOF_BYTES),
        lambda certificate, nonce: b"\xff" * PROOF_BYTES,
    ]
    for forge in forgeries:
        async with Listening() as listening:
            me = listening.peer_id
            assert await prove(listening, forge) == "wrong proof of identity"
            assert listening.streams.empty()
            assert listening.transport.metrics.connections_accepted == 0


async def test_replayed_proof() -> None:
    """What was heard on one connection is worth nothing on the next."""
    async with Listening() as listening:
        _, writer, certificate, nonce = await open_tls(listening)
        proof = signed(proof_message(listening.peer_id, certificate, nonce))
        writer.write(proof)
        await listening.streams.get()
        assert await prove(listening, lambda *_: proof) == "wrong proof of identity"
        writer.transport.abort()


async def test_proof_cannot_be_passed_on() -> None:
    """Somebody whom an honest peer dials cannot use its proof to look like that peer elsewhere."""
    mallory = Identity.generate()
    async with Listening() as bank:
        to_bank: list[str] = []

        async def relay(reader: Reader, writer: Writer) -> None:
            bank_reader, bank_writer, _, nonce = await open_tls(bank)
            writer.write(with_badge(nonce, b""))
            bank_writer.write(await reader.readexactly(PROOF_BYTES))
            with contextlib.suppress(ConnectionResetError):
                await bank_reader.read()
            to_bank.append("closed")
            bank_writer.transport.abort()

        async with server(relay, ssl=listener_context(mallory)[0]) as address:
            stream = await TcpTransport(VICTIM).dial(address, mallory.peer_id)
            assert await bank.drop_reason() == "wrong proof of identity"
            await until(lambda: bool(to_bank))
            stream.abort()


async def test_dialler_that_leaves_before_its_proof() -> None:
    async with Listening() as listening:
        _, writer, _, _ = await open_tls(listening)
        writer.write(b"half of a proof")
        await writer.drain()
        writer.transport.abort()
        assert await listening.drop_reason() == "closed before the proof of identity"


async def test_dialler_that_never_proves_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "HANDSHAKE_TIMEOUT", 0.2)
    async with Listening() as listening:
        reader, writer, _, _ = await open_tls(listening)
        writer.write(b"half of a proof")
        assert await listening.drop_reason() == "no proof of identity in time"
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            assert await reader.read() == b""
        writer.transport.abort()


async def test_dialler_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "HANDSHAKE_TIMEOUT", 0.2)
    async with Listening() as listening:
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        assert await listening.drop_reason() == "said nothing"
        assert await reader.read() == b""
        writer.transport.abort()


async def test_dialler_that_stops_in_the_middle_of_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "HANDSHAKE_TIMEOUT", 0.2)
    async with Listening() as listening:
        _, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello of 512 bytes
        assert await listening.drop_reason() == "no TLS handshake in time"
        writer.transport.abort()


async def test_dialler_that_leaves_in_the_middle_of_tls() -> None:
    async with Listening() as listening:
        _, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        await writer.drain()
        writer.transport.abort()
        assert await listening.drop_reason() == "closed before the TLS handshake"


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 100, b"\x16\x03\x01\x00\x05hello", b"\xff" * 70_000],
    ids=["web", "zeros", "malformed TLS", "much"],
)
async def test_dialler_without_tls(data: bytes) -> None:
    async with Listening() as listening:
        reader, writer = await asyncio.open_connection("127.0.0.1", listening.port)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()
        assert await listening.drop_reason() == "no TLS"


async def test_dialler_with_older_tls() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with Listening() as listening:
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection("127.0.0.1", listening.port, ssl=context, server_hostname="")
        assert await listening.drop_reason() == "no TLS"


async def test_strangers_do_not_stop_others() -> None:
    """Honest peers get in while all kinds of strangers are at the door."""
    async with Listening() as listening:
        writers = []
        for data in (b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.0\r\n\r\n") * 5:
            _, writer = await asyncio.open_connection("127.0.0.1", listening.port)
            writer.write(data)
            writers.append(writer)
        for _ in range(5):
            dialled = await TcpTransport(Identity.generate()).dial(listening.address, listening.peer_id)
            (await listening.streams.get()).abort()
            dialled.abort()
        for writer in writers:
            writer.transport.abort()


async def test_closing_drops_those_at_the_door() -> None:
    async with Listening() as listening:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", listening.port)
        tls_reader, tls_writer, _, _ = await open_tls(listening)
        await listening.transport.close()
        for reader, writer in ((plain_reader, plain_writer), (tls_reader, tls_writer)):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert await reader.read() == b""
            writer.transport.abort()


async def test_a_stream_that_was_given_up_ends_its_connection() -> None:
    """As when a handshake comes to its end just after nobody waits for it any more."""
    async with Listening() as listening:
        stream = TcpStream()
        stream.abort()
        await asyncio.get_running_loop().create_connection(
            lambda: stream, "127.0.0.1", listening.port, ssl=dialler_context(), server_hostname=""
        )
        with pytest.raises(StreamClosedError):
            stream.ssl_object()
        with pytest.raises(StreamClosedError):
            await stream.write(b"x")
        assert "closed before" in await listening.drop_reason()


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system gives no choice")
async def test_connections_within_a_host_are_not_paced() -> None:
    async with Listening() as server:
        dialler = TcpTransport(Identity.generate())
        dialled = await dialler.dial(server.address, server.peer_id)
        for stream in (dialled, await server.streams.get()):
            assert isinstance(stream, TcpStream)
            assert stream.transport is not None
            connection = stream.transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno\0")
        dialled.abort()
