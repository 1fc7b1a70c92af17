"""A DHT for members only: which peers may take part, and what a captured message is worth."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
import torch

from shoal.access.tokens import Token
from shoal.averaging import DecentralizedAverager
from shoal.averaging.node import AveragerNode
from shoal.base.clock import TOLERANCE_SECONDS, get_dht_time
from shoal.dht import DHT, DHTID, DHTNode, authorization
from shoal.dht.authorization import (
    RETRY_SECONDS,
    AccessToken,
    AuthorizedRequest,
    AuthorizedResponse,
    AuthRole,
    AuthRPCWrapper,
    RequestAuth,
    TokenAuthorizerBase,
)
from shoal.dht.crypto import PrivateKey, tag_of
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import FindRequest, SentRecord, StoreRequest, StoreResponse
from shoal.errors import (
    BootstrapError,
    NoAccessTokenError,
    NotAMemberError,
    P2PDaemonError,
    P2PHandlerError,
    ProtocolError,
)
from shoal.net.transport import decode_header
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import ProgressExchange
from shoal.optim.progress.records import PerformanceEMA, RefreshPolicy, endorse
from shoal.p2p import Call, Header, P2PContext, ServicerBase
from tests.dht.members import Authority, Member
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

# --- a swarm ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_members_share_a_table():
    swarm, authority = Swarm(), Authority()
    nodes = [await swarm.node(authorizer=Member(authority, f"member {number}")) for number in range(8)]
    nodes.append(await swarm.node(client_mode=True, authorizer=Member(authority, "client")))
    expiration = get_dht_time() + 100
    assert await nodes[-1].store("key", "value", expiration)
    assert await nodes[2].store("dictionary", 1, expiration, subkey="entry")
    for node in nodes:
        assert await node.get("key", latest=True) == ("value", expiration)
        found = await node.get("dictionary", latest=True)
        assert found is not None
        assert found.value == {"entry": (1, expiration)}


@in_virtual_time
async def test_nobody_else_can_join():
    swarm, authority = Swarm(), Authority()
    members = [await swarm.node(authorizer=Member(authority)) for _ in range(3)]
    await members[0].store("secret", 1, get_dht_time() + 100)
    strangers = [None, Member(Authority(), "member of another swarm")]
    for stranger in strangers:
        with pytest.raises(BootstrapError):
            await swarm.node(authorizer=stranger)
        alone = await swarm.node(authorizer=stranger, ensure_bootstrap_success=False, strict=False)
        assert await alone.get("secret", latest=True) is None
        for member in members:
            alone.p2p.add_addresses(member.peer_id, member.p2p.get_addresses(member.peer_id))
            assert await alone.protocol.call_ping(member.peer_id) is None
            assert await alone.protocol.call_find(member.peer_id, [DHTID.generate("secret")]) is None
            assert alone.node_id not in member.protocol.routing_table


@in_virtual_time
async def test_members_do_not_believe_others():
    """An open node answers members, but without proof: that counts as no answer."""
    swarm = Swarm()
    await swarm.node()
    with pytest.raises(BootstrapError):
        await swarm.node(authorizer=Member(Authority()))


@in_virtual_time
async def test_strangers_learn_that_they_get_no_answer():
    swarm = Swarm()
    member = await swarm.node(authorizer=Member(Authority()))
    stranger = await swarm.p2p()
    stranger.add_addresses(member.peer_id, member.p2p.get_addresses(member.peer_id))
    stub = DHTProtocol.get_stub(stranger, member.peer_id)
    with pytest.raises(P2PHandlerError, match="does not answer this peer"):
        await stub.rpc_find(FindRequest(keys=[]))


@in_virtual_time
async def test_tokens_are_refreshed_before_they_expire():
    swarm, authority = Swarm(), Authority()
    authorizers = [Member(authority, lifetime=60.0) for _ in range(3)]
    nodes = [await swarm.node(authorizer=authorizer) for authorizer in authorizers]
    for number in range(5):
        await asyncio.sleep(50)
        assert await nodes[number % 3].store("key", number, get_dht_time() + 100)
        found = await nodes[(number + 1) % 3].get("key", latest=True)
        assert found is not None
        assert found.value == number
    assert all(3 <= authorizer.tokens_given <= 12 for authorizer in authorizers)


@in_virtual_time
async def test_one_token_at_a_time_is_asked_for():
    authorizer = Member(Authority())
    tokens = await asyncio.gather(*(authorizer.refresh_token_if_needed() for _ in range(10)))
    assert authorizer.tokens_given == 1
    assert all(token is tokens[0] for token in tokens)


@in_virtual_time
async def test_failed_refresh_matters_once_the_token_has_expired():
    authorizer = Member(Authority(), lifetime=60.0)
    token = await authorizer.refresh_token_if_needed()
    authorizer.fails = True
    await asyncio.sleep(40)
    assert await authorizer.refresh_token_if_needed() is token
    await asyncio.sleep(40)
    with pytest.raises(RuntimeError, match=r"no access token.*the authority is away"):
        await authorizer.refresh_token_if_needed()


@in_virtual_time
async def test_peers_without_token_fail_at_start():
    swarm, authority = Swarm(), Authority()
    await swarm.node(authorizer=Member(authority))
    without = Member(authority)
    without.fails = True
    with pytest.raises(RuntimeError, match="no access token"):
        await swarm.node(authorizer=without)


@in_virtual_time
async def test_former_member_is_told_by_each_call():
    swarm, authority = Swarm(), Authority()
    authorizers = [Member(authority, lifetime=60.0) for _ in range(3)]
    nodes = [await swarm.node(authorizer=authorizer) for authorizer in authorizers]
    authorizers[1].fails = True
    await asyncio.sleep(61)
    with pytest.raises(RuntimeError, match="no access token"):
        await nodes[1].get("key")
    with pytest.raises(RuntimeError, match="no access token"):
        await nodes[1].store("key", 1, get_dht_time() + 10)
    assert await nodes[0].store("key", 1, get_dht_time() + 10)  # the others carry on
    authorizers[1].fails = False
    assert await nodes[1].get("key") is not None


def make_exchange(node: DHTNode) -> tuple[ProgressBoard, ProgressExchange]:
    now, tag = get_dht_time(), tag_of(node.peer_id)
    board = ProgressBoard(
        node.peer_id.to_bytes(), False, 10**9, RefreshPolicy(), PerformanceEMA(clock=get_dht_time), now
    )
    return board, ProgressExchange(
        *(node, node.p2p, "run", board),
        owner_tag=tag,
        endorsement=endorse(node.p2p.identity, tag),
        min_period=0.5,
        metadata_expiration=60.0,
    )


@in_virtual_time
async def test_peers_rejoin_after_a_time_without_token(caplog):
    swarm, authority = Swarm(), Authority()
    authorizers = [Member(authority, lifetime=60.0) for _ in range(4)]
    nodes = [await swarm.node(authorizer=authorizer) for authorizer in authorizers]
    boards, exchanges = zip(*map(make_exchange, nodes), strict=True)
    for board, exchange in zip(boards, exchanges, strict=True):
        await exchange.start()
        board.report(0, 1, get_dht_time())
        exchange.report_due.set()
    others = boards[1:]
    await asyncio.sleep(30)
    assert all(len(board.expected_members(get_dht_time())) == 3 for board in others)
    authorizers[0].fails = True
    await asyncio.sleep(300)
    assert any(nodes[0].node_id not in node.protocol.routing_table for node in nodes[1:])
    authorizers[0].fails = False
    await asyncio.sleep(60)
    assert all(nodes[0].node_id in node.protocol.routing_table for node in nodes[1:])
    assert all(len(board.expected_members(get_dht_time())) == 3 for board in others)
    assert all(exchange.is_alive for exchange in exchanges)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    for exchange in exchanges:
        await exchange.stop()


@in_virtual_time
async def test_failed_refresh_delays_nobody_with_a_valid_token(caplog):
    authorizer = Member(Authority(), lifetime=60.0)
    token = await authorizer.refresh_token_if_needed()
    authorizer.fails = True
    await asyncio.sleep(40)
    for _ in range(20):
        assert await authorizer.refresh_token_if_needed() is token
    assert caplog.text.count("could not be refreshed") == 1
    authorizer.fails = False
    await asyncio.sleep(RETRY_SECONDS)
    assert await authorizer.refresh_token_if_needed() is not token


@in_virtual_time
async def test_waiting_calls_share_the_failure_of_one_refresh():
    authorizer = Member(Authority())
    authorizer.fails = True
    began = asyncio.get_running_loop().time()
    errors = await asyncio.gather(*(authorizer.refresh_token_if_needed() for _ in range(20)), return_exceptions=True)
    assert all(isinstance(error, NoAccessTokenError) for error in errors)
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.01)


@in_virtual_time
async def test_a_token_for_another_key_is_not_used():
    class Confused(Member):
        async def get_token(self) -> AccessToken:
            return self._authority.token_for(PrivateKey().get_public_key(), "somebody", 60.0)

    with pytest.raises(RuntimeError, match="another key"):
        await Confused(Authority()).refresh_token_if_needed()


# --- one message ------------------------------------------------------------------------------------------------------

CALL = "DHTProtocol.rpc_store called by A at B"


def store_request() -> StoreRequest:
    """Also what the sender spells differently than the receiver reads it: an int where a float travels."""
    return StoreRequest(records=[SentRecord(b"k" * 20, b"", b"v", 17, False)])


def as_received(message):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@in_virtual_time
async def test_a_request_is_good_once():
    authority = Authority()
    sender, receiver = Member(authority), Member(authority)
    request = store_request()
    await sender.sign_request(request, CALL)
    assert await receiver.validate_request(as_received(request), CALL)
    assert not await receiver.validate_request(as_received(request), CALL)
    await asyncio.sleep(TOLERANCE_SECONDS - 1)
    assert not await receiver.validate_request(as_received(request), CALL)
    await asyncio.sleep(1000)  # it is forgotten by now, but too old
    assert not await receiver.validate_request(as_received(request), CALL)


@pytest.mark.parametrize(("age", "is_accepted"), [(-61, False), (-59, True), (0, True), (59, True), (61, False)])
@in_virtual_time
async def test_a_request_must_be_of_now(age: float, is_accepted: bool):
    authority = Authority()
    sender, receiver = Member(authority), Member(authority)
    request = store_request()
    await sender.sign_request(request, CALL)
    assert request.auth is not None
    request.auth.time = get_dht_time() - age
    signed = authorization.signed_bytes(authorization.REQUEST_PURPOSE, CALL, request)
    request.auth.signature = sender._local_private_key.sign(signed)
    assert await receiver.validate_request(request, CALL) is is_accepted


@pytest.mark.parametrize(
    "part", ["time", "nonce", "token name", "token key", "content", "method", "caller", "servicer"]
)
@in_virtual_time
async def test_what_is_signed_cannot_be_changed(part: str):
    authority = Authority()
    sender, receiver, other = Member(authority), Member(authority), Member(authority)
    request, call = store_request(), CALL
    await sender.sign_request(request, call)
    auth = request.auth
    assert auth is not None
    if part == "time":
        auth.time += 1
    elif part == "nonce":
        auth.nonce = bytes(16)
    elif part == "token name":
        auth.token = copy.copy(auth.token)
        auth.token.username = "admin"
    elif part == "token key":
        auth.token = await other.refresh_token_if_needed()
    elif part == "content":
        request.records = [SentRecord(b"k" * 20, b"", b"another value", 17, False)]
    else:
        call = {"method": CALL.replace("store", "find"), "caller": CALL.replace("A", "C")}.get(
            part, CALL.replace("at B", "at C")
        )
    assert not await receiver.validate_request(as_received(request), call)


@in_virtual_time
async def test_answers_belong_to_their_requests():
    authority = Authority()
    asker, answerer = Member(authority), Member(authority)
    first, second, response = AuthorizedRequest(), AuthorizedRequest(), AuthorizedResponse()
    await asker.sign_request(first, CALL)
    await asker.sign_request(second, CALL)
    assert not await asker.validate_response(response, first, CALL)  # not signed
    await answerer.sign_response(response, first, CALL)
    assert await asker.validate_response(as_received(response), first, CALL)
    assert not await asker.validate_response(as_received(response), second, CALL)
    assert not await asker.validate_response(as_received(response), first, CALL + " else")
    await Member(Authority()).sign_response(response, first, CALL)
    assert not await asker.validate_response(as_received(response), first, CALL)


@in_virtual_time
async def test_a_request_is_no_answer():
    """Both sides of a call sign with the same key: one's signature must not do for the other."""
    authority = Authority()
    member, request, response = Member(authority), AuthorizedRequest(), AuthorizedResponse()
    await member.sign_request(request, CALL)
    await member.sign_response(response, request, CALL)
    assert request.auth is not None
    assert response.auth is not None
    response.auth.signature = request.auth.signature
    assert not await member.validate_response(response, request, CALL)


