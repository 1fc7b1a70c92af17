"""Tokens: the line of text or file that lets a user take part in a private run.

===================  =========================  ====================================================================
text                 holds                      use
===================  =========================  ====================================================================
``shoal-run-…``      the secret key of the run  a run among friends: each peer that has it grants itself a badge
``shoal-invite-…``   a delegate's key and its   an invitation for any number of guests, whose peer ids need not be
                     grant                      known; a guest grants itself a badge
``shoal-badge-…``    a badge for one peer id    no secret; needs the identity file of that peer
===================  =========================  ====================================================================

The prefix is followed by the base58 form of a small msgpack array and the first bytes of its SHA-256, which reveal a
missing or wrong character.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import base58
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from shoal.access.badges import (
    ANY_ROLE,
    MAX_GRANTS,
    ROLES_BY_NAME,
    Badge,
    Chain,
    Grant,
    Roles,
    badge_of,
    grant,
)
from shoal.base.logs import MAX_NAME_CHARACTERS, one_line, setting
from shoal.errors import NotAMemberError, P2PDaemonError, make_private
from shoal.peers.identity import NEW_BINARY_FILE, PUBLIC_KEY_BYTES, Identity, PeerID

RUN, INVITATION, BADGE = "shoal-run-", "shoal-invite-", "shoal-badge-"
CHECKSUM_BYTES = 4  # chosen: misses one damaged text in four billion
# Chosen: the time to decode grows with the square of the length.
MAX_TEXT_CHARACTERS = 2048
DAY = 24 * 60 * 60
# The lifetime of a badge that its owner has granted itself (chosen); the owner renews it in time.
OWN_BADGE_SECONDS = 30 * DAY

KINDS = {
    RUN: "the secret key of a run",
    INVITATION: "an invitation",
    BADGE: "a badge",
}


class _Content(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: Literal[1]
    run_name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
    run_key: Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    secret: Annotated[bytes, Meta(max_length=32)]
    chain: Annotated[list[Grant], Meta(max_length=MAX_GRANTS)]
    roles: Annotated[int, Meta(ge=1, le=int(ANY_ROLE))]


_content_decoder = msgspec.msgpack.Decoder(_Content)


@dataclass(frozen=True)
class Token:
    """A token that has been read."""

    kind: str
    """One of the prefixes: :data:`RUN`, :data:`INVITATION` or :data:`BADGE`."""
    run_name: str
    run_key: bytes
    """The public half of the run's key."""
    chain: Chain
    """From the run key to the signer, or to the peer of a badge."""
    signer: Identity | None
    """The run or delegate that grants badges. A badge has no signer."""
    roles: Roles
    """The roles of its holder."""

    @classmethod
    def new_run(cls, name: str) -> Token:
        """A new private run; the token is its secret key.

        Raises:
            ValueError: the name is too long.
        """
        if len(name) > MAX_NAME_CHARACTERS:
            raise ValueError(f"a name has at most {MAX_NAME_CHARACTERS} characters, got {len(name)}")
        run = Identity.generate()
        return cls(RUN, name, run.public_key, (), run, ANY_ROLE)

    @property
    def run(self) -> str:
        """A short form of the run: its name, and the start of its key."""
        return f"{self.run_name} ({base58.b58encode(self.run_key).decode()[:8]})"

    @property
    def content(self) -> Badge | None:
        """The badge of its chain; ``None`` for the key of a run."""
        return badge_of(self.run_key, self.chain) if self.chain else None

    @property
    def text(self) -> str:
        """The token as text. All but a badge are secret."""
        secret = b"" if self.signer is None else self.signer.private_key.private_bytes_raw()
        content = _Content(1, self.run_name, self.run_key, secret, list(self.chain), int(self.roles))
        packed = msgspec.msgpack.encode(content)
        return self.kind + base58.b58encode(packed + _checksum(self.kind, packed)).decode()

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read the text of a token.

        Raises:
            ValueError: it is damaged, or no token at all.
        """
        kind = next((kind for kind in KINDS if text.startswith(kind)), None)
        if kind is None:
            raise ValueError(f"a token begins with {', '.join(KINDS)}")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ValueError(f"a token has at most {MAX_TEXT_CHARACTERS} characters, got {len(text)}")
        try:
            raw = base58.b58decode(text[len(kind) :])
        except ValueError:
            raise ValueError("the token contains an invalid character: copy the whole text again") from None
        packed, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if checksum != _checksum(kind, packed):
            raise ValueError("the token is damaged, a character is missing or wrong: copy the whole text again")
        try:
            content = _content_decoder.decode(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise ValueError(
                f"the token was made by another version of shoal, or by hand: {one_line(str(e))}"
            ) from None
        return cls._of_content(kind, content)

    @classmethod
    def _of_content(cls, kind: str, content: _Content) -> Token:
        signer, chain = None, tuple(content.chain)
        if len(content.secret) != (0 if kind == BADGE else 32) or bool(chain) == (kind == RUN):
            raise ValueError("the token contradicts itself: ask for a new one")
        if content.secret:
            signer = Identity(Ed25519PrivateKey.from_private_bytes(content.secret))
        holder = content.run_key
        if chain:
            try:
                badge = badge_of(content.run_key, chain)
            except NotAMemberError as e:
                raise ValueError(f"the token is worth nothing ({e}): ask for a new one") from None
            holder = chain[-1].subject
            if kind == INVITATION and (len(chain) >= MAX_GRANTS or Roles.ISSUE not in badge.roles):
                raise ValueError("the token is no invitation: its holder may not let anybody in")
            if content.roles & ~badge.roles:
                raise ValueError("the token claims more than was granted: ask for a new one")
        if signer is not None and signer.public_key != holder:
            raise ValueError("the token contradicts itself: its key is not the one that was granted access")
        return cls(kind, content.run_name, content.run_key, chain, signer, Roles(content.roles))

    # --- granting -----------------------------------------------------------------------------------------------------

    def invite(
        self,
        roles: Roles,
        expires: int,
        *,
        peer: PeerID | None = None,
        name: str = "",
        holder: Identity | None = None,
    ) -> Token:
        """A token for others: an invitation, or with ``peer`` a badge for this peer alone.

        Args:
            roles: the roles of the new holder.
            expires: DHT time.
            name: the name of the new holder, for people. Peers that meet the holder can read it.
            holder: the identity of this token's holder; only needed if this token is a badge.

        Raises:
            ValueError: this token does not allow that.
        """
        signer = self.signer or holder
        if signer is None or (self.chain and self.chain[-1].subject != signer.public_key):
            raise ValueError("only its peer can invite others with a badge: give the identity file of that peer")
        if peer is not None:
            if peer.public_key is None:
                raise ValueError(
                    f"{str(peer)!r} is not a peer id made from an Ed25519 key (12D3KooW…): is a character missing or "
                    "wrong?"
                )
            chain = grant(self.run_key, self.chain, signer, peer.public_key, roles, expires, name)
            return Token(BADGE, self.run_name, self.run_key, chain, None, roles)
        if len(self.chain) + 1 >= MAX_GRANTS:
            raise ValueError("this invitation was passed on already, and cannot be passed on again: give its text away")
        delegate = Identity.generate()
        chain = grant(self.run_key, self.chain, signer, delegate.public_key, roles | Roles.ISSUE, expires, name)
        return Token(INVITATION, self.run_name, self.run_key, chain, delegate, roles)

    def chain_for(self, identity: Identity, now: float) -> Chain:
        """The badge of a peer that has this token: the one in it, or a new one that the peer grants itself.

        Raises:
            P2PDaemonError: the badge in it is for another peer.
        """
        if self.signer is not None:
            expires = int(now) + OWN_BADGE_SECONDS
            return grant(self.run_key, self.chain, self.signer, identity.public_key, self.roles, expires)
        if self.chain[-1].subject != identity.public_key:
            raise P2PDaemonError(
                f"the token is a badge for peer {PeerID.from_public_key(self.chain[-1].subject)}, but this peer is "
                f"{identity.peer_id}: give the identity_path (--identity-path) of that peer, or ask for an invitation"
            )
        return self.chain


def _checksum(kind: str, packed: bytes) -> bytes:
    return hashlib.sha256(kind.encode() + packed).digest()[:CHECKSUM_BYTES]


def roles_named(name: str) -> Roles:
    """The roles that are granted under a name.

    Raises:
        ValueError: there is no such role.
    """
    if name not in ROLES_BY_NAME:
        raise ValueError(f"there is no role {name!r}: use one of {', '.join(ROLES_BY_NAME)}")
    return ROLES_BY_NAME[name]


def given_token(token: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """The token that the user has given, by argument or else by ``SHOAL_TOKEN``. Empty text means an open run."""
    return setting("TOKEN") if token is None else token


def path_of(token: str | os.PathLike[str]) -> Path | None:
    """The file, if a token is given as one."""
    return None if isinstance(token, str) and token.strip().startswith(tuple(KINDS)) else Path(token)


def read_token(token: str | os.PathLike[str]) -> Token:
    """Read a token: text, or a file that contains the text.

    Raises:
        P2PDaemonError: it cannot be read, is damaged, or is a secret that other users of this machine can read.
    """
    path = path_of(token)
    where = "the token" if path is None else f"token file {path}"
    try:
        found = Token.parse(str(token).strip() if path is None else _text_of(path))
    except (OSError, ValueError) as e:
        what: object = e.strerror if isinstance(e, OSError) else e
        if isinstance(e, FileNotFoundError):
            what = f"{what}; the text of a token begins with {', '.join(KINDS)}"
        raise P2PDaemonError(f"cannot use {where}: {what}") from None
    if path is not None and found.signer is not None and _is_open_to_others(path):
        raise P2PDaemonError(f"{where} holds a secret and can be read by other users: run {make_private(path)}")
    return found


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(2 * MAX_TEXT_CHARACTERS)
    return data.decode("ascii").strip()


def _is_open_to_others(path: Path) -> bool:
    return os.name == "posix" and bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def write_token(path: str | os.PathLike[str], token: Token) -> None:
    """Save a token in a new file that only its owner can read.

    Raises:
        FileExistsError: something is there already.
    """
    with os.fdopen(os.open(path, NEW_BINARY_FILE, 0o600), "wb") as file:
        file.write(token.text.encode() + b"\n")
