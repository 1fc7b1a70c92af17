"""The identity of a peer: a key pair, the peer id made from its public key, and the file that stores it.

The identifier has the format of libp2p (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md): the
multihash of the protobuf-encoded public key. An Ed25519 key is short enough for the identity hash, so the id *contains*
the key.
"""

from __future__ import annotations

import datetime
import functools
import os
import random
import socket
import stat
from collections.abc import Iterable
from functools import total_ordering
from pathlib import Path
from typing import Annotated

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from shoal.base.bounded import MOST
from shoal.base.logs import MAX_NAME_CHARACTERS, one_line, quoted, shown_name
from shoal.errors import ForeignPeerError, P2PDaemonError, make_private
from shoal.peers.multiaddr import DAMAGED, Multiaddr

_ED25519_PROTOBUF = b"\x08\x01\x12\x20"
_ED25519_MULTIHASH = b"\x00\x24" + _ED25519_PROTOBUF
PUBLIC_KEY_BYTES = 32  # Ed25519 (RFC 8032)
# Chosen: enough for any kind of key; shoal's ids take 38.
MAX_PEER_ID_BYTES = 64
# The most ids that share one object (chosen).
MAX_INTERNED = 4 * MOST


@total_ordering
class PeerID:
    """Identifier of a peer, hashable and ordered by its base58 text.

    Args:
        peer_id_bytes: the multihash; up to 64 bytes are taken as they are.

    Raises:
        ValueError: more than 64 bytes. The time to make the text form grows with the square of the size.
    """

    __slots__ = ("_base58", "_bytes")

    _bytes: bytes
    _base58: str | None

    def __new__(cls, peer_id_bytes: bytes) -> PeerID:
        # The same few ids occur again and again, so equal ids share one object, which makes lookups cheap.
        known = _interned.get(peer_id_bytes) if type(peer_id_bytes) is bytes else None
        if known is not None:
            return known
        if not isinstance(peer_id_bytes, (bytes, bytearray, memoryview)):
            raise TypeError(f"PeerID is made from bytes, got {quoted(peer_id_bytes)}; for text: PeerID.from_base58")
        if len(peer_id_bytes) > MAX_PEER_ID_BYTES:
            raise ValueError(f"a peer id has at most {MAX_PEER_ID_BYTES} bytes, got {len(peer_id_bytes)}")
        self = super().__new__(cls)
        self._bytes, self._base58 = bytes(peer_id_bytes), None
        if len(_interned) >= MAX_INTERNED:
            _interned.clear()
        return _interned.setdefault(self._bytes, self)

    @classmethod
    def from_base58(cls, text: str) -> PeerID:
        """Parse the usual text form, ``12D3KooW…``.

        Raises:
            ValueError: the text is not base58.
        """
        try:
            # The time to decode grows with the square of the length.
            if len(text) > 4 * MAX_PEER_ID_BYTES:
                raise ValueError("it is too long")
            return cls(base58.b58decode(text))
        except ValueError as e:
            raise ValueError(f"{quoted(text)} is not a peer id such as 12D3KooW…: {one_line(str(e))}") from None

    @classmethod
    def from_public_key(cls, public_key: bytes) -> PeerID:
        """The id of the peer with this raw Ed25519 public key (32 bytes)."""
        if len(public_key) != PUBLIC_KEY_BYTES:
            raise ValueError(f"an Ed25519 public key has 32 bytes, got {len(public_key)}")
        return cls(_ED25519_MULTIHASH + public_key)

    @classmethod
    def from_identity(cls, data: bytes) -> PeerID:
        """The id of the peer with this private key, given as the contents of an identity file."""
        from shoal.peers.identity import Identity

        return Identity.from_bytes(data).peer_id

    @property
    def public_key(self) -> bytes | None:
        """The raw Ed25519 key inside the id, or ``None`` if the id is made from another kind of key."""
        is_ed25519 = self._bytes.startswith(_ED25519_MULTIHASH) and len(self._bytes) == len(_ED25519_MULTIHASH) + 32
        return self._bytes[len(_ED25519_MULTIHASH) :] if is_ed25519 else None

    def to_bytes(self) -> bytes:
        """The multihash."""
        return self._bytes

    def to_base58(self) -> str:
        """The usual text form."""
        if self._base58 is None:
            self._base58 = base58.b58encode(self._bytes).decode()
        return self._base58

    to_string = pretty = __str__ = to_base58

    def __repr__(self) -> str:
        return f"<PeerID {self.to_base58()}>"

    def __bytes__(self) -> bytes:
        return self._bytes

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, PeerID):
            return self._bytes == other._bytes
        if isinstance(other, str):
            return self.to_base58() == other
        if isinstance(other, bytes):
            return self._bytes == other
        return NotImplemented

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, PeerID):
            raise TypeError(f"PeerID can only be compared with PeerID, got {other!r}")
        return self.to_base58() < other.to_base58()

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __reduce__(self) -> tuple[type[PeerID], tuple[bytes]]:
        return PeerID, (self._bytes,)