@in_virtual_time
async def test_hostile_tokens_are_refused_even_if_checks_raise():
    class Fragile(Member):
        def is_token_valid(self, access_token: AccessToken) -> bool:
            return float(access_token.username) > 0

    authority = Authority()
    request = store_request()
    await Member(authority, name="not a number").sign_request(request, CALL)
    assert not await Fragile(authority, name="1").validate_request(request, CALL)
    assert request.auth is not None
    request.auth.token.public_key = b"ssh-rsa nonsense"
    assert not await Member(authority).validate_request(request, CALL)
    trusting = Member(authority)
    trusting.is_token_valid = lambda token: True  # type: ignore[method-assign]
    assert not await trusting.validate_request(request, CALL)


# --- the wrapper ------------------------------------------------------------------------------------------------------


class Question(AuthorizedRequest):
    text: str


class Reply(AuthorizedResponse):
    text: str


class Oracle(ServicerBase):
    name = "Delphi"

    async def rpc_ask(self, request: Question, context: P2PContext) -> Reply:
        return Reply(text=request.text[::-1])


@in_virtual_time
async def test_any_servicer_can_be_for_members_only():
    swarm, authority = Swarm(), Authority()
    servicer, caller = await swarm.p2p(), await swarm.p2p()
    caller.add_addresses(servicer.peer_id, servicer.get_addresses(servicer.peer_id))
    wrapped = AuthRPCWrapper(Oracle(), AuthRole.SERVICER, Member(authority))
    await Oracle().add_p2p_handlers(servicer, wrapped)
    assert wrapped.name == "Delphi"
    stub = Oracle.get_stub(caller, servicer.peer_id)
    member = AuthRPCWrapper(stub, AuthRole.CLIENT, Member(authority))
    for _ in range(2):
        assert (await member.rpc_ask(Question(text="abc"))).text == "cba"
    with pytest.raises(P2PHandlerError, match="does not answer"):
        await stub.rpc_ask(Question(text="abc"))
    with pytest.raises(AttributeError, match="no remote method"):
        await member.rpc_other(Question(text="abc"))


