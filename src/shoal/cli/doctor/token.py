"""The doctor's look at the token of a private run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shoal.access.membership import ADVICE, Membership
from shoal.access.tokens import DAY
from shoal.base.clock import get_clock
from shoal.cli.doctor.findings import Finding, fail, ok, warn
from shoal.errors import NotAMemberError, P2PDaemonError
from shoal.metrics import Metrics
from shoal.p2p import P2P, Identity

TOKEN = "token"
DAYS_TO_RENEW = 3


async def look_at_token(token: str | None, identity_path: Path | None) -> tuple[str | None, Finding | None]:
    """Check the user's token alone; returns the token to go on with, and the finding if there is a token.

    Args:
        token: what the user has given; ``None``: what the environment says.
        identity_path: the file with the key of this peer, if it is usable.
    """
    identity = await asyncio.to_thread(_identity_in, identity_path)
    clock = get_clock()
    try:
        membership = await Membership.chosen(token, identity, clock, Metrics())
    except P2PDaemonError as error:
        # The other checks go on as those of a stranger.
        return "", fail(TOKEN, str(error), "give a usable one with --token, or unset SHOAL_TOKEN for an open run")
    if membership is None:
        return token, None
    text, left = membership.describe(), membership.own.expires - clock.time()
    if membership.is_revoked(membership.own):
        return token, fail(TOKEN, f"revoked: {text}", ADVICE)
    if left <= 0:
        return token, fail(TOKEN, f"expired: {text}", ADVICE)
    if left < DAYS_TO_RENEW * DAY:
        return token, warn(TOKEN, f"{text}, which is soon", "ask who has invited you for a new one")
    return token, ok(TOKEN, text)


def _identity_in(path: Path | None) -> Identity:
    return Identity.generate() if path is None or not path.exists() else Identity.load_or_create(path)


def accepted(p2p: P2P) -> Finding | None:
    """Says that both sides are members, if the run is private."""
    if p2p.membership is None:
        return None
    return ok(TOKEN, f"both are members of the run {p2p.membership.token.run}")


def refused(error: NotAMemberError) -> Finding:
    """Why one of both sides refuses the other."""
    return fail(
        TOKEN, str(error), "compare what `shoal token show` says at both peers; `shoal token invite` makes a token"
    )
