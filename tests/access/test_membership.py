"""Private runs: who is let in, what the others are told, what a role allows, and how the expelled are kept out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from shoal.access.badges import ANY_ROLE, ROLES_BY_NAME, RevocationList, Roles, encode_badge
from shoal.access.membership import Membership
from shoal.access.tokens import DAY, OWN_BADGE_SECONDS, Token
from shoal.base.clock import TOLERANCE_SECONDS
from shoal.errors import BootstrapError, NotAMemberError, P2PDaemonError
from shoal.metrics import Metrics
from shoal.net.connection import NOT_A_MEMBER, CallFailure, Hello
from shoal.net.service import open_to
from shoal.net.tcp.handshake import proof_message, with_badge
from shoal.net.transport import PREFIX_BYTES, Kind, decode_header
from shoal.p2p import P2P, Identity, P2PContext, ServicerBase
from shoal.p2p.revocation import RevocationExchange, Revocations
from shoal.testing import Link, Network, run, start_peers
from tests.net.test_tcp import Listening, open_tls
from tests.p2p.peers import KINDS, Empty, Number, Peers, Text, assert_clean, serving, stub, until

pytestmark = pytest.mark.oldest

SECRET = Token.new_run("friends")
OTHER_RUN = Token.new_run("rivals")
TRAIN, RELAY, MONITOR = (ROLES_BY_NAME[name] for name in ("train", "relay", "monitor"))

both_kinds = pytest.mark.parametrize("kind", KINDS)


class Clock:
    """A DHT clock that tests set."""

    def __init__(self, now: float, *, knows_others: bool = True) -> None:
        self.now = now
        self.samples: dict[Hashable, object] = {"somebody": None} if knows_others else {}

    @property
    def is_joining(self) -> bool:
        return not self.samples

    def time(self) -> float:
        return self.now


def set_clock(p2p: P2P, clock: Clock) -> None:
    assert p2p.membership is not None
    p2p.membership.clock = clock  # type: ignore[assignment]


def invitation(roles: Roles = TRAIN, days: float = 1) -> str:
    return SECRET.invite(roles, int(time.time() + days * DAY)).text


async def refusal_of(caller: P2P, server: P2P) -> NotAMemberError:
    with pytest.raises(NotAMemberError) as found:
        await stub(caller, server).rpc_square(Number(value=3))
    assert_clean(caller)
    return found.value


async def square(caller: P2P, server: P2P) -> int:
    answer = await stub(caller, server).rpc_square(Number(value=3))
    return int(answer.value)


def revoke(p2p: P2P, *keys: bytes) -> RevocationList:
    """A list for a peer to learn, newer than its own."""
    assert p2p.membership is not None
    assert SECRET.signer is not None
    return RevocationList.make(SECRET.signer, keys, int(time.time()), p2p.membership.revocations)


# --- who is let in ----------------------------------------------------------------------------------------------------


@both_kinds
async def test_members_of_one_run_call_each_other(kind: str) -> None:
    async with Peers(kind) as peers:
        owner = await peers.start(token=SECRET.text)
        guest = await peers.start(token=invitation())
        service, _ = await serving(owner), await serving(guest)
        guest.add_addresses(owner.peer_id, owner.get_addresses(owner.peer_id))
        assert await square(guest, owner) == 9
        assert service.contexts[0].roles == TRAIN
        owner.add_addresses(guest.peer_id, guest.get_addresses(guest.peer_id))
        assert await square(owner, guest) == 9
        assert not owner.metrics.members_refused
        assert not guest.metrics.members_refused


@both_kinds
async def test_open_run_needs_no_badge(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = await serving(server)
        assert await square(caller, server) == 9
        assert service.contexts[0].roles == ANY_ROLE
        assert server.membership is None


@both_kinds
@pytest.mark.parametrize(
    ("token_of_caller", "token_of_server", "text"),
    [
        (None, SECRET.text, "takes part in a private run, and this peer has no token: ask a member"),
        (SECRET.text, None, "no member of the run friends .*no badge was shown.*shoal token show"),
        (OTHER_RUN.text, SECRET.text, "no member of the run rivals .*the badge is for another run"),
    ],
)
async def test_dialler_refuses_who_is_not_of_its_run(
    kind: str, token_of_caller: str | None, token_of_server: str | None, text: str
) -> None:
    async with Peers(kind) as peers:
        server = await peers.start(token=token_of_server)
        caller = await peers.start(token=token_of_caller)
        service = await serving(server)
        error = await refusal_of(caller, server)
        with pytest.raises(NotAMemberError, match=text):
            raise error
        assert not service.contexts
        assert not server.server.connections_of(caller.peer_id)
        if token_of_caller is not None:
            assert sum(caller.metrics.members_refused.values()) == 1


def show(p2p: P2P, badge: bytes) -> None:
    """Let a peer show another badge than its own."""
    assert p2p.transport.membership is not None
    p2p.transport.membership.shown_badge = lambda: badge  # type: ignore[method-assign]


def badge_for(identity: Identity, token: Token, now: float | None = None) -> bytes:
    return encode_badge(token.chain_for(identity, time.time() if now is None else now))


@both_kinds
@pytest.mark.parametrize("reason", ["not a member", "another run", "broken", "expired"])
async def test_refused_dialler_is_told_the_reason(kind: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    long_ago = time.time() - OWN_BADGE_SECONDS - TOLERANCE_SECONDS - 100
    async with Peers(kind) as peers:
        server, caller = await peers.start(token=SECRET.text), await peers.start(token=SECRET.text)
        service = await serving(server)
        set_clock(server, Clock(time.time()))  # that of the process is one of a newcomer after some other tests
        badges = {
            "not a member": b"",
            "another run": badge_for(caller.identity, OTHER_RUN),
            "broken": badge_for(Identity.generate(), SECRET),
            "expired": badge_for(caller.identity, SECRET, long_ago),
        }
        show(caller, badges[reason])
        error = await refusal_of(caller, server)
        assert error.reason == reason
        assert f"peer {server.peer_id} does not let this peer in" in str(error)
        assert "shoal token show" in str(error)
        assert server.metrics.members_refused == {reason: 1}
        assert not service.contexts
        assert caller.peer_id not in server.address_book, "its greeting was not read"
        assert server.peer_id in caller.address_book
        assert f"peer {caller.peer_id} was refused" in caplog.text
        assert "shoal token invite" in caplog.text
        await until(lambda: server.server.refusal_count == 0)


@both_kinds
async def test_start_says_why_nobody_lets_the_peer_in(kind: str) -> None:
    """In a private run, the first peers are reached before anything else."""
    async with Peers(kind) as peers:
        server = await peers.start(token=SECRET.text)
        [address, *_] = await server.get_visible_maddrs()
        with pytest.raises(BootstrapError, match="private run, and this peer has no token"):
            await peers.start(initial_peers=[address])


async def test_stranger_learns_nothing_but_the_reason() -> None:
    """By hand, over TLS: one message comes back, and it is no greeting."""
    async with Peers("tcp") as peers:
        server = await peers.start(token=SECRET.text)
        [address, *_] = server.get_addresses(server.peer_id)
        listening = Listening()
        listening.port = int(address["tcp"] or 0)
        reader, writer, certificate, nonce = await open_tls(listening)
        shown = await reader.read(2000)
        assert shown == server.transport.membership.shown_badge()  # type: ignore[union-attr]
        stranger = Identity.generate()
        proof = stranger.public_key + stranger.sign(proof_message(server.peer_id, certificate, nonce))
        writer.write(with_badge(proof, b""))
        said = await reader.readexactly(PREFIX_BYTES)
        assert said[1] == Kind.ERROR
        failure = decode_header(await reader.readexactly(int.from_bytes(said[4:8], "big")), CallFailure)
        assert (failure.code, failure.type, failure.is_final) == (NOT_A_MEMBER, "not a member", True)
        assert str(server.peer_id) not in failure.text
        writer.write(b"something else, which nobody parses" * 3000)
        with contextlib.suppress(ConnectionError):  # it says too much, and is cut off
            assert await reader.read() == b"", "nothing more is said"
        writer.close()
        await until(lambda: server.server.refusal_count == 0)


@both_kinds
async def test_badge_of_somebody_else_is_no_use(kind: str) -> None:
    async with Peers(kind) as peers:
        server = await peers.start(token=SECRET.text)
        caller = await peers.start(token=SECRET.text)
        await serving(server)
        assert server.membership is not None
        show(caller, server.membership.shown_badge())
        assert (await refusal_of(caller, server)).reason == "broken"


async def test_badge_needs_the_identity_that_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "id"
    peer = Identity.create(path)
    token = SECRET.invite(TRAIN, int(time.time()) + DAY, peer=peer.peer_id).text
    async with Peers("tcp") as peers:
        with pytest.raises(P2PDaemonError, match=f"badge for peer {peer.peer_id}.*identity_path"):
            await peers.start(token=token)
        owner, guest = await peers.start(token=SECRET.text), await peers.start(token=token, identity_path=path)
        await serving(owner)
        assert await square(guest, owner) == 9


# --- time -------------------------------------------------------------------------------------------------------------


@both_kinds
async def test_connection_ends_with_the_badge(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.start(token=SECRET.text), await peers.start(token=invitation(days=1))
        await serving(server)
        assert await square(caller, server) == 9
        assert caller.membership is not None
        end = caller.membership.own.expires
        set_clock(server, Clock(end + TOLERANCE_SECONDS - 1))
        assert await square(caller, server) == 9
        set_clock(server, Clock(end + TOLERANCE_SECONDS + 1))
        error = await refusal_of(caller, server)
        assert error.reason == "expired"
        assert "has expired: 2" in str(error)
        assert server.metrics.calls_refused == {"expired": 1}
        error = await refusal_of(caller, server)  # on a new connection
        assert error.reason == "expired"
        assert server.metrics.members_refused == {"expired": 2}


@both_kinds
async def test_newcomer_does_not_judge_by_a_clock_that_it_has_not_compared(kind: str) -> None:
    """Its clock may be years off. It checks the listener's badge as soon as it knows the time."""
    async with Peers(kind) as peers:
        server, caller = await peers.start(token=SECRET.text), await peers.start(token=SECRET.text)
        await serving(server)
        clock = Clock(time.time() + 90 * DAY, knows_others=False)
        assert caller.membership is not None
        badge = caller.membership.shown_badge()
        show(caller, badge)
        set_clock(caller, clock)
        assert await square(caller, server) == 9
        clock.samples["the server"] = None
        error = await refusal_of(caller, server)
        assert error.reason == "expired"