@in_virtual_time
async def test_an_answer_without_proof_is_none():
    swarm = Swarm()
    servicer, caller = await swarm.p2p(), await swarm.p2p()
    caller.add_addresses(servicer.peer_id, servicer.get_addresses(servicer.peer_id))
    await Oracle().add_p2p_handlers(servicer)
    stub = Oracle.get_stub(caller, servicer.peer_id)
    member = AuthRPCWrapper(stub, AuthRole.CLIENT, Member(Authority()))
    assert await member.rpc_ask(Question(text="abc"), timeout=3.0) is None


class Plain(Header):
    pass


class OpenServicer(ServicerBase):
    async def rpc_ask(self, request: Plain, context: P2PContext) -> Plain:
        return request


def test_messages_that_cannot_be_signed_are_refused():
    class Streaming(ServicerBase):
        async def rpc_ask(self, request: Question, context: P2PContext) -> AsyncIterator[Reply]:
            yield Reply(text="")

    with pytest.raises(TypeError, match=r"Streaming\.rpc_ask cannot be authorized: it must take one message"):
        AuthRPCWrapper(Streaming(), AuthRole.SERVICER, Member(Authority()))
    with pytest.raises(TypeError, match=r"OpenServicer\.rpc_ask cannot be authorized"):
        AuthRPCWrapper(OpenServicer(), AuthRole.SERVICER, Member(Authority()))


