"""TLS 1.3 with mutual proof of identity, and badges.

The listener's certificate is made from its Ed25519 key, so the TLS handshake itself proves who it is; the dialler
compares the key with the peer it wanted. Python's ``ssl`` cannot ask for a client certificate that no authority
signed, so the dialler proves itself inside the channel::

    listener ► dialler    nonce (32)                       length (2)   badge of the listener
    dialler ► listener    public key (32), signature (64)  length (2)   badge of the dialler

The signature is over a label, the listener's peer id, the SHA-256 of the listener's certificate, the nonce, and the
SHA-256 of the dialler's badge. Because it covers the certificate, the proof is worthless on any other channel. The
listener reads nothing else before the proof holds. Without a membership, a badge has no bytes. A dialler judges the
listener's badge before it identifies itself; a listener leaves that to :class:`~shoal.net.server.CallServer`, which can
say why it refuses.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.access.badges import MAX_BADGE_BYTES, Badge
from shoal.errors import (
    DialError,
    IdentityMismatchError,
    InterruptedDialError,
    RefusedDialError,
    StreamClosedError,
)
from shoal.net.tcp.stream import TcpStream
from shoal.net.transport import HANDSHAKE_TIMEOUT as HANDSHAKE_TIMEOUT
from shoal.peers.identity import (
    NEW_BINARY_FILE,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    PeerID,
    peer_id_of_certificate,
    verify_signature,
)
from shoal.peers.multiaddr import Multiaddr

ALPN = "shoal/2"
PROOF_LABEL = b"shoal/2 dialler proof:"
NONCE_BYTES = 32  # 256 bits, which never repeat by chance
_LENGTH = struct.Struct(">H")
CHALLENGE_BYTES = NONCE_BYTES + _LENGTH.size
"""What a listener sends before its badge."""
PROOF_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES + _LENGTH.size
"""What a dialler sends before its badge."""
# A TLS record (alert, fatal, access denied), sent to a host that starts more handshakes than its share.
BUSY_ALERT = bytes([21, 3, 3, 0, 2, 2, 49])


def proof_message(listener: PeerID, certificate_der: bytes, nonce: bytes, badge: bytes = b"") -> bytes:
    """The message that the dialler signs."""
    certificate, shown = hashlib.sha256(certificate_der).digest(), hashlib.sha256(badge).digest()
    return PROOF_LABEL + listener.to_bytes() + certificate + nonce + shown


def with_badge(proof: bytes, badge: bytes) -> bytes:
    """A challenge or a proof, followed by a badge."""
    return proof + _LENGTH.pack(len(badge)) + badge


async def _read_with_badge(stream: TcpStream, size: int) -> tuple[bytes, bytes | None]:
    """The other side's half, and its badge; ``None`` for a badge that is too long."""
    head = bytearray(size)
    await stream.read_exactly_into(memoryview(head))
    (length,) = _LENGTH.unpack(head[-_LENGTH.size :])
    if length > MAX_BADGE_BYTES:
        return bytes(head[: -_LENGTH.size]), None
    badge = bytearray(length)
    await stream.read_exactly_into(memoryview(badge))
    return bytes(head[: -_LENGTH.size]), bytes(badge)


def _base_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


@functools.cache
def dialler_context() -> ssl.SSLContext:
    """TLS settings for dialling any peer."""
    context = _base_context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Comparing the key with the expected peer id is stronger than a chain of certificates.
    context.verify_mode = ssl.CERT_NONE
    return context


def listener_context(identity: Identity) -> tuple[ssl.SSLContext, bytes]:
    """TLS settings for listening with this identity, and the certificate that dialling peers will see."""
    context = _base_context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    certificate, key = identity.certificate_pem()
    # The ssl module loads keys from files only.
    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
        path = Path(directory, "identity.pem")
        with os.fdopen(os.open(path, NEW_BINARY_FILE, 0o600), "wb") as file:
            file.write(key + certificate)
        context.load_cert_chain(path)
    return context, ssl.PEM_cert_to_DER_cert(certificate.decode())


async def verify_dialler(
    stream: TcpStream, listener: PeerID, certificate_der: bytes, own_badge: bytes = b""
) -> tuple[PeerID, bytes] | None:
    """The listener's half: returns the peer that has dialled and its badge, or ``None`` if its proof is wrong.

    Raises:
        StreamClosedError: the dialler left.
    """
    nonce = os.urandom(NONCE_BYTES)
    await stream.write(with_badge(nonce, own_badge))
    proof, badge = await _read_with_badge(stream, PROOF_BYTES)
    if badge is None:
        return None
    public_key, signature = proof[:PUBLIC_KEY_BYTES], proof[PUBLIC_KEY_BYTES:]
    message = proof_message(listener, certificate_der, nonce, badge)
    return (PeerID.from_public_key(public_key), badge) if verify_signature(public_key, signature, message) else None