def test_own_badge_is_renewed_in_time() -> None:
    clock = Clock(1_900_000_000.0)
    identity = Identity.generate()
    friend = Membership(SECRET, identity, clock, Metrics())  # type: ignore[arg-type]
    first = friend.shown_badge()
    clock.now += OWN_BADGE_SECONDS / 2 - 10
    assert friend.shown_badge() == first
    clock.now += 20
    second = friend.shown_badge()
    assert second != first
    assert friend.own.expires == int(clock.now) + OWN_BADGE_SECONDS
    clock.now -= 365 * DAY
    assert friend.shown_badge() not in (first, second), "the clock was set back, and others do not believe the future"
    assert friend.own.expires == int(clock.now) + OWN_BADGE_SECONDS
    token = SECRET.invite(TRAIN, int(clock.now) + DAY)
    guest = Membership(token, identity, clock, Metrics())  # type: ignore[arg-type]
    until_it_ends = guest.shown_badge()
    clock.now += DAY - 5
    assert guest.shown_badge() == until_it_ends
    assert guest.own.expires == token.chain[0].expires


# --- roles ------------------------------------------------------------------------------------------------------------


class Offers(ServicerBase):
    """Something for each role."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def rpc_train(self, request: Empty, context: P2PContext) -> Text:
        return self._note("train", context)

    @open_to(Roles.TRAIN | Roles.RELAY)
    async def rpc_keep(self, request: Empty, context: P2PContext) -> Text:
        return self._note("keep", context)

    @open_to(ANY_ROLE)
    async def rpc_look(self, request: Empty, context: P2PContext) -> Text:
        return self._note("look", context)

    def _note(self, what: str, context: P2PContext) -> Text:
        self.calls.append(what)
        return Text(text=f"{what} by {int(context.roles)}")


ALLOWED = {"train": ["train", "keep", "look"], "relay": ["keep", "look"], "monitor": ["look"]}


@both_kinds
@pytest.mark.parametrize("role", ALLOWED)
@pytest.mark.parametrize("is_honest", [True, False])
async def test_roles_of_the_caller(kind: str, role: str, is_honest: bool) -> None:
    """An honest peer does not even ask. A dishonest one is refused, and its connection lives on."""
    async with Peers(kind) as peers:
        server, caller = await peers.start(token=SECRET.text), await peers.start(token=invitation(ROLES_BY_NAME[role]))
        offers = Offers()
        await offers.add_p2p_handlers(server)
        assert caller.membership is not None
        if not is_honest:
            caller.membership.check_own = lambda roles: None  # type: ignore[method-assign]
        for what in ("train", "keep", "look"):
            call = getattr(Offers.get_stub(caller, server.peer_id), f"rpc_{what}")
            if what in ALLOWED[role]:
                assert (await call(Empty())).text == f"{what} by {int(ROLES_BY_NAME[role])}"
                continue
            with pytest.raises(NotAMemberError, match=f"allows: {role}. This call needs: train") as found:
                await call(Empty())
            assert found.value.reason == "wrong role"
        assert offers.calls == ALLOWED[role]
        assert len(server.server.connections_of(caller.peer_id)) == 1
        refused = 3 - len(ALLOWED[role]) if not is_honest else 0
        assert server.metrics.calls_refused["wrong role"] == server.metrics.members_refused["wrong role"] == refused


@both_kinds
async def test_roles_of_the_peer_that_is_called(kind: str) -> None:
    """Whoever sends gradients to a peer makes sure that it may have them."""
    async with Peers(kind) as peers:
        server, caller = await peers.start(token=invitation(RELAY)), await peers.start(token=SECRET.text)
        await Offers().add_p2p_handlers(server)
        remote = Offers.get_stub(caller, server.peer_id)
        with pytest.raises(NotAMemberError, match=r"allows: relay\. This call needs: train"):
            await remote.rpc_train(Empty())
        assert (await remote.rpc_keep(Empty())).text.startswith("keep")
        assert caller.metrics.members_refused == {"wrong role": 1}
        assert_clean(caller)


async def test_user_is_told_once_that_the_role_is_not_enough(caplog: pytest.LogCaptureFixture) -> None:
    async with Peers("memory") as peers:
        server, caller = await peers.start(token=SECRET.text), await peers.start(token=invitation(MONITOR))
        for _ in range(3):
            with pytest.raises(NotAMemberError):
                await stub(caller, server).rpc_square(Number(value=3))
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "the token of this peer allows: monitor. This call needs: train" in warnings[0].getMessage()


# --- revocations ------------------------------------------------------------------------------------------------------


@both_kinds
async def test_expelled_peer_is_cut_off_and_told_why(kind: str) -> None:
    async with Peers(kind) as peers:
        server, guest = await peers.start(token=SECRET.text), await peers.start(token=invitation())
        service = await serving(server)
        assert await square(guest, server) == 9
        hanging = asyncio.ensure_future(stub(guest, server).rpc_hang(Empty()))
        await service.entered.wait()
        assert server.members is not None
        news = revoke(server, guest.identity.public_key)
        assert server.members.learn(news.to_bytes(), None)
        assert not server.members.learn(news.to_bytes(), None), "only once"
        await service.cancelled.wait()
        with pytest.raises((P2PDaemonError, NotAMemberError)):
            await hanging
        error = await refusal_of(guest, server)
        assert error.reason == "revoked"
        assert server.metrics.members_refused["revoked"] >= 1
        assert server.metrics.connections_dropped["revoked"] >= 1


@both_kinds
async def test_key_of_an_invitation_revokes_all_its_guests(kind: str) -> None:
    token = SECRET.invite(TRAIN, int(time.time()) + DAY)
    async with Peers(kind) as peers:
        server = await peers.start(token=SECRET.text)
        guests = [await peers.start(token=token.text) for _ in range(2)]
        other = await peers.start(token=invitation())
        await serving(server)
        for guest in (*guests, other):
            assert await square(guest, server) == 9
        assert server.members is not None
        server.members.learn(revoke(server, token.chain[-1].subject).to_bytes(), None)
        for guest in guests:
            await until(lambda guest=guest: server.peer_id not in guest.pool)  # type: ignore[misc]
            assert (await refusal_of(guest, server)).reason == "revoked"
        assert await square(other, server) == 9


@both_kinds
async def test_list_comes_with_the_next_greeting(kind: str) -> None:
    """A peer that was away asks for it. One that cannot be called gives it, too."""
    async with Peers(kind) as peers:
        first = await peers.start(token=SECRET.text)
        assert first.members is not None
        first.members.learn(revoke(first, bytes(32)).to_bytes(), None)
        late, client = await peers.start(token=invitation()), await peers.start(token=invitation(), client_mode=True)
        await serving(first)
        for p2p in (late, client):
            assert await square(p2p, first) == 9
            assert p2p.membership is not None
            await until(lambda p2p=p2p: p2p.membership.serial == 1)  # type: ignore[misc]
        assert client.members is not None
        client.members.learn(revoke(client, bytes(32)).to_bytes(), None)
        client.pool.renew()
        await square(client, first)
        assert first.membership is not None
        await until(lambda: first.membership.serial == 2)  # type: ignore[union-attr]


@both_kinds
async def test_forged_list_is_refused(kind: str) -> None:
    async with Peers(kind) as peers:
        server, liar = await peers.start(token=SECRET.text), await peers.start(token=invitation())
        assert OTHER_RUN.signer is not None
        forged = RevocationList.make(OTHER_RUN.signer, [server.identity.public_key], 0, None).to_bytes()
        handle = RevocationExchange.handle_name("rpc_revocations", None)
        for data in (forged, b"nonsense"):
            with pytest.raises(Exception, match=r"not signed|not a list"):
                await liar.call(server.peer_id, handle, Revocations(9, data), Revocations, roles=ANY_ROLE)
        assert server.membership is not None
        assert server.membership.serial == 0


async def test_peer_without_its_promised_list_is_asked_once() -> None:
    async with Peers("memory") as peers:
        server, liar = await peers.start(token=SECRET.text), await peers.start(token=invitation())
        server.add_addresses(liar.peer_id, liar.get_addresses(liar.peer_id))
        await serving(liar)
        asked: list[object] = []
        assert liar.members is not None
        assert liar.membership is not None
        honest = liar.hello

        def lying() -> Hello:
            hello = honest()
            hello.revocations = 2**40
            return hello

        liar.hello = lying  # type: ignore[method-assign]
        exchange = server.members.exchange  # type: ignore[union-attr]

        async def counted(peer: Any) -> bool:
            asked.append(peer)
            return await exchange(peer)

        server.members.exchange = counted  # type: ignore[method-assign,union-attr]
        for _ in range(5):
            assert await square(server, liar) == 9
            await until(lambda: not server.members.is_asking)  # type: ignore[union-attr]
            server.pool.renew()
        assert asked == [liar.peer_id]


def test_list_reaches_everybody_within_seconds() -> None:
    """In a simulated swarm, where each peer is connected to a few others."""

    async def main() -> None:
        network = Network(Link(delay=(0.01, 0.1)))
        tokens = random.Random(3)
        swarm = await start_peers(network, 20, token=SECRET.text)
        for p2p in swarm:
            await serving(p2p)
        for number, p2p in enumerate(swarm):
            neighbours = [swarm[number - 1], *tokens.sample(swarm, 2)]
            for other in neighbours:
                if other is not p2p:
                    p2p.add_addresses(other.peer_id, other.get_addresses(other.peer_id))
                    await square(p2p, other)
        expelled = swarm[7]
        assert swarm[0].members is not None
        swarm[0].members.learn(revoke(swarm[0], expelled.identity.public_key).to_bytes(), None)
        await asyncio.sleep(3)
        for p2p in swarm:
            assert p2p.membership is not None
            assert p2p.membership.serial == (0 if p2p is expelled else 1)
            assert not p2p.server.connections_of(expelled.peer_id) or p2p is expelled
            assert expelled.peer_id not in p2p.pool
        await asyncio.gather(*(p2p.shutdown() for p2p in swarm))

    run(main(), seed=5)


async def test_list_beside_the_token_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "friends.token"
    path.write_text(SECRET.text)
    path.chmod(0o600)
    async with Peers("tcp") as peers:
        p2p = await peers.start(token=path)
        kept = revoke(p2p, bytes(32))
        (tmp_path / "friends.token.revoked").write_bytes(kept.to_bytes())
        later = await peers.start(token=str(path))
        assert later.membership is not None
        assert later.membership.serial == 1
        (tmp_path / "friends.token.revoked").write_bytes(b"nonsense")
        with pytest.raises(P2PDaemonError, match=r"revoked: not a list of revocations.*delete it"):
            await peers.start(token=path)
