"""Records that only their owner can write: Ed25519 signatures inside the DHT.

A record is protected if its subkey contains ``[owner:<public key>]``, with the public key in OpenSSH's text form. Its
value must then end with ``[signature:<base64>]``, a signature over key, subkey, value and expiration time. So a
captured record can be repeated, but neither changed nor prolonged. A plain value cannot replace a dictionary that has
an owned entry, and makes way for one. An owner tag in a *key* protects nothing, because keys travel as hashes.

Every node checks such records, and signs those with the tag of its own peer. Averagers and donors use them to declare
themselves.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
import threading
from contextlib import suppress

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519

from shoal.base.bounded import MOST
from shoal.base.logs import one_line, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.storage import MAX_SUBKEY_REMEMBERED
from shoal.dht.validation import AcceptedRecords, CompositeValidator, DHTRecord, Reason, RecordValidatorBase
from shoal.peers.identity import PUBLIC_KEY_BYTES, Identity, PeerID, is_weak_key

_OWNER_TAG = re.compile(rb"\[owner:(.+?)\]", re.DOTALL)
_SIGNATURE = re.compile(rb"\[signature:([A-Za-z0-9+/]{86}==)\]")
_SIGNATURE_LENGTH = len(b"[signature:]") + 88
# Part of all signed data here, so that no signature can be used for another purpose.
_PURPOSE = b"shoal dht record 1"
# The prefix of every Ed25519 key in OpenSSH's text form, and in decoded form.
_SSH_NAME, _SSH_HEADER = b"ssh-ed25519 ", b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
_SSH_LENGTH = len(_SSH_NAME) + 4 * (len(_SSH_HEADER) + PUBLIC_KEY_BYTES) // 3


class PublicKey:
    """An Ed25519 public key."""

    def __init__(self, public_key: ed25519.Ed25519PublicKey) -> None:
        self._public_key = public_key

    @classmethod
    def from_bytes(cls, data: bytes) -> PublicKey:
        """Read ``ssh-ed25519 AAAA…``.

        Raises:
            ValueError: it is not an Ed25519 public key in OpenSSH form, or it is a weak key that proves nothing.
        """
        raw = _raw_key_of(data)
        if is_weak_key(raw):
            raise ValueError("this Ed25519 key has no private half: anyone can make signatures that fit it")
        return cls(ed25519.Ed25519PublicKey.from_public_bytes(raw))

    def to_bytes(self) -> bytes:
        """``ssh-ed25519 AAAA…``"""
        return _SSH_NAME + base64.b64encode(_SSH_HEADER + self.raw)

    @property
    def owner_tag(self) -> bytes:
        """The tag for subkeys that only the owner of the private half may write."""
        return b"[owner:" + self.to_bytes() + b"]"

    @property
    def raw(self) -> bytes:
        """The 32 bytes of the key itself."""
        return self._public_key.public_bytes_raw()

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether ``signature`` (base64) over ``data`` was made with the private half of this key."""
        try:
            raw = base64.b64decode(signature, validate=True)
            self._public_key.verify(raw, data)
        except (InvalidSignature, binascii.Error, ValueError):
            return False
        # Several base64 texts decode to the same bytes; accept only the canonical one.
        return base64.b64encode(raw) == signature

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return PublicKey.from_bytes, (self.to_bytes(),)


class PrivateKey:
    """An Ed25519 key pair that owns records.

    Args:
        private_key: default: a new one.
    """

    def __init__(self, private_key: ed25519.Ed25519PrivateKey | None = None) -> None:
        self._private_key = private_key or ed25519.Ed25519PrivateKey.generate()

    @classmethod
    def process_wide(cls) -> PrivateKey:
        """The key that all validators of this process share, unless they get another one."""
        with _MAKING_A_KEY:
            return _key_of_this_process()

    @classmethod
    def from_bytes(cls, data: bytes) -> PrivateKey:
        """Read what :meth:`to_bytes` made.

        Raises:
            ValueError: there are not 32 bytes.
        """
        return cls(ed25519.Ed25519PrivateKey.from_private_bytes(data))

    def to_bytes(self) -> bytes:
        """The 32 secret bytes."""
        return self._private_key.private_bytes_raw()

    def get_public_key(self) -> PublicKey:
        """The public half."""
        return PublicKey(self._private_key.public_key())

    def sign(self, data: bytes) -> bytes:
        """Signature over ``data`` in base64, 88 bytes."""
        return base64.b64encode(self._private_key.sign(data))

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return PrivateKey.from_bytes, (self.to_bytes(),)