# Ids in use. Equal ids may still be different objects: two threads may make one at once, or the table may be full.
_interned: dict[bytes, PeerID] = {}


class PeerInfo:
    """A peer and the addresses where it may be reached."""

    __slots__ = ("addrs", "peer_id")

    def __init__(self, peer_id: PeerID, addrs: Iterable[Multiaddr]) -> None:
        self.peer_id = peer_id
        self.addrs = list(addrs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerInfo) and self.peer_id == other.peer_id and self.addrs == other.addrs

    def __hash__(self) -> int:
        return hash((self.peer_id, tuple(self.addrs)))

    def __repr__(self) -> str:
        return f"PeerInfo({self.peer_id}, {[str(addr) for addr in self.addrs]})"


def split_peer_address(address: Multiaddr) -> tuple[Multiaddr, PeerID]:
    """Split ``/ip4/…/tcp/…/p2p/<id>`` into the place and the peer.

    Raises:
        ValueError: the address does not end with a valid ``/p2p/<peer id>``.
    """
    items = address.items()
    if len(items) < 2 or items[-1][0] != "p2p" or items[-1][1] is None:
        raise ValueError(f"{address} does not say which peer to expect: it must end with /p2p/<peer id>")
    for name, text in items:
        if name == "p2p" and text is not None and PeerID.from_base58(text).public_key is None:
            error = ForeignPeerError if text.startswith(_OTHER_KEYS) else ValueError
            raise error(f"{address}: {why_no_key(text)}")
    peer_id = PeerID.from_base58(items[-1][1])
    place = address.decapsulate(f"/p2p/{items[-1][1]}")
    check_circuit(place, peer_id)
    return place, peer_id


# Prefixes of libp2p's peer ids with other kinds of keys.
_OTHER_KEYS = ("Qm", "16Uiu2HA")


def why_no_key(text: str) -> str:
    """Why a peer id holds no Ed25519 key."""
    if text.startswith(_OTHER_KEYS):
        return "the peer id is not made from an Ed25519 key (12D3KooW…)"
    return f"the peer id {DAMAGED}"


CIRCUIT = "p2p-circuit"


@functools.lru_cache(MOST)
def is_circuit(address: Multiaddr) -> bool:
    """Whether an address leads through a relay: its host and port are those of the relay."""
    return CIRCUIT in address


@functools.lru_cache(MOST)
def relay_of(address: Multiaddr) -> tuple[Multiaddr, PeerID] | None:
    """The address and id of the relay in ``/ip4/…/tcp/…/p2p/RELAY/p2p-circuit``; ``None`` for any other address."""
    items = address.items()
    if len(items) < 3 or items[-1][0] != CIRCUIT or sum(name == "p2p" for name, _ in items) != 1:
        return None
    try:
        place, relay = split_peer_address(address.decapsulate(f"/{CIRCUIT}"))
    except ValueError:
        return None
    return None if is_circuit(place) else (place, relay)


def circuit_address(place: Multiaddr, relay: PeerID) -> Multiaddr:
    """The address of a peer that has a reservation at a relay: the inverse of :func:`relay_of`."""
    return place.encapsulate(f"/p2p/{relay}/{CIRCUIT}")


def check_circuit(place: Multiaddr, peer: PeerID) -> None:
    """Check the address of a peer, without its ``/p2p``.

    Raises:
        ValueError: it leads through several relays, or through the peer itself.
    """
    if not is_circuit(place):
        return
    if sum(name == CIRCUIT for name in place) > 1:
        raise ValueError(f"{place} leads through more than one relay: give an address with a single /{CIRCUIT}")
    if place.get("p2p") == peer.to_base58():
        raise ValueError(f"{place} leads to peer {peer} through that peer itself: give an address of another relay")