@in_virtual_time
async def test_the_authorizer_must_be_one():
    p2p = await Swarm().p2p()
    with pytest.raises(TypeError, match="AuthorizerBase"):
        await DHTNode.create(p2p=p2p, authorizer="secret")  # type: ignore[arg-type]


def test_unsigned_messages_carry_nothing_for_it():
    assert b"auth" not in msgspec.msgpack.encode(store_request())


def test_keys_of_members_are_the_ones_of_records():
    """One key for both, so that a swarm can tell who wrote a record."""
    key = PrivateKey()
    assert pickle.loads(pickle.dumps(key)).to_bytes() == key.to_bytes()

    class Minimal(Member):
        def __init__(self) -> None:
            TokenAuthorizerBase.__init__(self)

    assert Minimal().local_public_key == PrivateKey.process_wide().get_public_key()


@pytest.mark.parametrize("nonce", [b"", b"x" * 15, b"x" * 17])
def test_a_nonce_has_one_length(nonce: bytes):
    request = AuthorizedRequest(auth=RequestAuth(AccessToken(), 0.0, nonce))
    with pytest.raises(ProtocolError):
        decode_header(msgspec.msgpack.encode(request), AuthorizedRequest)


class MemberOfOldStyle(TokenAuthorizerBase):
    """Learns the authority's key when it logs in, and tells times as text."""

    authority_key = PrivateKey()

    def __init__(self) -> None:
        super().__init__(PrivateKey())
        self._authority_public_key: Any = None

    async def get_token(self) -> AccessToken:
        self._authority_public_key = self.authority_key.get_public_key()
        expires = datetime.now(timezone.utc) + timedelta(minutes=1)
        token = AccessToken("bob", self.local_public_key.to_bytes(), expires.isoformat())
        token.signature = self.authority_key.sign(token.signed_bytes())
        return token

    def is_token_valid(self, access_token: AccessToken) -> bool:
        if not self._authority_public_key.verify(access_token.signed_bytes(), access_token.signature):
            return False
        return datetime.fromisoformat(access_token.expiration_time) > datetime.now(timezone.utc)

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        return datetime.fromisoformat(access_token.expiration_time) < datetime.now(timezone.utc)


