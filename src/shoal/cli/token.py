"""The ``shoal token`` command: makes, shows and revokes the tokens of a private run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.access.badges import ROLES_BY_NAME, RevocationList, name_of
from shoal.access.membership import REVOKED_SUFFIX, date
from shoal.access.tokens import (
    BADGE,
    DAY,
    KINDS,
    RUN,
    Token,
    given_token,
    path_of,
    read_token,
    roles_named,
    write_token,
)
from shoal.base.clock import get_dht_time
from shoal.base.logs import counted, quoted
from shoal.base.reactor import Portal
from shoal.cli import add_option, add_token, value
from shoal.errors import P2PDaemonError
from shoal.net.pasted import read_targets
from shoal.p2p import P2P, Identity, PeerID
from shoal.p2p.joining import parse_peer_addresses
from shoal.p2p.revocation import RevocationExchange, Revocations

DESCRIPTION = """\
A run whose peers have a token is private: nobody else can make a single call to them. Each peer gets the token as
token=, --token or SHOAL_TOKEN, as text or as the path of a file.
"""
# Chosen: ten years. For longer, use the token of the run itself.
MAX_DAYS = 3650.0
HOW_TO_USE = "Give it to each peer: shoal.DHT(..., token=TOKEN), shoal dht --token TOKEN, or SHOAL_TOKEN=TOKEN"
CANNOT_BE_TAKEN_BACK = (
    "Anyone with the secret key of the run itself can come back under another identity. If you have given it away, "
    "start over with `shoal token new`, and give the new token to those who stay."
)


def add_parser(subparsers: Any) -> None:
    """Add ``token`` to the subcommands."""
    parser = subparsers.add_parser("token", help="let others into a private run", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(run=lambda _: _show_help(parser))

    new = commands.add_parser("new", help="begin a private run", description="Makes the secret key of a private run.")
    new.add_argument("name", metavar="NAME", help="what to call the run; only its members see it")
    _add_output(new)
    new.set_defaults(run=_make_run)

    invite = commands.add_parser(
        "invite",
        help="make a token for others",
        description="Makes an invitation for any number of guests, or with --peer a badge for one peer.",
    )
    invite.add_argument("--role", default="train", metavar="ROLE", help=f"one of {', '.join(ROLES_BY_NAME)}")
    days = value(f"a number of days up to {MAX_DAYS:g}", float, lambda days: 0 < days <= MAX_DAYS)
    invite.add_argument("--days", type=days, default=30.0, help="how long it is good (default: 30)")
    invite.add_argument("--peer", metavar="PEER_ID", help="for this peer alone; it needs its identity file, too")
    invite.add_argument("--name", default="", metavar="TEXT", help="the guest's name; peers that meet the guest see it")
    add_token(invite, "of the run, or an invitation that is to be passed on")
    add_option(invite, "identity-path", type=Path, metavar="FILE", help="the key of this peer, if the token is a badge")
    _add_output(invite)
    invite.set_defaults(run=_invite)

    show = commands.add_parser("show", help="tell what a token allows", description="Tells what a token allows.")
    show.add_argument(
        "shown", nargs="?", metavar="TOKEN", help="the token, as text or as a file (default: SHOAL_TOKEN)"
    )
    show.add_argument("--token", metavar="TOKEN", help="the same, as an option")
    show.set_defaults(run=_show)

    revoke = commands.add_parser(
        "revoke",
        help="take back what was granted",
        description="Expels peers, or all guests of an invitation. Needs the secret key of the run.",
    )
    revoke.add_argument(
        "keys", nargs="*", default=[], metavar="KEY", help="a peer id, or the key that `shoal token show` tells"
    )
    revoke.add_argument("--via", required=True, metavar="ADDRESS", help="a peer of the run, which tells the others")
    add_token(revoke, "of the run: its secret key")
    revoke.set_defaults(run=_revoke)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it to a new file that only you can read"
    )


def _given(token: str | None) -> str | os.PathLike[str]:
    """The token that the user has given, as text or path.

    Raises:
        P2PDaemonError: there is none.
    """
    given = given_token(token)
    if not given:
        raise P2PDaemonError("there is no token: give --token TOKEN, or set SHOAL_TOKEN; begin with `shoal token new`")
    return given


def _hand_out(token: Token, output: Path | None, *notes: str) -> int:
    """Give the token to the user: the text alone goes to the standard output."""
    if output is None:
        print(token.text)
    else:
        try:
            write_token(output, token)
        except FileExistsError:
            raise ValueError(f"{output} exists, and no token takes the place of another: choose another -o") from None
        notes = (f"Written to {output}.", *notes)
    print(*notes, sep="\n", file=sys.stderr)
    return 0


def _make_run(arguments: argparse.Namespace) -> int:
    token = Token.new_run(arguments.name)
    return _hand_out(
        token,
        arguments.output,
        f"This is the secret key of the run {token.run}. Keep it like a password: it allows everything.",
        f"{HOW_TO_USE}. For others, rather make invitations: shoal token invite",
    )


def _invite(arguments: argparse.Namespace) -> int:
    source = read_token(_given(arguments.token))
    path = arguments.identity_path
    token = source.invite(
        roles_named(arguments.role),
        int(get_dht_time() + arguments.days * DAY),
        peer=None if arguments.peer is None else PeerID.from_base58(arguments.peer),
        name=arguments.name,
        holder=None if path is None else Identity.load_or_create(path),
    )
    return _hand_out(token, arguments.output, *_describe(token), f"{HOW_TO_USE}.")


def _describe(token: Token) -> list[str]:
    lines = [f"kind:     {KINDS[token.kind]}", f"run:      {token.run}", f"role:     {name_of(token.roles)}"]
    badge = token.content
    if badge is None:
        return [*lines, "expires:  never"]
    days = (badge.expires - get_dht_time()) / DAY
    left = f"{days:.1f} days left" if days > 0 else "EXPIRED"
    lines.append(f"expires:  {date(badge.expires)}, {left}")
    if badge.name:
        lines.append(f"name:     {badge.name!r}")
    what = "peer:     {}" if token.kind == BADGE else "key:      {}, to take it back: shoal token revoke"
    return [*lines, what.format(badge.peer)]


def _show(arguments: argparse.Namespace) -> int:
    if arguments.shown is not None and arguments.token is not None:
        raise ValueError("give the token once: shoal token show TOKEN")
    token = read_token(_given(arguments.token if arguments.shown is None else arguments.shown))
    print(*_describe(token), sep="\n")
    badge = token.content
    if badge is not None and badge.expires <= get_dht_time():
        print("shoal token: it has expired: ask the person who invited you for a new one", file=sys.stderr)
        return 1
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    given = _given(arguments.token)
    token = read_token(given)
    if token.kind != RUN or token.signer is None:
        raise P2PDaemonError(f"only the secret key of the run can revoke, and this is {KINDS[token.kind]}")
    keys = [_key_of(text) for text in arguments.keys]
    if len(read_targets(arguments.via, "--via")) != 1:
        raise ValueError(f"--via takes the address of one peer of the run, got {quoted(arguments.via)}")
    portal = Portal("token")
    try:
        news = portal.call(_spread(given, token.signer, keys, arguments.via))
    finally:
        portal.close(timeout=3)
    path = path_of(given)
    if path is not None:
        kept = Path(f"{path}{REVOKED_SUFFIX}")
        written = kept.with_suffix(".new")
        written.write_bytes(news.to_bytes())
        os.replace(written, kept)
        print(f"The list is kept in {kept}: peers with this token file know it from the start.", file=sys.stderr)
    print(f"List {news.serial} is on its way: {counted(len(news.keys), 'key')} revoked.")
    print(CANNOT_BE_TAKEN_BACK, file=sys.stderr)
    return 0


def _key_of(text: str) -> bytes:
    key = PeerID.from_base58(text).public_key
    if key is None:
        raise ValueError(
            f"{quoted(text)} is not a peer id made from an Ed25519 key (12D3KooW…): is a character missing or wrong?"
        )
    return key


async def _spread(given: str | os.PathLike[str], run: Identity, keys: Sequence[bytes], via: str) -> RevocationList:
    """Extend the newest list known here or at a peer of the run, and give it to that peer."""
    [(place, named), *_] = parse_peer_addresses(via)
    p2p = await P2P.create(via, token=given, client_mode=True)
    try:
        peer = named or p2p.met[place]
        assert p2p.members is not None
        assert p2p.membership is not None
        handle = RevocationExchange.handle_name("rpc_revocations", None)
        theirs = await p2p.call(peer, handle, Revocations(), Revocations, timeout=10, roles=RevocationExchange.roles)
        p2p.members.learn(theirs.data, peer)
        news = p2p.membership.revocations
        if keys:
            news = RevocationList.make(run, keys, int(get_dht_time()), news)
        if news is None:
            raise ValueError("nothing is revoked in this run: give the peer id or key to revoke")
        request = Revocations(news.serial, news.to_bytes())
        answer = await p2p.call(peer, handle, request, Revocations, timeout=10, roles=RevocationExchange.roles)
        if answer.serial < news.serial:
            raise P2PDaemonError(f"peer {peer} has not taken the list: try another one with --via")
        return news
    finally:
        await p2p.shutdown()
