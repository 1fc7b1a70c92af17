"""TLS 1.3 over TCP, with mutual proof of identity.

The listener's certificate is made from its Ed25519 key, so the TLS handshake itself proves who it is; the dialler
compares the key with the peer it wanted. Python's ``ssl`` cannot ask for a client certificate that no authority
signed, so the dialler proves itself inside the channel: the listener sends a 32-byte nonce, the dialler answers
with its public key and a signature over a label, the listener's peer id, the SHA-256 of the listener's certificate,
and the nonce. Because the certificate is part of what is signed, the proof is worth nothing on any other channel.
Nothing else is read before it holds.

Bulk data is received straight into the buffer where it is needed (:class:`asyncio.BufferedProtocol`), and written
as views of the caller's memory.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import socket
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import ifaddr

from shoal.clock import timeout
from shoal.errors import DialError, IdentityMismatchError, P2PDaemonError, StreamClosedError
from shoal.metrics import Metrics
from shoal.p2p.fork_safety import disown_socket, own_socket
from shoal.p2p.identity import SIGNATURE_BYTES, Identity, peer_id_of_certificate, verify_signature
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.peer_id import PUBLIC_KEY_BYTES, PeerID
from shoal.p2p.transport import Buffer, OnStream, Stream, Transport

logger = logging.getLogger(__name__)

ALPN = "shoal/1"
PROOF_LABEL = b"shoal/1 dialler proof:"
NONCE_BYTES = 32
HANDSHAKE_TIMEOUT = 5.0
"""Seconds for connecting, TLS and the proof together; also how long a listener waits for an unproven dialler."""
WRITE_HIGH_WATER = 4 * 2**20
RECEIVE_BUFFER_BYTES = 16 * 2**10
CLOSE_TIMEOUT = 2.0


class TcpStream(Stream, asyncio.BufferedProtocol):
    """A connection as a stream: incoming bytes go to the waiting reader's buffer, or to a small one of its own."""

    def __init__(self, on_connected: Callable[[TcpStream], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_connected = on_connected
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._own = bytearray(RECEIVE_BUFFER_BYTES)
        self._own_view = memoryview(self._own)
        self._start = self._end = 0  # what has arrived and is unread: _own[_start:_end]
        self._target: memoryview | None = None
        self._target_filled = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._write_paused = self._read_paused = False
        self._closed = False
        self._reason = "the other side closed the connection"
        self._close_callback: Callable[[], object] | None = None
        self.remote_address = None

    # --- asyncio.BufferedProtocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self._descriptor = transport.get_extra_info("socket").fileno()
        own_socket(self._descriptor)
        peer_name = transport.get_extra_info("peername")
        if peer_name:
            self.remote_address = address_of(peer_name[0], peer_name[1])
        if self._on_connected is not None:
            self._on_connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target[self._target_filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._own):  # make room at the end by moving the rest to the front
            rest = self._own[self._start : self._end]
            self._own_view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._own_view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._target_filled += nbytes
            if self._target_filled == len(self._target):
                self._finish_read()
            return
        self._end += nbytes
        if self._end - self._start == len(self._own) and not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        disown_socket(self._descriptor)
        if exc is not None and not self._closed:
            self._reason = f"the connection broke: {type(exc).__name__}: {exc}"
        self._end_now()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    # --- Stream -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def _finish_read(self) -> None:
        self._target = None
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read_exactly_into(self, buffer: memoryview) -> None:
        taken = min(len(buffer), self._end - self._start)
        buffer[:taken] = self._own_view[self._start : self._start + taken]
        self._start += taken
        if self._read_paused and self._transport is not None and not self._closed:
            self._read_paused = False
            self._transport.resume_reading()
        if taken == len(buffer):
            return
        if self._closed:
            raise StreamClosedError(self._reason)
        self._target, self._target_filled = buffer, taken
        self._reader = self._loop.create_future()
        try:
            await self._reader
        except asyncio.CancelledError:
            # bytes of a message are already in the caller's buffer: the stream has lost its place and is of no more use
            self.abort()
            raise
        finally:
            self._target = self._reader = None

    async def write(self, *buffers: Buffer) -> None:
        if self._closed or self._transport is None:
            raise StreamClosedError(self._reason)
        self._transport.writelines(buffers)
        while self._write_paused:
            self._writer = self._loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None
            if self._closed:
                raise StreamClosedError(self._reason)

    def on_closed(self, callback: Callable[[], object] | None) -> None:
        self._close_callback = callback
        if self._closed and callback is not None:
            self._loop.call_soon(callback)

    def _end_now(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(StreamClosedError(self._reason))
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        callback, self._close_callback = self._close_callback, None
        if callback is not None:
            callback()

    def close(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._reason = "this side closed the connection"
            self._transport.close()
            self._loop.call_later(CLOSE_TIMEOUT, self._transport.abort)

    def abort(self) -> None:
        if not self._closed:
            self._reason = "this side closed the connection"
        if self._transport is not None:
            self._transport.abort()
        self._end_now()

    # --- facts for the handshake --------------------------------------------------------------------------------------

    def ssl_object(self) -> ssl.SSLObject:
        assert self._transport is not None
        return cast("ssl.SSLObject", self._transport.get_extra_info("ssl_object"))


def address_of(host: str, port: int) -> Multiaddr:
    """The multiaddr of a socket address."""
    host = host.partition("%")[0]  # IPv6 scope
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def _proof_message(listener: PeerID, certificate_der: bytes, nonce: bytes) -> bytes:
    return PROOF_LABEL + listener.to_bytes() + hashlib.sha256(certificate_der).digest() + nonce


def _base_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


@functools.cache
def _dialler_context() -> ssl.SSLContext:
    context = _base_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the key is compared with the expected peer id, which is stronger
    return context


def _listener_context(identity: Identity) -> tuple[ssl.SSLContext, bytes]:
    context = _base_context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    certificate, key = identity.certificate_pem()
    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:  # the ssl module loads keys from files only
        path = Path(directory, "identity.pem")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key + certificate)
        context.load_cert_chain(path)
    return context, ssl.PEM_cert_to_DER_cert(certificate.decode())


def _explain(error: BaseException) -> str:
    """What went wrong, in words for somebody who looks at an address list."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there, or a firewall rejects it"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return f"no answer within {HANDSHAKE_TIMEOUT:g} s: nothing is there, a firewall drops it, or it speaks no TLS"
    if isinstance(error, socket.gaierror):
        return f"the host name cannot be resolved ({error.strerror})"
    if isinstance(error, ssl.SSLError):
        if "WRONG_VERSION_NUMBER" in str(error) or "UNEXPECTED_MESSAGE" in str(error):
            return f"something else answers there: it does not speak TLS ({error.reason})"
        return f"the TLS handshake failed, so it is probably no shoal peer ({error.reason or error})"
    if isinstance(error, (ConnectionResetError, ConnectionAbortedError, StreamClosedError)):
        return "the connection was closed during the handshake: it is probably no shoal peer, or it refuses this one"
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    return f"{type(error).__name__}: {error}"


class TcpTransport(Transport):
    """Transport for ``/ip4|ip6|dns|dns4|dns6/<host>/tcp/<port>``."""

    def __init__(self, identity: Identity, metrics: Metrics | None = None) -> None:
        self.identity = identity
        self.metrics = metrics or Metrics()
        self._servers: list[asyncio.Server] = []
        self._admissions: set[asyncio.Task[None]] = set()
        self._listener: tuple[ssl.SSLContext, bytes] | None = None

    def supports(self, address: Multiaddr) -> bool:
        protocols = address.protocols()
        return len(protocols) == 2 and protocols[0] in ("ip4", "ip6", "dns", "dns4", "dns6") and protocols[1] == "tcp"

    def _host_and_port(self, address: Multiaddr) -> tuple[str, int, socket.AddressFamily]:
        if not self.supports(address):
            raise DialError(f"{address} is not supported: give /ip4/<address>/tcp/<port> (or ip6, dns, dns4, dns6)")
        (kind, host), (_, port) = address.items()
        family = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
        return cast("str", host), int(cast("str", port)), family.get(kind, socket.AF_UNSPEC)

    # --- listening ----------------------------------------------------------------------------------------------------

    async def listen(self, address: Multiaddr, on_stream: OnStream) -> list[Multiaddr]:
        host, port, family = self._host_and_port(address)
        if self._listener is None:
            self._listener = _listener_context(self.identity)
        context, certificate = self._listener

        def admit(stream: TcpStream) -> None:
            task = asyncio.get_running_loop().create_task(self._admit(stream, certificate, on_stream))
            self._admissions.add(task)
            task.add_done_callback(self._admissions.discard)

        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: TcpStream(admit),
                host,
                port,
                family=family,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT,
                backlog=256,
            )
        except OSError as e:
            raise P2PDaemonError(f"cannot listen on {address}: {e.strerror or e}") from e
        self._servers.append(server)
        for listening in server.sockets:
            own_socket(listening.fileno())
        hosts = [
            interface
            for bound in server.sockets
            for interface in (_interface_addresses(bound) if host in ("0.0.0.0", "::") else [bound.getsockname()[0]])
        ]
        return [address_of(each, server.sockets[0].getsockname()[1]) for each in dict.fromkeys(hosts)]

    async def _admit(self, stream: TcpStream, certificate: bytes, on_stream: OnStream) -> None:
        try:
            async with timeout(HANDSHAKE_TIMEOUT):
                remote = await self._verify_dialler(stream, certificate)
        except (asyncio.TimeoutError, TimeoutError):
            self._drop(stream, "no proof of identity in time")
        except StreamClosedError:
            self._drop(stream, "closed before the proof of identity")
        except BaseException:
            stream.abort()
            raise
        else:
            if remote is None:
                self._drop(stream, "wrong proof of identity")
                return
            stream.remote = remote
            self.metrics.connections_accepted += 1
            on_stream(stream)

    async def _verify_dialler(self, stream: TcpStream, certificate: bytes) -> PeerID | None:
        nonce = os.urandom(NONCE_BYTES)
        await stream.write(nonce)
        proof = bytearray(PUBLIC_KEY_BYTES + SIGNATURE_BYTES)
        await stream.read_exactly_into(memoryview(proof))
        public_key, signature = bytes(proof[:PUBLIC_KEY_BYTES]), bytes(proof[PUBLIC_KEY_BYTES:])
        message = _proof_message(self.identity.peer_id, certificate, nonce)
        return PeerID.from_public_key(public_key) if verify_signature(public_key, signature, message) else None

    def _drop(self, stream: TcpStream, reason: str) -> None:
        self.metrics.connections_dropped[reason] += 1
        logger.debug("dropped a connection from %s: %s", stream.remote_address, reason)
        stream.abort()

    # --- dialling -----------------------------------------------------------------------------------------------------

    async def dial(self, address: Multiaddr, expected_peer: PeerID) -> Stream:
        host, port, family = self._host_and_port(address)
        stream: TcpStream | None = None
        try:
            async with timeout(HANDSHAKE_TIMEOUT):
                _, stream = await asyncio.get_running_loop().create_connection(
                    TcpStream,
                    host,
                    port,
                    family=family,
                    ssl=_dialler_context(),
                    server_hostname="",
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT,
                )
                await self._prove_to_listener(stream, address, expected_peer)
        except (OSError, asyncio.TimeoutError, TimeoutError, StreamClosedError) as e:
            if stream is not None:
                stream.abort()
            self.metrics.dials_failed += 1
            raise e if isinstance(e, DialError) else DialError(f"{address}: {_explain(e)}") from e
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        self.metrics.connections_dialled += 1
        return stream

    async def _prove_to_listener(self, stream: TcpStream, address: Multiaddr, expected_peer: PeerID) -> None:
        ssl_object = stream.ssl_object()
        if ssl_object.selected_alpn_protocol() != ALPN:
            raise DialError(f"{address}: something else answers there: it speaks TLS but is no shoal peer")
        certificate = ssl_object.getpeercert(binary_form=True) or b""
        found = peer_id_of_certificate(certificate)
        if found != expected_peer:
            raise IdentityMismatchError(
                f"{address}: wrong identity: peer {found} answers there, not {expected_peer}; "
                "ask for its current address, or correct the part after /p2p/"
            )
        nonce = bytearray(NONCE_BYTES)
        await stream.read_exactly_into(memoryview(nonce))
        signature = self.identity.sign(_proof_message(expected_peer, certificate, bytes(nonce)))
        await stream.write(self.identity.public_key + signature)
        stream.remote = expected_peer

    async def close(self) -> None:
        for server in self._servers:
            for listening in server.sockets:
                disown_socket(listening.fileno())
            server.close()
        for task in list(self._admissions):
            task.cancel()
        await asyncio.gather(*self._admissions, return_exceptions=True)
        self._servers.clear()


def _interface_addresses(bound: socket.socket) -> list[str]:
    """Addresses of this machine in the family of a socket that listens on all of them; loopback last."""
    want_ipv4 = bound.family == socket.AF_INET
    found = [
        ip.ip if want_ipv4 else ip.ip[0]
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if ip.is_IPv4 == want_ipv4
    ]
    usable = [str(ip) for ip in found if not str(ip).startswith("fe80")]
    return sorted(usable, key=lambda ip: ip == "::1" or ip.startswith("127."))