async def test_without_preparation_and_with_times_as_text():
    client, service = MemberOfOldStyle(), MemberOfOldStyle()
    request = store_request()
    await client.sign_request(request, "call")
    request = as_received(request)
    assert await service.validate_request(request, "call")
    response = StoreResponse(refusals=[None])
    await service.sign_response(response, request, "call")
    client = copy.copy(client)
    client._local_token = client._authority_public_key = None
    assert await client.validate_response(as_received(response), request, "call")
    token = as_received(request).auth.token
    token.expiration_time = token.expiration_time.replace("20", "21", 1)
    assert not client.is_token_valid(token), "the text is signed, too"


@pytest.mark.parametrize("when", [None, datetime.now(timezone.utc), b"2026-01-01"])
def test_tokens_with_unsendable_expiration_are_refused_when_made(when):
    with pytest.raises(TypeError, match="expiration_time must be a number or text, got"):
        AccessToken("bob", b"key", when)


def test_integer_and_float_expirations_make_equal_tokens():
    token = AccessToken("bob", b"key", 5)
    assert token.signed_bytes() == AccessToken("bob", b"key", 5.0).signed_bytes()
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(token), type=AccessToken)
    assert (arrived.expiration_time, type(arrived.expiration_time)) == (5.0, float)


# --- what is served beside the table ----------------------------------------------------------------------------------


class Note(Header):
    text: str = ""


class Secret(ServicerBase):
    """Stands for an averager, a state or a tracker."""

    def __init__(self) -> None:
        self.callers: list[Any] = []

    async def rpc_tell(self, request: Note, context: P2PContext) -> Note:
        self.callers.append(context.remote_id)
        return Note(f"for {request.text}")

    async def rpc_stream(self, call: Call, context: P2PContext) -> None:
        self.callers.append(context.remote_id)
        await call.send(Note("streamed"), end=True)


async def read_stream(stub: Any) -> str | None:
    async with stub.rpc_stream() as call:
        await call.send_end()
        note = await call.receive(Note)
        return None if note is None else note.text