def _raw_key_of(data: bytes) -> bytes:
    """The 32 bytes of an Ed25519 key in OpenSSH's text form.

    Raises:
        ValueError: it is no such key.
    """
    # Keys that shoal wrote are read without the parser, which takes several times as long as the rest of the check.
    # Such a text has one form only: its base64 needs no padding.
    if len(data) == _SSH_LENGTH and data.startswith(_SSH_NAME):
        with suppress(binascii.Error):
            decoded = base64.b64decode(data[len(_SSH_NAME) :], validate=True)
            if decoded.startswith(_SSH_HEADER):
                return decoded[len(_SSH_HEADER) :]
    # Loaded on demand: it takes longer than the rest of this module.
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        public_key = load_ssh_public_key(data)
    except Exception as e:
        # The bytes may be hostile, and the parser's exceptions differ between versions.
        raise ValueError(f"not a public key in OpenSSH form: {type(e).__name__}: {one_line(str(e))}") from None
    if not isinstance(public_key, ed25519.Ed25519PublicKey):
        raise ValueError(f"only Ed25519 keys are supported, got {type(public_key).__name__}")
    return public_key.public_bytes_raw()


# Cached, because the same few owners recur. The cache is bounded, because strangers can make up any number of them.
@functools.lru_cache(MOST)
def _key_of_owner(owner: bytes) -> PublicKey:
    """The key in an owner tag; raises what :meth:`PublicKey.from_bytes` raises."""
    return PublicKey.from_bytes(owner)


@functools.lru_cache(MOST)
def tag_of(peer: PeerID) -> bytes:
    """The owner tag of a peer; only the peer itself can write under it.

    Raises:
        ValueError: its id does not contain an Ed25519 key.
    """
    if peer.public_key is None:
        raise ValueError(f"peer {peer} cannot own records: its id contains no Ed25519 key")
    return PublicKey(ed25519.Ed25519PublicKey.from_public_bytes(peer.public_key)).owner_tag


def peer_of(tag: object) -> PeerID:
    """The peer whose owner tag this is.

    Raises:
        ValueError: it is not the tag of a peer.
    """
    if not isinstance(tag, bytes):
        raise ValueError(f"{quoted(tag)} is no peer's tag")
    return _peer_of(tag)


@functools.lru_cache(MOST)
def _peer_of(tag: bytes) -> PeerID:
    owners = _OWNER_TAG.fullmatch(tag)
    if owners is None:
        raise ValueError(f"{quoted(tag)} is no peer's tag")
    return PeerID.from_public_key(_key_of_owner(owners.group(1)).raw)


# functools.cache alone would let two threads make two keys.
_MAKING_A_KEY = threading.Lock()


@functools.cache
def _key_of_this_process() -> PrivateKey:
    return PrivateKey()


def _owner_tags(data: bytes) -> list[bytes]:
    """Find the owner tags, up to the last ``]``. Behind it the pattern could scan to the end once per ``[owner:``."""
    return _OWNER_TAG.findall(data, 0, data.rfind(b"]") + 1)


def _owners_in(data: bytes) -> tuple[bytes, ...]:
    """The distinct owners named in a key or a subkey."""
    return tuple(dict.fromkeys(_owner_tags(data)))


# Cached, because averagers and trackers use the same subkeys repeatedly.
_known_owners_in = functools.lru_cache(MOST)(_owners_in)


