"""Badges: chains of signatures from the key of a run to the key of a peer.

A run with a key is private. The public half of the key identifies the run; the secret half grants access::

    run key ──signs──► grant to a delegate ──signs──► grant to a peer      = the peer's badge, 1 to 3 grants

A grant names the key that gets access, its roles, and the expiry. Roles only shrink along the chain, and the earliest
expiry counts. Granting to others needs the role ``ISSUE``. Each signature covers the run key, which the badge itself
does not contain, so a badge does not reveal its run to a peer that does not know the key.

A :class:`RevocationList`, signed by the run key, takes access back. A key on it is void, and so are all of its grants.

Everything here is a plain value: no network, no clock.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.base.bounded import MOST
from shoal.base.logs import MAX_NAME_CHARACTERS, one_line, quoted
from shoal.errors import NotAMemberError
from shoal.peers.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, PeerID, verify_signature

# Chosen: the run key, a delegate and a guest of it. Each grant takes about 200 bytes.
MAX_GRANTS = 3
# Derived: ``MAX_GRANTS`` grants, with room.
MAX_BADGE_BYTES = 1024
# Keys on a list of revocations. Chosen: the list takes 140 kB, and a message has at most a megabyte.
MAX_REVOKED = 4096

GRANT_PURPOSE, REVOCATION_PURPOSE = "shoal grant 1", "shoal revocations 1"

_Key = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
_Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
# The latest DHT time, in the year 3000 (chosen): not every system can format later dates.
MAX_SECONDS = 32_503_680_000
_Seconds = Annotated[int, Meta(ge=0, le=MAX_SECONDS)]


class Roles(IntFlag):
    """What a member may do."""

    TRAIN = 1
    """Take part in training: average, send and download states."""
    RELAY = 2
    """Help others to find each other: be a node of the DHT, and store records."""
    MONITOR = 4
    """Read the DHT, and the reports of peers about themselves."""
    ISSUE = 8
    """Grant its own roles to others."""


ANY_ROLE = Roles.TRAIN | Roles.RELAY | Roles.MONITOR | Roles.ISSUE

ROLES_BY_NAME = {
    "train": Roles.TRAIN | Roles.RELAY | Roles.MONITOR,
    "relay": Roles.RELAY | Roles.MONITOR,
    "monitor": Roles.MONITOR,
    "issue": ANY_ROLE,
}
"""The roles that can be granted, by the name of the highest role."""


def name_of(roles: Roles) -> str:
    """The highest role in words, such as ``train``, or ``train, and invite others``."""
    highest = next((name for name, held in ROLES_BY_NAME.items() if held & ~roles == 0), "none")
    return f"{highest}, and invite others" if Roles.ISSUE in roles else highest


class Grant(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Access for one key."""

    version: Literal[1]
    issuer: Annotated[bytes, Meta(max_length=PUBLIC_KEY_BYTES)]
    """The key that signs; empty for the run key, which is not sent."""
    subject: _Key
    roles: Annotated[int, Meta(ge=1, le=int(ANY_ROLE))]
    expires: _Seconds
    """DHT time."""
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
    """The name of the holder, for people."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    def signed_bytes(self, run_key: bytes) -> bytes:
        """The bytes that the issuer signs."""
        fields = [GRANT_PURPOSE, run_key, self.issuer, self.subject, self.roles, self.expires, self.name]
        return msgspec.msgpack.encode(fields)


Chain = tuple[Grant, ...]
"""Grants, each signed by the subject of the one before; the first is signed by the run key."""


@dataclass(frozen=True)
class Badge:
    """The content of a valid badge."""

    peer: PeerID
    roles: Roles
    expires: int
    """DHT time."""
    name: str
    keys: frozenset[bytes]
    """The keys of the chain, including the peer's own. If one of them is revoked, the badge is void."""


def grant(
    run_key: bytes, chain: Chain, issuer: Identity, subject: bytes, roles: Roles, expires: int, name: str = ""
) -> Chain:
    """Extend a chain: the issuer grants access to another key.

    Args:
        run_key: the public half of the run's key.
        chain: the chain from the run key to the issuer; empty if the issuer is the run key.
        expires: DHT time; the chain may expire earlier.

    Raises:
        ValueError: the chain would be too long, the name is too long, or the issuer may not grant this.
    """
    if len(chain) >= MAX_GRANTS:
        raise ValueError(f"a badge has at most {MAX_GRANTS} grants, so this invitation cannot be passed on any further")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"a name has at most {MAX_NAME_CHARACTERS} characters, got {quoted(name)}")
    if chain:
        held = Roles(chain[-1].roles)
        if Roles.ISSUE not in held or roles & ~held:
            raise ValueError(
                f"{name_of(roles)} cannot be granted with a token that allows: {name_of(held)}; ask who has invited you"
            )
        expires = min(expires, *(each.expires for each in chain))
    unsigned = Grant(1, chain[-1].subject if chain else b"", subject, int(roles), expires, name)
    signature = issuer.sign(unsigned.signed_bytes(run_key))
    return (*chain, msgspec.structs.replace(unsigned, signature=signature))