async def serve_secret(node: DHTNode) -> Secret:
    secret = Secret()
    await secret.add_p2p_handlers(node.p2p, namespace="run")
    return secret


def stub_at(node: DHTNode, caller: Any) -> Any:
    caller.add_addresses(node.p2p.peer_id, node.p2p.get_addresses(node.p2p.peer_id))
    return Secret.get_stub(caller, node.p2p.peer_id, namespace="run")


@in_virtual_time
async def test_members_prove_membership_once_per_connection():
    swarm, authority = Swarm(), Authority()
    server, caller = [await swarm.node(authorizer=Member(authority)) for _ in range(2)]
    secret = await serve_secret(server)
    stub = stub_at(server, caller.p2p)
    made = caller.p2p.metrics.bytes_sent_by_handler
    for _ in range(5):
        assert (await stub.rpc_tell(Note("you"))).text == "for you"
    assert await read_stream(stub) == "streamed"
    assert secret.callers == [caller.peer_id] * 6
    proofs = made["MembersOnly.rpc_enter"]
    assert proofs > 0
    assert await read_stream(stub) == "streamed"
    assert made["MembersOnly.rpc_enter"] == proofs


@in_virtual_time
async def test_a_member_that_only_calls_is_let_in():
    swarm, authority = Swarm(), Authority()
    server = await swarm.node(authorizer=Member(authority))
    caller = await swarm.node(client_mode=True, authorizer=Member(authority))
    await serve_secret(server)
    assert (await stub_at(server, caller.p2p).rpc_tell(Note("you"))).text == "for you"


@pytest.mark.parametrize("kind", ["without a table", "of an open table", "of another swarm"])
@in_virtual_time
async def test_nobody_else_is_answered(kind):
    swarm, authority = Swarm(), Authority()
    server = await swarm.node(authorizer=Member(authority))
    secret = await serve_secret(server)
    if kind == "without a table":
        stranger = await swarm.p2p()
    else:
        authorizer = None if kind == "of an open table" else Member(Authority())
        stranger = (await swarm.node(initial_peers=[], authorizer=authorizer)).p2p
    stub = stub_at(server, stranger)
    for attempt in (stub.rpc_tell(Note("me")), read_stream(stub), stub.rpc_tell(Note("me"))):
        with pytest.raises((P2PHandlerError, P2PDaemonError), match=r"only members|does not let this peer in"):
            await attempt
    assert secret.callers == []
    if kind != "of another swarm":
        assert server.p2p.metrics.calls_refused["not a member"] == 3


@in_virtual_time
async def test_private_runs_need_a_badge_as_well():
    swarm, authority, token = Swarm(), Authority(), Token.new_run("private").text
    server = await swarm.node(authorizer=Member(authority), token=token)
    secret = await serve_secret(server)
    member = await swarm.node(authorizer=Member(authority), token=token)
    note = await stub_at(server, member.p2p).rpc_tell(Note("me"))
    assert note.text == "for me"
    without_badge = await swarm.node(initial_peers=[], authorizer=Member(authority))
    with pytest.raises(NotAMemberError, match="this peer has no token"):
        await stub_at(server, without_badge.p2p).rpc_tell(Note("me"))
    without_authority = await swarm.node(initial_peers=[], token=token)
    with pytest.raises(P2PHandlerError, match="only members"):
        await stub_at(server, without_authority.p2p).rpc_tell(Note("me"))
    assert secret.callers == [member.peer_id]


@pytest.mark.parametrize("is_open", [True, False])
@in_virtual_time
async def test_a_member_tells_nothing_to_who_is_none(is_open):
    swarm = Swarm()
    other = await swarm.node(authorizer=None if is_open else Member(Authority()))
    secret = await serve_secret(other)
    member = await swarm.node(initial_peers=[], authorizer=Member(Authority()))
    with pytest.raises(P2PDaemonError, match="does not let this peer in, or is no member itself"):
        await stub_at(other, member.p2p).rpc_tell(Note("my gradients"))
    assert secret.callers == []