class SignatureValidator(RecordValidatorBase):
    """Protects records whose subkey contains an owner tag; all other records pass untouched.

    Args:
        private_key: signs records that carry this key's tag; by default one key shared by the whole process.
    """

    reason = Reason.WRONG_SIGNATURE

    def __init__(self, private_key: PrivateKey | None = None) -> None:
        private_key = PrivateKey.process_wide() if private_key is None else private_key
        self._local_public_key = private_key.get_public_key().owner_tag
        self._private_keys = {self._local_public_key: private_key}
        self.accepted = AcceptedRecords()
        """Records with a signature that is known to be valid."""

    @property
    def local_public_key(self) -> bytes:
        """The owner tag for subkeys that only this peer may write."""
        return self._local_public_key

    def validate(self, record: DHTRecord) -> bool:
        owners = self._owners(record)
        if not owners:
            return True
        if record in self.accepted:
            return True
        if len(owners) > 1 or not self._is_signed_by(owners[0], record):
            return False
        self.accepted.add(record)
        return True

    @staticmethod
    def _owners(record: DHTRecord) -> tuple[bytes, ...]:
        if b"[owner:" in record.key:  # by chance only: the key is a hash
            return tuple(dict.fromkeys(_owner_tags(record.key) + _owner_tags(record.subkey)))
        if len(record.subkey) <= MAX_SUBKEY_REMEMBERED:
            return _known_owners_in(record.subkey)
        return _owners_in(record.subkey) if b"[owner:" in record.subkey else ()

    @staticmethod
    def _signature_of(record: DHTRecord) -> re.Match[bytes] | None:
        """The signature at the end of the value, if it is the only one in it."""
        signatures = list(_SIGNATURE.finditer(record.value))
        return signatures[0] if len(signatures) == 1 and signatures[0].end() == len(record.value) else None

    def _is_signed_by(self, owner: bytes, record: DHTRecord) -> bool:
        signature = self._signature_of(record)
        if signature is None:
            return False
        try:
            public_key = _key_of_owner(owner)
        except ValueError:
            return False
        return public_key.verify(self.signed_bytes(record, record.value[: signature.start()]), signature.group(1))

    def is_proven_by_peer(self, record: DHTRecord, peer: PeerID) -> bool:
        """Whether the owner itself has sent the record, with something that looks like a signature."""
        owners = self._owners(record)
        if len(owners) != 1 or peer.public_key is None or self._signature_of(record) is None:
            return False
        try:
            return _key_of_owner(owners[0]).raw == peer.public_key
        except ValueError:
            return False

    @staticmethod
    def signed_bytes(record: DHTRecord, value: bytes) -> bytes:
        """The bytes that are signed."""
        return MSGPackSerializer.dumps([_PURPOSE, record.key, record.subkey, value, float(record.expiration_time)])

    def sign_value(self, record: DHTRecord) -> bytes:
        for owner_tag, private_key in self._private_keys.items():
            if owner_tag in record.key or owner_tag in record.subkey:
                signature = private_key.sign(self.signed_bytes(record, record.value))
                signed = record.value + b"[signature:" + signature + b"]"
                # This record comes back from others and from this node's own storage. Odd ones are checked then.
                if self._owners(record) == _owners_in(owner_tag) and _SIGNATURE.search(record.value) is None:
                    self.accepted.add(DHTRecord(record.key, record.subkey, signed, record.expiration_time))
                return signed
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        if not self._owners(record):
            # Without an owner, anything that looks like a signature is the user's own data.
            return record.value
        start = len(record.value) - _SIGNATURE_LENGTH
        is_signed = start >= 0 and _SIGNATURE.fullmatch(record.value, start) is not None
        return record.value[:start] if is_signed else record.value

    def is_forged(self, record: DHTRecord) -> bool:
        return not self.validate(record)

    def is_owned(self, record: DHTRecord) -> bool:
        return bool(self._owners(record))

    @property
    def priority(self) -> int:
        """Signs last and validates first, so that the signature covers what other validators added."""
        return 10

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Adopt the other's private keys. One validator is enough to verify all signatures."""
        if not isinstance(other, SignatureValidator):
            return False
        self._private_keys = {**other._private_keys, **self._private_keys}
        return True

    def __getstate__(self) -> dict[str, object]:
        return {"_local_public_key": self._local_public_key, "_private_keys": self._private_keys}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.accepted = AcceptedRecords()


def with_signatures(validator: RecordValidatorBase | None, identity: Identity) -> CompositeValidator:
    """Add the check of owned records, which every node makes, to the user's rules. It also signs this node's records.

    Args:
        validator: the user's validator; a composite is extended in place.
    """
    composite = CompositeValidator.of(validator)
    composite.extend([SignatureValidator(PrivateKey(identity.private_key))])
    return composite


Ed25519PrivateKey = RSAPrivateKey = PrivateKey
Ed25519PublicKey = RSAPublicKey = PublicKey
Ed25519SignatureValidator = RSASignatureValidator = SignatureValidator
"""Aliases: programs in this field use the names with RSA. The keys are Ed25519 in any case."""