def encode_badge(chain: Chain) -> bytes:
    """The badge in the form that is shown to others."""
    return msgspec.msgpack.encode(chain)


_decoder = msgspec.msgpack.Decoder(Annotated[list[Grant], Meta(min_length=1, max_length=MAX_GRANTS)])


# Cached, because checking a signature takes a tenth of a millisecond.
@functools.lru_cache(MOST)
def read_badge(run_key: bytes, data: bytes) -> Badge:
    """Check the signatures of a badge, but not whether it has expired or is revoked.

    Raises:
        NotAMemberError: it is no valid badge of this run.
    """
    if not data:
        raise NotAMemberError("no badge was shown", reason="not a member")
    if len(data) > MAX_BADGE_BYTES:
        raise NotAMemberError(f"the badge has {len(data)} bytes, over {MAX_BADGE_BYTES}", reason="broken")
    try:
        chain = tuple(_decoder.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise NotAMemberError(f"the badge cannot be read: {one_line(str(e))}", reason="broken") from None
    return badge_of(run_key, chain)


def badge_of(run_key: bytes, chain: Chain) -> Badge:
    """Check the grants of a chain; raises what :func:`read_badge` raises."""
    issuer, told, held = run_key, b"", ANY_ROLE
    for number, each in enumerate(chain):
        if each.issuer != told:
            raise NotAMemberError("the badge is broken: the grants do not belong together", reason="broken")
        if Roles.ISSUE not in held or each.roles & ~held:
            raise NotAMemberError("the badge is broken: it grants more than its issuer may grant", reason="broken")
        if not verify_signature(issuer, each.signature, each.signed_bytes(run_key)):
            if number == 0:
                raise NotAMemberError("the badge is for another run", reason="another run")
            raise NotAMemberError("the badge is broken: a signature is wrong", reason="broken")
        issuer = told = each.subject
        held = Roles(each.roles)
    return Badge(
        PeerID.from_public_key(issuer),
        held,
        min(each.expires for each in chain),
        chain[-1].name,
        frozenset(each.subject for each in chain),
    )


class RevocationList(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """All revoked keys. A list with a higher serial number replaces the others."""

    serial: Annotated[int, Meta(ge=1, lt=2**53)]
    keys: Annotated[list[_Key], Meta(max_length=MAX_REVOKED)]
    time: _Seconds
    """When it was made, in DHT time."""
    signature: _Signature

    @staticmethod
    def _signed(run_key: bytes, serial: int, keys: Sequence[bytes], time: int) -> bytes:
        return msgspec.msgpack.encode([REVOCATION_PURPOSE, run_key, serial, keys, time])

    @classmethod
    def make(cls, run: Identity, keys: Iterable[bytes], time: int, previous: RevocationList | None) -> RevocationList:
        """Revoke keys, in addition to those of the previous list.

        Raises:
            ValueError: there are more keys than a list can have.
        """
        all_keys = sorted({*keys, *(() if previous is None else previous.keys)})
        if len(all_keys) > MAX_REVOKED:
            raise ValueError(f"at most {MAX_REVOKED} keys can be revoked: make a new run key with `shoal token new`")
        serial = 1 if previous is None else previous.serial + 1
        return cls(serial, all_keys, time, run.sign(cls._signed(run.public_key, serial, all_keys, time)))

    def to_bytes(self) -> bytes:
        """The list as it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, run_key: bytes, data: bytes) -> RevocationList:
        """Read a list and check its signature.

        Raises:
            ValueError: it is not a list of this run.
        """
        try:
            found = _list_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise ValueError(f"not a list of revocations: {one_line(str(e))}") from None
        signed = cls._signed(run_key, found.serial, found.keys, found.time)
        if not verify_signature(run_key, found.signature, signed):
            raise ValueError("a list of revocations that the key of this run has not signed")
        return found


_list_decoder = msgspec.msgpack.Decoder(RevocationList)