# The start of libp2p's PrivateKey in protobuf: type Ed25519; 64 bytes of data follow.
_FILE_HEADER = b"\x08\x01\x12\x40"
SIGNATURE_BYTES = 64  # Ed25519 (RFC 8032)
# Flags to open a file that must be new. Without ``O_BINARY``, Windows writes two bytes for each 0x0A of a key.
NEW_BINARY_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# Points of small order, without the sign bit: anyone can forge signatures for such a key.
_WEAK_KEYS = frozenset(
    bytes.fromhex(key)
    for key in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


class Identity:
    """An Ed25519 key pair and its peer id."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self.private_key = private_key
        self.public_key: bytes = private_key.public_key().public_bytes_raw()
        self.peer_id = PeerID.from_public_key(self.public_key)

    @classmethod
    def generate(cls, rng: random.Random | None = None) -> Identity:
        """A new identity. With ``rng`` it is reproducible, for simulations only."""
        if rng is None:
            return cls(Ed25519PrivateKey.generate())
        return cls(Ed25519PrivateKey.from_private_bytes(rng.randbytes(32)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Read the contents of an identity file.

        Raises:
            ValueError: not an Ed25519 identity, or a damaged one.
        """
        if len(data) != len(_FILE_HEADER) + 64 or not data.startswith(_FILE_HEADER):
            raise ValueError(
                "this is not an Ed25519 identity (68 bytes in libp2p's private key format): delete the file to get a "
                "new one"
            )
        identity = cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))
        if identity.public_key != data[36:]:
            raise ValueError("the identity is damaged: its public half does not belong to its private half")
        return identity

    def to_bytes(self) -> bytes:
        """The private key in the format of an identity file. Keep it secret."""
        return _FILE_HEADER + self.private_key.private_bytes_raw() + self.public_key

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """Load the identity at ``path``, or make one and save it there, readable by its owner alone.

        Raises:
            FileNotFoundError: the directory does not exist.
            P2PDaemonError: the file is not an identity, or other users can read it.
        """
        try:
            return cls.create(path)
        except FileExistsError:
            return cls._load(Path(path))

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Identity:
        """Make an identity and save it at ``path``, readable by its owner alone.

        Raises:
            FileExistsError: something exists at ``path`` already.
            FileNotFoundError: the directory does not exist.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot keep an identity in {path}: the directory {path.parent} does not exist")
        descriptor = os.open(path, NEW_BINARY_FILE, 0o600)
        identity = cls.generate()
        try:
            os.write(descriptor, identity.to_bytes())
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return identity

    @classmethod
    def _load(cls, path: Path) -> Identity:
        if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise P2PDaemonError(f"identity file {path} can be read by other users: run {make_private(path)}")
        try:
            return cls.from_bytes(path.read_bytes())
        except (ValueError, OSError) as e:
            raise P2PDaemonError(f"cannot use identity file {path}: {one_line(str(e))}") from None

    def sign(self, message: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        return self.private_key.sign(message)

    def certificate_pem(self) -> tuple[bytes, bytes]:
        """A self-signed X.509 certificate of this key, and the key, both as PEM.

        Names, dates and issuers are not checked: only the key counts, and the peer id contains it.
        """
        # Imported on demand: these two take longer than everything else that `import shoal` loads besides torch.
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.x509.oid import NameOID

        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.peer_id.to_base58())])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.private_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(2000, 1, 1))
            .not_valid_after(datetime.datetime(9999, 12, 31))
            .sign(self.private_key, None)
        )
        key = self.private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM), key


def is_weak_key(public_key: bytes) -> bool:
    """Whether this raw Ed25519 key proves nothing, because anyone can sign for it."""
    return public_key[:31] + bytes([public_key[31] & 0x7F]) in _WEAK_KEYS if len(public_key) == 32 else False


def verify_signature(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` over ``message`` was made with the private half of this raw Ed25519 key."""
    if is_weak_key(public_key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of_certificate(certificate_der: bytes) -> PeerID | None:
    """The peer id of a certificate's key, or ``None`` if that is not a usable Ed25519 key."""
    from cryptography import x509

    try:
        public_key = x509.load_der_x509_certificate(certificate_der).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, Warning):
        return None
    if not isinstance(public_key, Ed25519PublicKey) or is_weak_key(public_key.public_bytes_raw()):
        return None
    return PeerID.from_public_key(public_key.public_bytes_raw())


Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
"""A name on the wire. Make it printable before you show it, see :func:`~shoal.base.logs.shown_name`."""


def default_name() -> str:
    """The value of ``SHOAL_NAME`` if that is set, even if it is empty; otherwise the host and the process."""
    chosen = os.environ.get("SHOAL_NAME", os.environ.get("HIVEMIND_NAME"))
    if chosen is not None:
        return checked_name(chosen, "SHOAL_NAME")
    host, process = socket.gethostname().partition(".")[0], f"-{os.getpid()}"
    return shown_name(f"{shown_name(host)[: MAX_NAME_CHARACTERS - len(process)]}{process}")


def checked_name(name: object, option: str = "name") -> str:
    """Check a name that the user has given.

    Raises:
        TypeError: it is no text.
        ValueError: it is too long, or has characters that cannot be printed.
    """
    if not isinstance(name, str):
        raise TypeError(f"{option} must be a text such as 'laptop', or '' for no name, got {name!r}")
    if name != shown_name(name):
        raise ValueError(
            f"{option} must have at most {MAX_NAME_CHARACTERS} printable characters, with single spaces at most, got "
            f"{name[: 2 * MAX_NAME_CHARACTERS]!r}"
        )
    return name
