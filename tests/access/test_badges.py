"""Badges, tokens and revocations as plain values: what is valid, and that nothing else is."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.access.badges import (
    ANY_ROLE,
    MAX_BADGE_BYTES,
    MAX_REVOKED,
    MAX_SECONDS,
    ROLES_BY_NAME,
    Chain,
    Grant,
    RevocationList,
    Roles,
    encode_badge,
    grant,
    name_of,
    read_badge,
)
from shoal.access.tokens import (
    BADGE,
    DAY,
    INVITATION,
    OWN_BADGE_SECONDS,
    RUN,
    Token,
    given_token,
    read_token,
    roles_named,
    write_token,
)
from shoal.errors import NotAMemberError, P2PDaemonError
from shoal.p2p import Identity

pytestmark = pytest.mark.oldest

rng = random.Random(1)
RUN_KEY, OTHER_RUN, DELEGATE, FRIEND, PEER, STRANGER = (Identity.generate(rng) for _ in range(6))
TRAIN, RELAY, MONITOR = (ROLES_BY_NAME[name] for name in ("train", "relay", "monitor"))
LATER = 2_000_000_000
on_posix = pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX thing")


def chain_of(*links: tuple[Identity, Roles, int]) -> Chain:
    chain: Chain = ()
    issuer = RUN_KEY
    for subject, roles, expires in links:
        chain = grant(RUN_KEY.public_key, chain, issuer, subject.public_key, roles, expires)
        issuer = subject
    return chain


TOO_LONG = chain_of((DELEGATE, ANY_ROLE, LATER), (FRIEND, ANY_ROLE, LATER), (PEER, ANY_ROLE, LATER))


def reason_against(badge: bytes, run: Identity = RUN_KEY) -> str:
    with pytest.raises(NotAMemberError) as found:
        read_badge(run.public_key, badge)
    return found.value.reason


@pytest.mark.parametrize("delegates", [0, 1, 2])
def test_chain_leads_from_the_run_to_the_peer(delegates: int) -> None:
    links = [(DELEGATE, ANY_ROLE, LATER + 5), (FRIEND, ANY_ROLE, LATER + 7)][:delegates]
    data = encode_badge(chain_of(*links, (PEER, RELAY, LATER + 9)))
    badge = read_badge(RUN_KEY.public_key, data)
    assert badge.peer == PEER.peer_id
    assert badge.roles == RELAY
    assert badge.expires == LATER + (5 if delegates else 9), "the earliest end counts"
    assert badge.keys == {PEER.public_key, *(subject.public_key for subject, _, _ in links)}
    assert len(data) <= MAX_BADGE_BYTES
    assert RUN_KEY.public_key not in data
    assert reason_against(data, OTHER_RUN) == "another run"


def test_longest_badge_is_short_enough() -> None:
    chain: Chain = ()
    for issuer, subject in ((RUN_KEY, DELEGATE), (DELEGATE, FRIEND), (FRIEND, PEER)):
        chain = grant(RUN_KEY.public_key, chain, issuer, subject.public_key, ANY_ROLE, MAX_SECONDS, "💙" * 32)
    data = encode_badge(chain)
    assert read_badge(RUN_KEY.public_key, data).name == "💙" * 32
    assert len(data) <= MAX_BADGE_BYTES
    with pytest.raises(ValueError, match="at most 3 grants"):
        grant(RUN_KEY.public_key, chain, PEER, STRANGER.public_key, MONITOR, LATER)


def test_one_grants_no_more_than_one_has() -> None:
    without_issue = chain_of((DELEGATE, TRAIN, LATER))
    relay = chain_of((DELEGATE, RELAY | Roles.ISSUE, LATER))
    for chain, roles in ((without_issue, MONITOR), (relay, TRAIN), (relay, ANY_ROLE)):
        with pytest.raises(ValueError, match="cannot be granted"):
            grant(RUN_KEY.public_key, chain, DELEGATE, PEER.public_key, roles, LATER)
        forged = Grant(1, DELEGATE.public_key, PEER.public_key, int(roles), LATER, "")
        signature = DELEGATE.sign(forged.signed_bytes(RUN_KEY.public_key))
        data = encode_badge((*chain, msgspec.structs.replace(forged, signature=signature)))
        assert reason_against(data) == "broken"


def _swap(chain: Chain) -> Chain:
    return chain[1], chain[0]


def _signed_by_stranger(chain: Chain) -> Chain:
    unsigned = chain[1].signed_bytes(RUN_KEY.public_key)
    return chain[0], msgspec.structs.replace(chain[1], signature=STRANGER.sign(unsigned))


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (_swap, "broken"),
        (lambda chain: chain[1:], "broken"),
        (lambda chain: (chain[0], *chain), "broken"),
        (lambda chain: (msgspec.structs.replace(chain[1], issuer=b""),), "another run"),
        (lambda chain: (chain[0], msgspec.structs.replace(chain[1], expires=LATER + 1)), "broken"),
        (lambda chain: (chain[0], msgspec.structs.replace(chain[1], name="boss")), "broken"),
        (lambda chain: (chain[0], msgspec.structs.replace(chain[1], subject=STRANGER.public_key)), "broken"),
        (lambda chain: (msgspec.structs.replace(chain[0], roles=int(TRAIN)), chain[1]), "another run"),
        (_signed_by_stranger, "broken"),
        (lambda chain: (*chain, *chain), "broken"),
        (lambda chain: (), "broken"),
    ],
)
def test_forged_and_reordered_grants_are_refused(forge: Callable[[Chain], Chain], reason: str) -> None:
    chain = chain_of((DELEGATE, ANY_ROLE, LATER), (PEER, TRAIN, LATER))
    read_badge(RUN_KEY.public_key, encode_badge(chain))
    assert reason_against(encode_badge(forge(chain))) == reason


def test_what_is_no_badge_is_refused_with_the_reason() -> None:
    assert reason_against(b"") == "not a member"
    assert reason_against(b"x" * (MAX_BADGE_BYTES + 1)) == "broken"
    for nonsense in (b"\xc1", b"\x93\x01", msgspec.msgpack.encode([[2, b"", b"", 1, 1, "", b""]]), b"\x91" * 1000):
        assert reason_against(nonsense) == "broken"


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_no_byte_of_a_badge_can_be_changed(position: int, flip: int) -> None:
    data = bytearray(encode_badge(chain_of((DELEGATE, ANY_ROLE, LATER), (PEER, TRAIN, LATER))))
    data[position % len(data)] ^= flip
    assert reason_against(bytes(data)) in ("broken", "another run")


def test_roles_have_names() -> None:
    assert name_of(TRAIN) == "train"
    assert name_of(RELAY) == "relay"
    assert name_of(MONITOR | Roles.ISSUE) == "monitor, and invite others"
    assert roles_named("relay") == RELAY
    with pytest.raises(ValueError, match="no role 'boss': use one of train, relay, monitor, issue"):
        roles_named("boss")


# --- revocations ------------------------------------------------------------------------------------------------------


def test_list_of_revocations_grows_and_is_signed() -> None:
    first = RevocationList.make(RUN_KEY, [PEER.public_key], 100, None)
    second = RevocationList.make(RUN_KEY, [DELEGATE.public_key, PEER.public_key], 200, first)
    assert (first.serial, second.serial) == (1, 2)
    assert set(second.keys) == {PEER.public_key, DELEGATE.public_key}
    data = second.to_bytes()
    assert RevocationList.from_bytes(RUN_KEY.public_key, data) == second
    with pytest.raises(ValueError, match="not signed"):
        RevocationList.from_bytes(OTHER_RUN.public_key, data)
    longer = msgspec.structs.replace(second, keys=[*second.keys, STRANGER.public_key])
    with pytest.raises(ValueError, match="not signed"):
        RevocationList.from_bytes(RUN_KEY.public_key, longer.to_bytes())
    with pytest.raises(ValueError, match="not a list"):
        RevocationList.from_bytes(RUN_KEY.public_key, data[:-1])


def test_list_of_revocations_fits_into_a_message() -> None:
    keys = [index.to_bytes(32) for index in range(MAX_REVOKED)]
    full = RevocationList.make(RUN_KEY, keys, 100, None)
    assert len(full.to_bytes()) < 2**18
    with pytest.raises(ValueError, match="new run key"):
        RevocationList.make(RUN_KEY, [PEER.public_key], 200, full)
    too_long = msgspec.structs.replace(full, keys=[*keys, PEER.public_key])
    with pytest.raises(ValueError, match="not a list"):
        RevocationList.from_bytes(RUN_KEY.public_key, too_long.to_bytes())


# --- tokens -----------------------------------------------------------------------------------------------------------

SECRET = Token.new_run("friends")


def badge_by(token: Token, identity: Identity = PEER, now: float = LATER) -> tuple[Roles, int]:
    badge = read_badge(token.run_key, encode_badge(token.chain_for(identity, now)))
    assert badge.peer == identity.peer_id
    return badge.roles, badge.expires


def test_run_key_makes_a_badge_for_anybody() -> None:
    token = Token.parse(SECRET.text)
    assert token.kind == RUN
    assert token.text.startswith("shoal-run-")
    assert token.run == SECRET.run
    assert token.content is None
    assert badge_by(token) == (ANY_ROLE, LATER + OWN_BADGE_SECONDS)


def test_invitation_makes_a_badge_for_any_guest_until_it_expires() -> None:
    token = Token.parse(SECRET.invite(TRAIN, LATER + DAY, name="for anna").text)
    assert token.kind == INVITATION
    assert badge_by(token) == (TRAIN, LATER + DAY)
    assert badge_by(token, STRANGER) == (TRAIN, LATER + DAY)
    assert token.content is not None
    assert token.content.name == "for anna"
    passed_on = Token.parse(token.invite(MONITOR, LATER + 9 * DAY).text)
    assert badge_by(passed_on) == (MONITOR, LATER + DAY)
    with pytest.raises(ValueError, match="cannot be passed on again"):
        passed_on.invite(MONITOR, LATER)


def test_badge_is_for_one_peer() -> None:
    token = Token.parse(SECRET.invite(RELAY, LATER, peer=PEER.peer_id).text)
    assert token.kind == BADGE
    assert badge_by(token, PEER) == (RELAY, LATER)
    with pytest.raises(P2PDaemonError, match=f"{STRANGER.peer_id}: give the identity_path"):
        token.chain_for(STRANGER, LATER)
    with pytest.raises(ValueError, match="identity file of that peer"):
        token.invite(RELAY, LATER)
    with pytest.raises(ValueError, match="cannot be granted"):
        token.invite(RELAY, LATER, holder=PEER)
    issuer = SECRET.invite(ANY_ROLE, LATER, peer=PEER.peer_id)
    assert badge_by(issuer.invite(RELAY, LATER, holder=PEER), FRIEND) == (RELAY, LATER)


@pytest.mark.parametrize("token", [SECRET, SECRET.invite(TRAIN, LATER), SECRET.invite(TRAIN, LATER, peer=PEER.peer_id)])
def test_damaged_text_is_noticed(token: Token) -> None:
    text = token.text
    assert Token.parse(text) is not None
    position = len(text) // 2
    wrong = "2" if text[position] != "2" else "3"
    for damaged in (text[:-1], text[:position] + wrong + text[position + 1 :], text + "1"):
        with pytest.raises(ValueError, match="copy the whole text again"):
            Token.parse(damaged)
    for kind in {RUN, INVITATION, BADGE} - {token.kind}:
        with pytest.raises(ValueError, match="copy the whole text again"):
            Token.parse(kind + text.removeprefix(token.kind))
    with pytest.raises(ValueError, match="an invalid character"):
        Token.parse(text[:-1] + "0")
    with pytest.raises(ValueError, match="begins with shoal-run-, shoal-invite-, shoal-badge-"):
        Token.parse("password")
    with pytest.raises(ValueError, match="at most 2048"):
        Token.parse(RUN + "1" * 5000)


def test_text_that_contradicts_itself_is_refused() -> None:
    invitation = SECRET.invite(RELAY, LATER)
    for forged in (
        Token(INVITATION, "friends", SECRET.run_key, invitation.chain, STRANGER, RELAY),
        Token(INVITATION, "friends", SECRET.run_key, invitation.chain, invitation.signer, TRAIN),
        Token(INVITATION, "friends", OTHER_RUN.public_key, invitation.chain, invitation.signer, RELAY),
        Token(INVITATION, "friends", SECRET.run_key, (), SECRET.signer, RELAY),
        Token(RUN, "friends", OTHER_RUN.public_key, (), SECRET.signer, ANY_ROLE),
        Token(RUN, "friends", SECRET.run_key, invitation.chain, SECRET.signer, RELAY),
        Token(BADGE, "friends", SECRET.run_key, invitation.chain, invitation.signer, RELAY),
        Token(BADGE, "friends", SECRET.run_key, (), None, RELAY),
        Token(INVITATION, "friends", RUN_KEY.public_key, chain_of((DELEGATE, TRAIN, LATER)), DELEGATE, TRAIN),
        Token(INVITATION, "friends", RUN_KEY.public_key, TOO_LONG, PEER, TRAIN),
    ):
        with pytest.raises(ValueError, match="the token"):
            Token.parse(forged.text)


def test_token_is_read_from_text_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "friends.token"
    write_token(path, SECRET)
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    assert read_token(path).text == read_token(f" {SECRET.text}\n").text == read_token(str(path)).text == SECRET.text
    assert not given_token(None)
    for value in (str(path), SECRET.text):
        monkeypatch.setenv("SHOAL_TOKEN", value)
        assert given_token(None) == value
        assert read_token(given_token(None)).run == SECRET.run
    assert not given_token(""), "an open run, whatever the environment says"
    with pytest.raises(FileExistsError):
        write_token(path, SECRET)


@pytest.mark.parametrize("content", [b"", b"password", b"\xff\xfe", b"shoal-run-2222", b"1" * 10_000])
def test_file_that_is_no_token_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(P2PDaemonError, match=f"cannot use token file {path}"):
        read_token(path)
    with pytest.raises(P2PDaemonError, match="No such file"):
        read_token(tmp_path / "missing")
    with pytest.raises(P2PDaemonError, match="cannot use token file"):
        read_token(tmp_path)


@on_posix
def test_secret_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        write_token(path, SECRET)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in (0o640, 0o604, 0o644):
        path.chmod(mode)
        with pytest.raises(P2PDaemonError, match=f"other users: run chmod 600 {path}"):
            read_token(path)
    badge = tmp_path / "badge"
    write_token(badge, SECRET.invite(TRAIN, LATER, peer=PEER.peer_id))
    badge.chmod(0o644)
    assert read_token(badge).kind == BADGE, "a badge is no secret"
