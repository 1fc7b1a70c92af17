"""Who a peer is: the identifier made from its public key.

The format is that of libp2p (https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md): the multihash of the
protobuf-encoded public key. An Ed25519 key is short enough for the identity hash, so the id *contains* the key.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import total_ordering

import base58

from shoal.p2p.multiaddr import Multiaddr

_ED25519_PROTOBUF = b"\x08\x01\x12\x20"
_ED25519_MULTIHASH = b"\x00\x24" + _ED25519_PROTOBUF
PUBLIC_KEY_BYTES = 32
_MAX_TEXT_LENGTH = 256


@total_ordering
class PeerID:
    """Identifier of a peer, hashable and ordered by its base58 text.

    Args:
        peer_id_bytes: the multihash; any bytes are taken as they are.
    """

    __slots__ = ("_base58", "_bytes")

    def __init__(self, peer_id_bytes: bytes) -> None:
        if not isinstance(peer_id_bytes, (bytes, bytearray, memoryview)):
            raise TypeError(f"PeerID is made from bytes, got {peer_id_bytes!r}; use PeerID.from_base58 for text")
        self._bytes = bytes(peer_id_bytes)
        self._base58: str | None = None

    @classmethod
    def from_base58(cls, text: str) -> PeerID:
        """Parse the usual text form, ``12D3KooW…``.

        Raises:
            ValueError: the text is not base58.
        """
        try:
            if len(text) > _MAX_TEXT_LENGTH:  # decoding takes time in the square of the length
                raise ValueError("it is too long")
            return cls(base58.b58decode(text))
        except ValueError as e:
            raise ValueError(f"{text!r} is not a peer id such as 12D3KooW…: {e}") from None

    @classmethod
    def from_public_key(cls, public_key: bytes) -> PeerID:
        """The id of the peer with this raw Ed25519 public key (32 bytes)."""
        if len(public_key) != PUBLIC_KEY_BYTES:
            raise ValueError(f"an Ed25519 public key has 32 bytes, got {len(public_key)}")
        return cls(_ED25519_MULTIHASH + public_key)

    @classmethod
    def from_identity(cls, data: bytes) -> PeerID:
        """The id of the peer with this private key, given as the contents of an identity file."""
        from shoal.p2p.identity import Identity

        return Identity.from_bytes(data).peer_id

    @property
    def public_key(self) -> bytes | None:
        """The raw Ed25519 key inside the id, or ``None`` if the id was not made from such a key."""
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
    """Split ``/ip4/…/tcp/…/p2p/<id>`` into where and who.

    Raises:
        ValueError: the address does not end with a valid ``/p2p/<peer id>``.
    """
    items = address.items()
    if len(items) < 2 or items[-1][0] != "p2p" or items[-1][1] is None:
        raise ValueError(f"{address} does not say which peer to expect: it must end with /p2p/<peer id>")
    peer_id = PeerID.from_base58(items[-1][1])
    if peer_id.public_key is None:
        raise ValueError(f"{address} names a peer id that is not made from an Ed25519 key (12D3KooW…)")
    return address.decapsulate(f"/p2p/{items[-1][1]}"), peer_id
