"""What a peer of a private run shows to others, and which peers it accepts.

Both sides of a connection show their badges in the handshake, see :mod:`~shoal.net.tcp.handshake`. The dialler checks
the listener's badge before it proves its own identity. The listener checks the dialler's badge before it reads anything
else, and tells it the reason of a refusal. Later calls on the connection only compare roles and times, see
:meth:`Membership.check`.

A peer of an open run has no membership. It shows no badge, and accepts all peers except those of private runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from shoal.access.badges import (
    ANY_ROLE,
    Badge,
    Chain,
    RevocationList,
    Roles,
    badge_of,
    encode_badge,
    name_of,
    read_badge,
)
from shoal.access.tokens import OWN_BADGE_SECONDS, Token, given_token, path_of, read_token
from shoal.base.clock import TOLERANCE_SECONDS, SwarmClock
from shoal.base.logs import Seldom, one_line
from shoal.errors import NotAMemberError, P2PDaemonError
from shoal.metrics import Metrics
from shoal.peers.identity import Identity, PeerID

logger = logging.getLogger(__name__)

# The file name of the revocation list beside a token file: the name of that file, and this suffix.
REVOKED_SUFFIX = ".revoked"
ADVICE = "`shoal token show` tells what a token allows; ask who has invited you for a new one"


class Membership:
    """A peer's place in a private run.

    Args:
        token: the user's token.
        identity: the identity of this peer.
        clock: tells the DHT time.
        metrics: counts refused peers.

    Raises:
        P2PDaemonError: the token is for another peer.
    """

    def __init__(self, token: Token, identity: Identity, clock: SwarmClock, metrics: Metrics) -> None:
        self.token = token
        self.run_key = token.run_key
        self.clock = clock
        self.revocations: RevocationList | None = None
        """The newest list of revoked keys."""
        self._revoked: frozenset[bytes] = frozenset()
        self._identity = identity
        self._metrics = metrics
        # A refused peer tries again and again, so warn at most once an hour.
        self._warn_seldom = Seldom(logger.warning, 3600.0)
        self._chain: Chain = token.chain_for(identity, clock.time())
        self._shown = encode_badge(self._chain)
        self.own = badge_of(self.run_key, self._chain)
        """This peer's badge."""

    @classmethod
    async def chosen(
        cls, token: str | os.PathLike[str] | None, identity: Identity, clock: SwarmClock, metrics: Metrics
    ) -> Membership | None:
        """The membership that the user has chosen by argument or environment; ``None`` for an open run.

        Raises:
            P2PDaemonError: the token cannot be used; the text says why.
        """
        given = given_token(token)
        if not given:
            return None
        path = path_of(given)
        if path is None:
            return cls(read_token(given), identity, clock, metrics)
        found = await asyncio.to_thread(read_token, path)
        membership = cls(found, identity, clock, metrics)
        kept = await asyncio.to_thread(kept_revocations, path, found.run_key)
        if kept is not None:
            membership.adopt(kept)
        return membership

    # --- this peer ----------------------------------------------------------------------------------------------------

    def shown_badge(self) -> bytes:
        """The badge to show now. A peer that grants itself badges renews its badge after half of the lifetime."""
        if self.token.signer is not None:
            left = self._chain[-1].expires - self.clock.time()
            # If more is left than the lifetime, the clock was set back, and others might not accept the badge.
            if not OWN_BADGE_SECONDS / 2 < left <= OWN_BADGE_SECONDS + 1:
                self._renew()
        return self._shown

    def _renew(self) -> None:
        chain = self.token.chain_for(self._identity, self.clock.time())
        if chain[-1].expires != self._chain[-1].expires:  # otherwise the invitation ends with this badge
            self._chain, self._shown = chain, encode_badge(chain)
            self.own = badge_of(self.run_key, chain)

    def describe(self) -> str:
        """This peer's place in a few words."""
        return f"run {self.token.run}, role {name_of(self.own.roles)}, until {date(self.own.expires)}"

    # --- others -------------------------------------------------------------------------------------------------------

    def admit(self, peer: PeerID, shown: bytes, *, dialled: bool) -> Badge:
        """Judge the badge that a peer has shown in the handshake.

        Args:
            peer: the peer, whose identity has been proven.
            dialled: whether this peer has dialled, perhaps to learn the DHT time.

        Raises:
            NotAMemberError: it is not accepted.
        """
        try:
            badge = read_badge(self.run_key, shown)
            if badge.peer != peer:
                raise NotAMemberError(f"the badge is that of peer {badge.peer}", reason="broken")
        except NotAMemberError as e:
            self._metrics.members_refused[e.reason] += 1
            raise
        self.check(badge, ANY_ROLE, dialled=dialled)
        return badge

    def check(self, badge: Badge | None, roles: Roles, *, dialled: bool) -> None:
        """Check that a connection may still be used for calls that need one of these roles of the other side.

        Raises:
            NotAMemberError: it may not.
        """
        try:
            self._check(badge, roles, dialled=dialled)
        except NotAMemberError as e:
            self._metrics.members_refused[e.reason] += 1
            raise

    def _check(self, badge: Badge | None, roles: Roles, *, dialled: bool) -> None:
        if badge is None:
            raise NotAMemberError("no badge was shown")
        if self.is_revoked(badge):
            raise NotAMemberError("the badge was revoked", reason="revoked")
        if self.has_expired(badge, dialled=dialled):
            text = f"the badge ({name_of(badge.roles)}) has expired: {date(badge.expires)}"
            raise NotAMemberError(f"{text}; it is {date(self.clock.time())} now", reason="expired")
        if not roles & badge.roles:
            raise NotAMemberError(
                f"the badge allows: {name_of(badge.roles)}. This call needs: {describe_roles(roles)}",
                reason="wrong role",
            )

    def has_expired(self, badge: Badge, *, dialled: bool) -> bool:
        """Whether a badge has expired, as far as this peer can tell.

        A newcomer's clock may be years off. The newcomer checks again when others have told it the time.
        """
        knows_time = bool(self.clock.samples) if dialled else not self.clock.is_joining
        return knows_time and self.seconds_left(badge) < 0

    def seconds_left(self, badge: Badge) -> float:
        """The seconds until a badge expires; negative afterwards."""
        return badge.expires + TOLERANCE_SECONDS - self.clock.time()

    def is_revoked(self, badge: Badge) -> bool:
        return bool(self._revoked) and not self._revoked.isdisjoint(badge.keys)

    def check_own(self, roles: Roles) -> None:
        """Check that this peer's own role allows a call, before the call is made.

        Raises:
            NotAMemberError: it is not.
        """
        if not roles & self.own.roles:
            text = f"the token of this peer allows: {name_of(self.own.roles)}. This call needs: {describe_roles(roles)}"
            self._warn_seldom("%s. Ask for a token with that role", text, about=text)
            raise NotAMemberError(text, reason="wrong role")

    def note_refused(self, peer: PeerID, error: NotAMemberError) -> None:
        """Warn the user that another peer has refused this one."""
        if error.reason != "wrong role":
            self._warn_seldom("%s", one_line(str(error)), about=peer)

    def note_stranger(self, peer: PeerID, error: NotAMemberError) -> None:
        """Warn the user that this peer has refused another one."""
        self._warn_seldom(
            "peer %s was refused: %s. If it belongs to this run, give it a token: shoal token invite",
            peer,
            error,
            about=peer,
        )

    # --- revocations --------------------------------------------------------------------------------------------------

    @property
    def serial(self) -> int:
        """The serial number of the newest revocation list; 0 if there is none."""
        return 0 if self.revocations is None else self.revocations.serial

    def adopt(self, found: RevocationList) -> bool:
        """Replace the list by a newer one; returns whether it is newer."""
        if found.serial <= self.serial:
            return False
        self.revocations, self._revoked = found, frozenset(found.keys)
        if self.is_revoked(self.own):
            logger.warning("this peer was expelled from its run: its badge is revoked. %s", ADVICE)
        return True