async def prove_to_listener(
    stream: TcpStream,
    identity: Identity,
    address: Multiaddr,
    expected_peer: PeerID | None,
    judge: Callable[[PeerID, bytes], Badge | None],
    own_badge: bytes = b"",
) -> tuple[PeerID, Badge | None]:
    """The dialler's half: check the listener's identity, then prove its own; returns the listener and its badge.

    Args:
        expected_peer: the peer that must answer; ``None`` = any peer.
        judge: checks the badge that the listener shows, before this side identifies itself.

    Raises:
        IdentityMismatchError: another peer answers.
        DialError: no shoal peer answers, or ``judge`` refuses it.
        StreamClosedError: the listener left.
    """
    ssl_object = stream.ssl_object()
    if ssl_object.selected_alpn_protocol() != ALPN:
        raise DialError(f"{address}: something else answers there: it speaks TLS but is no shoal peer")
    certificate = ssl_object.getpeercert(binary_form=True) or b""
    found = peer_id_of_certificate(certificate)
    if found is None and expected_peer is None:
        raise DialError(f"{address}: something else answers there: its key is no Ed25519 key, as that of a peer is")
    if found is None or expected_peer not in (None, found):
        who = "a peer without an Ed25519 key" if found is None else f"peer {found}"
        raise IdentityMismatchError(
            f"{address}: wrong identity: {who} answers there, not {expected_peer}; "
            "ask for its current address, or correct the part after /p2p/"
        )
    nonce, shown = await _read_with_badge(stream, CHALLENGE_BYTES)
    if shown is None:
        raise DialError(f"{address}: peer {found} shows a badge of over {MAX_BADGE_BYTES} bytes")
    badge = judge(found, shown)
    signature = identity.sign(proof_message(found, certificate, nonce, own_badge))
    await stream.write(with_badge(identity.public_key + signature, own_badge))
    return found, badge


_BROKEN = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, StreamClosedError, ssl.SSLEOFError)


# The numbers are those of Windows for an unreachable network or host: its loop reports them without an ``errno``.
_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, 1231, 1232}


def as_dial_error(address: Multiaddr, error: BaseException) -> DialError:
    """A failed dial as an error that names the address and what went wrong."""
    if isinstance(error, DialError):
        return error
    kind = DialError
    if isinstance(error, ConnectionRefusedError):
        kind = RefusedDialError
    elif isinstance(error, _BROKEN) or "ALERT_ACCESS_DENIED" in str(error):
        kind = InterruptedDialError
    return kind(f"{address}: {explain(error)}")


def has_no_route(error: OSError) -> bool:
    """Whether the system has no route to the other side."""
    return not _NO_ROUTE.isdisjoint((error.errno, getattr(error, "winerror", None)))


def explain(error: BaseException) -> str:
    """What went wrong with a dial, in words for a user with a list of addresses."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there, or a firewall rejects it"
    if isinstance(error, TimeoutError):
        return f"no answer within {HANDSHAKE_TIMEOUT:g} s: nothing is there, a firewall drops it, or it speaks no TLS"
    if isinstance(error, socket.gaierror):
        return f"the host name cannot be resolved ({error.strerror})"
    if isinstance(error, _BROKEN):
        return "the connection was closed during the handshake: it is probably no shoal peer, or it has no time for you"
    if isinstance(error, ssl.SSLError):
        return _explain_tls(error)
    if isinstance(error, OSError):
        if has_no_route(error):
            return f"no route to that host ({error.strerror})"
        return f"{error.strerror or error}"
    return f"{type(error).__name__}: {error}"


def _explain_tls(error: ssl.SSLError) -> str:
    reason = getattr(error, "reason", None) or str(error)
    text = f"{reason} {error}"
    if "ALERT_ACCESS_DENIED" in text:
        return "refused: that peer takes no new connections from this host for now, there were too many at a time"
    if any(sign in text for sign in ("WRONG_VERSION_NUMBER", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE")):
        return f"something else answers there: it does not speak TLS ({reason})"
    return f"the TLS handshake failed, so it is probably no shoal peer ({reason})"