@in_virtual_time
async def test_an_answer_without_proof_is_not_believed(monkeypatch):
    swarm, authority = Swarm(), Authority()
    server, caller = [await swarm.node(authorizer=Member(authority)) for _ in range(2)]
    await serve_secret(server)

    async def forget_to_sign(*_: Any) -> None:
        return None

    monkeypatch.setattr(server.protocol.authorizer, "sign_response", forget_to_sign)
    with pytest.raises(P2PDaemonError, match="does not prove that it is a member"):
        await stub_at(server, caller.p2p).rpc_tell(Note("you"))


@in_virtual_time
async def test_silent_peer_at_the_gate_times_out():
    swarm, authority = Swarm(), Authority()
    server, caller = [await swarm.node(authorizer=Member(authority)) for _ in range(2)]
    await serve_secret(server)
    await caller.protocol.call_ping(server.peer_id)  # there is a connection
    swarm.fall_silent(server)
    with pytest.raises(P2PDaemonError, match="has not let this peer in within 15 s"):
        await stub_at(server, caller.p2p).rpc_tell(Note("you"))
    assert caller.p2p.pool.in_use_count == 0


@in_virtual_time
async def test_gate_stays_closed_after_the_dht_ended():
    swarm, authority = Swarm(), Authority()
    server = await swarm.node(authorizer=Member(authority))
    secret = await serve_secret(server)
    await server.shutdown()
    with pytest.raises(P2PHandlerError, match="only members"):
        await stub_at(server, await swarm.p2p()).rpc_tell(Note("me"))
    assert secret.callers == []


def test_members_average_and_strangers_get_no_state():
    authority = Authority()
    options = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "start": True}
    first = DHT(authorizer=Member(authority), **options)
    second = DHT(authorizer=Member(authority), initial_peers=first.get_visible_maddrs(), **options)
    stranger = DHT(**options)
    averagers = [
        DecentralizedAverager([torch.full([4], float(i))], dht, prefix="closed", min_matchmaking_time=2.0, start=True)
        for i, dht in enumerate((first, second))
    ]
    steps = [averager.step(wait=False, timeout=60) for averager in averagers]
    assert all(step.result(60) is not None for step in steps)
    for averager in averagers:
        with averager.get_tensors() as tensors:
            assert torch.equal(tensors[0], torch.full([4], 0.5))
    assert averagers[1].load_state_from_peers(timeout=30) is not None

    async def ask_for_the_state() -> None:
        p2p = stranger.node.p2p
        p2p.add_addresses(first.peer_id, first.get_visible_maddrs())
        async with AveragerNode.get_stub(p2p, first.peer_id, namespace="closed").rpc_download_state() as call:
            await call.send_end()
            await call.receive(Header)

    with pytest.raises(P2PHandlerError, match="only members may call this"):
        stranger.portal.submit(ask_for_the_state()).result(30)
    for each in (*averagers, stranger, second, first):
        each.shutdown()


# --- authorizers of programs that know no ``call`` --------------------------------------------------------------------


class MemberWithoutCall(Member):
    """Its methods have the parameters of other libraries."""

    async def sign_request(self, request: Any, service_public_key: Any) -> None:  # type: ignore[override]
        await super().sign_request(request, service_public_key)

    async def validate_request(self, request: Any) -> bool:  # type: ignore[override]
        return await super().validate_request(request)

    async def sign_response(self, response: Any, request: Any) -> None:  # type: ignore[override]
        await super().sign_response(response, request)

    async def validate_response(self, response: Any, request: Any) -> bool:  # type: ignore[override]
        return await super().validate_response(response, request)


@in_virtual_time
async def test_authorizers_without_call_parameter_work_with_others():
    swarm, authority = Swarm(), Authority()
    first = await swarm.node(authorizer=MemberWithoutCall(authority, "first"))
    second = await swarm.node(authorizer=Member(authority, "second"))
    assert await second.store("key", "value", get_dht_time() + 100)
    assert (await first.get("key", latest=True)).value == "value"


async def test_members_refuse_requests_addressed_to_others():
    authority = Authority()
    asker, answerer = (Member(authority, name) for name in ("asker", "answerer"))
    for service, is_valid in ((answerer, True), (asker, False)):
        request = FindRequest([b"0" * 20])
        await asker.sign_request(request, service.local_public_key)
        assert request.auth.client_access_token is request.auth.token
        assert await answerer.validate_request(request) is is_valid