def kept_revocations(path: Path, run_key: bytes) -> RevocationList | None:
    """The revocation list beside a token file, or ``None``.

    Raises:
        P2PDaemonError: the file does not hold a list of this run.
    """
    kept = Path(f"{path}{REVOKED_SUFFIX}")
    try:
        return RevocationList.from_bytes(run_key, kept.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise P2PDaemonError(f"cannot use {kept}: {e}; delete it, and revoke again what was revoked") from None


def date(moment: float) -> str:
    """A DHT time for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))


def describe_roles(roles: Roles) -> str:
    """These roles in words, as alternatives."""
    return " or ".join(str(role.name).lower() for role in Roles if role in roles)


def judge_listener(membership: Membership | None, peer: PeerID, shown: bytes) -> Badge | None:
    """Decide, as the dialler, whether to accept a listener; returns its badge.

    Raises:
        NotAMemberError: one of the two is not a member of the other's run.
    """
    if membership is None:
        if shown:
            raise NotAMemberError(
                f"peer {peer} takes part in a private run, and this peer has no token: ask a member for an invitation "
                "and give it as token=, --token or SHOAL_TOKEN"
            )
        return None
    try:
        return membership.admit(peer, shown, dialled=True)
    except NotAMemberError as e:
        raise NotAMemberError(
            f"peer {peer} is no member of the run {membership.token.run}: {e}. Check the address, and compare what "
            "`shoal token show` says on both sides",
            reason=e.reason,
        ) from None
