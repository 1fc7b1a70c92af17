"""The three calls between two nodes, honest and hostile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import records
from shoal.dht.local_records import LocalRecords
from shoal.dht.node import NodeConfig
from shoal.dht.protocol import PING_BACK_SHARE, DHTProtocol
from shoal.dht.records import (
    FindRequest,
    FindResponse,
    FindResult,
    Found,
    NewRecord,
    NodeContact,
    PingRequest,
    PingResponse,
    StoreRequest,
    StoreResponse,
    pack_contact,
    split_into_requests,
)
from shoal.dht.routing import DHTID
from shoal.dht.storage import DictionaryDHTValue
from shoal.dht.validation import PLAIN_VALUE, WHOLE_DICTIONARY, DHTRecord, Outcome, Reason, RecordValidatorBase
from shoal.errors import (
    DialError,
    IdentityMismatchError,
    InterruptedDialError,
    P2PHandlerError,
    ProtocolError,
    RefusedDialError,
    StreamClosedError,
    ValidationError,
)
from shoal.net.transport import decode_header
from shoal.p2p import P2P, Header, P2PContext, PeerID, ServicerBase
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

pytestmark = pytest.mark.oldest

KEY = DHTID.generate("key")


def later(seconds: float) -> float:
    return get_dht_time() + seconds


def plain(value: bytes, expiration_time: float, key: DHTID = KEY, in_cache: bool = False) -> NewRecord:
    return NewRecord(key, PLAIN_VALUE, value, expiration_time, in_cache)


async def make_protocol(swarm: Swarm, **options: Any) -> DHTProtocol:
    p2p = await swarm.p2p(client_mode=options.get("client_mode", False))
    node_id = options.pop("node_id", None) or DHTID.generate(rng=swarm.rng)
    others = {name: options.pop(name) for name in ("client_mode", "record_validator", "authorizer") if name in options}
    protocol = DHTProtocol(p2p, node_id, NodeConfig(**options), **others)
    await protocol.start()
    return protocol


async def introduce(one: DHTProtocol, other: DHTProtocol) -> None:
    one.p2p.add_addresses(other.p2p.peer_id, await other.p2p.get_visible_maddrs())


async def pair(**options: Any) -> tuple[DHTProtocol, DHTProtocol]:
    swarm = Swarm()
    caller, server = await make_protocol(swarm), await make_protocol(swarm, **options)
    await introduce(caller, server)
    return caller, server


# --- the three calls --------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_ping_makes_nodes_known_to_each_other():
    caller, server = await pair()
    assert await caller.call_ping(server.p2p.peer_id) == server.node_id
    assert caller.routing_table[server.node_id] == server.p2p.peer_id
    assert server.routing_table[caller.node_id] == caller.p2p.peer_id


@in_virtual_time
async def test_a_client_is_never_entered():
    swarm = Swarm()
    client, server = await make_protocol(swarm, client_mode=True), await make_protocol(swarm)
    await introduce(client, server)
    assert await client.call_ping(server.p2p.peer_id) == server.node_id
    assert await client.call_store(server.p2p.peer_id, [plain(b"v", later(5))]) == [True]
    assert (await client.call_find(server.p2p.peer_id, [KEY])).records[KEY].value == b"v"
    assert len(server.routing_table) == 0
    assert len(client.routing_table) == 1


@in_virtual_time
async def test_store_and_find_plain_values():
    caller, server = await pair()
    peer = server.p2p.peer_id
    expires = later(10)
    assert await caller.call_store(peer, [plain(b"v", expires)]) == [True]
    assert await caller.call_store(peer, [plain(b"w", expires), plain(b"x", expires, DHTID(5))]) == [False, True]
    answer = await caller.call_find(peer, [KEY, DHTID(5), DHTID(6)])
    assert answer.records[KEY][:2] == (b"v", expires)
    assert answer.records[DHTID(5)][:2] == (b"x", expires)
    assert answer.records[DHTID(6)][:2] == (None, -math.inf)
    assert answer.node_id == server.node_id.to_bytes()


@in_virtual_time
async def test_store_and_find_dictionaries():
    caller, server = await pair()
    peer = server.p2p.peer_id
    entries = [
        NewRecord(KEY, MSGPackSerializer.dumps(subkey), value, later(seconds))
        for subkey, value, seconds in [("a", b"1", 5), (("b", 2), b"2", 10), ("a", b"3", 4)]
    ]
    assert await caller.call_store(peer, entries) == [True, True, False]
    record = (await caller.call_find(peer, [KEY])).records[KEY]
    assert isinstance(record.value, DictionaryDHTValue)
    assert {subkey: item.value for subkey, item in record.value.items()} == {"a": b"1", ("b", 2): b"2"}
    assert record.expiration_time == entries[1].expiration_time


@in_virtual_time
async def test_requests_for_neighbors_get_no_values():
    caller, server = await pair()
    peer = server.p2p.peer_id
    assert await caller.call_store(peer, [plain(b"v" * 10_000, later(10))]) == [True]
    sent = server.p2p.metrics.bytes_sent
    answer = await caller.call_find(peer, [KEY], neighbors_only=True)
    assert answer.records[KEY] == (None, -math.inf, [], Outcome(Reason.NOTHING))
    assert server.p2p.metrics.bytes_sent < sent + 1000


@in_virtual_time
async def test_a_whole_dictionary_can_be_stored_at_once():
    caller, server = await pair()
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    dictionary.store("a", b"1", later(5))
    dictionary.store("b", b"2", later(9))
    record = LocalRecords(None, None).copy_for_others(KEY, dictionary, dictionary.latest_expiration_time)
    assert record.subkey == WHOLE_DICTIONARY
    assert await caller.call_store(server.p2p.peer_id, [record]) == [True]
    assert sorted(subkey for subkey, _ in server.storage.get(KEY).value.items()) == ["a", "b"]


@in_virtual_time
async def test_find_prefers_the_later_copy():
    caller, server = await pair()
    peer = server.p2p.peer_id
    await caller.call_store(peer, [plain(b"stored", later(10)), plain(b"cached", later(20), in_cache=True)])
    assert server.storage.get(KEY).value == b"stored"
    assert server.cache.get(KEY).value == b"cached"
    assert (await caller.call_find(peer, [KEY])).records[KEY].value == b"cached"
    await caller.call_store(peer, [plain(b"newer", later(30))])
    assert (await caller.call_find(peer, [KEY])).records[KEY].value == b"newer"


@in_virtual_time
async def test_find_tells_nearest_nodes_except_the_asker():
    swarm = Swarm()
    server, *others = [await make_protocol(swarm, bucket_size=5) for _ in range(12)]
    for other in others:
        await introduce(other, server)
        await other.call_ping(server.p2p.peer_id)
    asker = others[0]
    known = {node_id for node_id, _ in server.routing_table}
    assert asker.node_id in known
    answer = await asker.call_find(server.p2p.peer_id, [KEY, DHTID(0)])
    for key in (KEY, DHTID(0)):
        expected = sorted(known - {asker.node_id}, key=key.xor_distance)[:5]
        assert answer.records[key].neighbors == expected
    assert set(answer.contacts) == {n for r in answer.records.values() for n in r.neighbors}
    assert len(answer.contacts) < 10, "each node is described once"
    contact = records.unpack_contact(next(iter(answer.contacts.values())))
    assert contact.addresses[0].startswith("/memory/")


@in_virtual_time
async def test_dead_peers_leave_the_routing_table():
    caller, server = await pair()
    assert await caller.call_ping(PeerID(b"unknown")) is None
    await caller.call_ping(server.p2p.peer_id)
    await server.p2p.shutdown()
    assert await caller.call_find(server.p2p.peer_id, [KEY]) is None
    assert server.node_id not in caller.routing_table
    assert await caller.call_store(server.p2p.peer_id, [plain(b"v", later(5))]) is None


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("method", ["call_find", "call_store", "call_ping"])
@pytest.mark.parametrize("when", ["dialling", "calling"])
@in_virtual_time
async def test_broken_connections_do_not_prove_death(when, method, failures):
    swarm = Swarm()
    one, other = await swarm.grow(2)
    call, left = one.p2p.call, failures

    async def call_over_bad_connections(*args, **options):
        nonlocal left
        left -= 1
        if left >= 0 and when == "dialling":
            raise InterruptedDialError("the connection was closed during the handshake")
        answer = await call(*args, **options)
        if left >= 0:
            raise StreamClosedError("the connection broke")
        return answer

    one.p2p.call = call_over_bad_connections
    record = NewRecord(KEY, PLAIN_VALUE, b"1", later(10))
    argument = {"call_find": [[KEY]], "call_store": [[record]], "call_ping": []}[method]
    answer = await getattr(one.protocol, method)(other.peer_id, *argument)
    is_tried_again = when == "dialling" or method != "call_store"
    assert (answer is not None) is (is_tried_again and failures < 3)
    assert (other.node_id in one.protocol.routing_table) is (answer is not None)
    assert (KEY in other.protocol.storage) is (method == "call_store" and (when == "calling" or failures < 3))
    if method == "call_store" and answer:
        assert answer == [True]


@in_virtual_time
async def test_silent_peer_costs_one_timeout():
    swarm = Swarm()
    caller, server = await make_protocol(swarm), await make_protocol(swarm)
    await introduce(caller, server)
    await caller.call_ping(server.p2p.peer_id)
    swarm.silent_peers.append(server.p2p.peer_id)
    start = asyncio.get_running_loop().time()
    assert await caller.call_find(server.p2p.peer_id, [KEY]) is None
    assert asyncio.get_running_loop().time() - start == pytest.approx(3)


@in_virtual_time
async def test_calls_in_flight_can_be_limited():
    swarm = Swarm(delay=0.5)
    caller = await make_protocol(swarm, parallel_rpc=2)
    servers = [await make_protocol(swarm) for _ in range(6)]
    for server in servers:
        await introduce(caller, server)
    start = asyncio.get_running_loop().time()
    await asyncio.gather(*(caller.call_ping(server.p2p.peer_id) for server in servers))
    one_after_another = asyncio.get_running_loop().time() - start
    assert one_after_another == pytest.approx(3 * 2.0), "three times dialling and asking"


# --- joining checks ---------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_reachable_node_passes_the_check():
    caller, server = await pair()
    response = await caller.ping(server.p2p.peer_id, validate=True)
    assert response.available


@in_virtual_time
async def test_uncallable_node_is_told_in_time():
    caller, server = await pair()
    await caller.p2p.transport.close()
    with pytest.raises(ValidationError, match="cannot call this node back"):
        await caller.ping(server.p2p.peer_id, validate=True)
    assert len(server.routing_table) == 0


@in_virtual_time
async def test_node_behind_a_black_hole_is_told():
    caller, server = await pair()

    async def never(*args):
        await asyncio.sleep(1e9)

    server.p2p.transport.dial = never
    start = asyncio.get_running_loop().time()
    with pytest.raises(ValidationError, match="cannot call this node back"):
        await caller.ping(server.p2p.peer_id, validate=True)
    assert asyncio.get_running_loop().time() - start < 3


@pytest.mark.parametrize("error", [RefusedDialError, IdentityMismatchError, InterruptedDialError, DialError, None])
@in_virtual_time
async def test_answer_times_reveal_nothing_to_scanners(error):
    """A newcomer says where to call it, and a port there may be closed, filtered, or open for something else."""
    caller, server = await pair()
    began, loop = 0.0, asyncio.get_running_loop()

    async def dial(*args):
        nonlocal began
        began = began or loop.time()
        if error is None:
            await asyncio.sleep(1e9)
        raise error("no such peer")

    server.p2p.transport.dial = dial
    answer = await server._can_call_back(caller.node_id.to_bytes(), caller.p2p.peer_id)
    assert answer is False
    assert loop.time() - began == pytest.approx(server.wait_timeout * PING_BACK_SHARE, abs=1e-9)


@pytest.mark.parametrize(("offset", "fits"), [(0, True), (2.9, True), (-2.9, True), (3.2, False), (-3.2, False)])
@in_virtual_time
async def test_clocks_must_agree(monkeypatch, offset, fits):
    caller, server = await pair()
    answer = server.rpc_ping

    async def with_another_clock(request: PingRequest, context: P2PContext) -> PingResponse:
        return msgspec.structs.replace(await answer(request, context), dht_time=get_dht_time() + offset)

    handle = "DHTProtocol.rpc_ping"
    handlers = server.p2p.server.handlers
    handlers[handle] = dataclasses.replace(handlers[handle], function=with_another_clock)
    if fits:
        await caller.ping(server.p2p.peer_id, validate=True)
    else:
        with pytest.raises(ValidationError, match=r"clock off by 3\.\d s: peer"):
            await caller.ping(server.p2p.peer_id, validate=True)


# --- validation of records --------------------------------------------------------------------------------------------


class NoBadValues(RecordValidatorBase):
    def validate(self, record: DHTRecord) -> bool:
        return not record.value.startswith(b"bad")


@in_virtual_time
async def test_invalid_records_are_not_stored():
    caller, server = await pair(record_validator=NoBadValues())
    subkey = MSGPackSerializer.dumps("s")
    records = [
        plain(b"bad", later(9)),
        plain(b"good", later(9)),
        NewRecord(DHTID(5), subkey, b"bad", later(9)),
        NewRecord(DHTID(5), subkey, b"good", later(9)),
    ]
    assert await caller.call_store(server.p2p.peer_id, records) == [False, True, False, True]


@in_virtual_time
async def test_invalid_records_do_not_spoil_neighbors():
    swarm = Swarm()
    caller = await make_protocol(swarm, record_validator=NoBadValues())
    server, third = await make_protocol(swarm), await make_protocol(swarm)
    await introduce(caller, server)
    await introduce(third, server)
    await third.call_ping(server.p2p.peer_id)
    peer = server.p2p.peer_id
    await caller.call_store(peer, [plain(b"bad", later(9))])
    for subkey, value, seconds in [("a", b"good", 9), ("b", b"bad", 99)]:
        await caller.call_store(peer, [NewRecord(DHTID(5), MSGPackSerializer.dumps(subkey), value, later(seconds))])
    answer = await caller.call_find(peer, [KEY, DHTID(5)])
    for key in (KEY, DHTID(5)):
        assert answer.records[key].neighbors == [third.node_id]
    assert answer.records[KEY].value is None
    assert [subkey for subkey, _ in answer.records[DHTID(5)].value.items()] == ["a"], "that node knows no such rule"
    assert answer.records[DHTID(5)].expiration_time < later(10)


@in_virtual_time
async def test_askers_get_more_neighbors_within_limits():
    swarm = Swarm()
    caller, server = await pair()
    for _ in range(200):
        peer = (await swarm.p2p()).peer_id
        server.p2p.add_addresses(peer, ["/memory/1"])
        server.routing_table.add_or_update_node(DHTID.generate(rng=swarm.rng), peer)
    known = [node_id for node_id in server.routing_table.peer_id_to_node.values()]
    assert len(known) > 70
    for wanted, told in [(0, 20), (5, 20), (70, 70), (10_000, min(len(known), records.MAX_NEIGHBORS))]:
        answer = await caller.call_find(server.p2p.peer_id, [KEY], wanted)
        others = sorted((node_id for node_id in known if node_id != caller.node_id), key=KEY.xor_distance)
        assert answer.records[KEY].neighbors == others[:told]
    keys = [DHTID(number) for number in range(records.MAX_KEYS_PER_FIND)]
    answer = await caller.call_find(server.p2p.peer_id, keys, 128)
    assert {len(record.neighbors) for record in answer.records.values()} == {20}
    stub = DHTProtocol.get_stub(caller.p2p, server.p2p.peer_id)
    with pytest.raises(P2PHandlerError, match="ProtocolError"):
        await stub.rpc_find(FindRequest(keys=[], neighbors=records.MAX_NEIGHBORS + 1))


@in_virtual_time
async def test_changed_addresses_are_told():
    caller, server = await pair()
    swarm = Swarm()
    moved = [await swarm.p2p() for _ in range(3)][-1].peer_id
    node_id = DHTID(7)
    for number in (1, 2):
        server.p2p.address_book.replace(moved, [f"/memory/{number}"])
        server.routing_table.add_or_update_node(node_id, moved)
        for _ in range(2):
            answer = await caller.call_find(server.p2p.peer_id, [KEY])
            assert records.unpack_contact(answer.contacts[node_id]).addresses == [f"/memory/{number}"]


@in_virtual_time
async def test_ids_are_told_with_their_current_peer():
    caller, server = await pair()
    swarm = Swarm()
    *_, former, present = [(await swarm.p2p()).peer_id for _ in range(4)]
    server.p2p.add_addresses(former, ["/memory/1"])
    server.p2p.add_addresses(present, ["/memory/2"])
    for peer in (former, present):
        server.note_alive(DHTID(7).to_bytes(), peer)
        answer = await caller.call_find(server.p2p.peer_id, [KEY])
        assert records.unpack_contact(answer.contacts[DHTID(7)]).peer_id == peer.to_bytes()
        server.routing_table.suspect(DHTID(7))


# --- sizes ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_values_too_large_together_are_fetched_alone():
    caller, server = await pair()
    keys = [DHTID(number) for number in range(6)]
    values = [bytes([number]) * 300_000 for number in range(6)]
    records = [plain(value, later(100), key) for key, value in zip(keys, values, strict=True)]
    assert len(list(split_into_requests(records))) == 3
    assert await caller.call_store(server.p2p.peer_id, records) == [True] * 6
    answer = await caller.call_find(server.p2p.peer_id, keys)
    assert [answer.records[key].value for key in keys] == values


@in_virtual_time
async def test_many_small_records_are_split_too():
    caller, server = await pair()
    records = [plain(b"v", later(100), DHTID(number)) for number in range(1000)]
    assert await caller.call_store(server.p2p.peer_id, records) == [True] * 1000
    assert len(server.storage) == 1000


@in_virtual_time
async def test_oversized_dictionary_sends_its_latest_entries(caplog, monkeypatch):
    # Another test may have caused that line already.
    monkeypatch.setattr(records, "warn_seldom", Seldom(records.logger.warning))
    caller, server = await pair()
    expirations = {number: later(100 + number) for number in range(1000)}
    for number, expires in expirations.items():
        server.storage.store(KEY, b"x" * 1000, expires, subkey=number)
    record = (await caller.call_find(server.p2p.peer_id, [KEY])).records[KEY]
    found = [subkey for subkey, _ in record.value.items()]
    assert 700 < len(found) < 800
    assert sorted(found) == list(range(1000 - len(found), 1000))
    assert record.expiration_time == expirations[999]
    assert "only some of them are sent" in caplog.text


# --- hostile requests -------------------------------------------------------------------------------------------------


class AnyStore(Header):
    records: Any
    node_id: Any = None


class AnyFind(Header):
    keys: Any
    node_id: Any = None


class AnyPing(Header):
    node_id: Any = None
    validate: Any = False


GOOD_RECORD = [KEY.to_bytes(), PLAIN_VALUE, b"v", 2e9, False]


def with_part(position: int, part: object) -> list[object]:
    """A record of which one part is another."""
    return [part if number == position else each for number, each in enumerate(GOOD_RECORD)]


HOSTILE_REQUESTS = (
    [
        ("rpc_store", AnyStore([with_part(position, part)]))
        for position, parts in enumerate(
            [
                [b"short", b"x" * 21, b"", "text", None],
                [None, b"x" * 5000],
                ["text", b"x" * (records.MAX_VALUE_BYTES + 1)],
                [math.nan, math.inf, -math.inf, -1.0, None, "soon"],
                [1, None],
            ]
        )
        for part in parts
    ]
    + [
        ("rpc_store", AnyStore(**{"records": [GOOD_RECORD], **change}))
        for change in [
            {"records": None},
            {"records": 5},
            {"records": [GOOD_RECORD[:4]]},
            {"records": [GOOD_RECORD] * 257},
            {"records": [None] * 100_000},
            {"node_id": b"short"},
            {"node_id": b"x" * 21},
            {"node_id": 5},
        ]
    ]
    + [
        ("rpc_find", AnyFind(**change))
        for change in [
            {"keys": [b"short"]},
            {"keys": [KEY.to_bytes()] * 65},
            {"keys": [[]]},
            {"keys": {}},
            {"keys": [KEY.to_bytes()], "node_id": b""},
            {"keys": [KEY.to_bytes()], "node_id": "text"},
        ]
    ]
)
HOSTILE_REQUESTS += [
    ("rpc_ping", AnyPing(node_id=b"short")),
    ("rpc_ping", AnyPing(node_id=[])),
    ("rpc_ping", AnyPing(validate=5)),
]


@pytest.mark.parametrize(("method", "request_"), HOSTILE_REQUESTS, ids=lambda value: repr(value)[:60])
@in_virtual_time
async def test_hostile_requests_are_refused_and_do_no_harm(method, request_):
    caller, server = await pair()
    response_type = {"rpc_store": StoreResponse, "rpc_find": FindResponse, "rpc_ping": PingResponse}[method]
    with pytest.raises((P2PHandlerError, StreamClosedError), match=r"ProtocolError|closed"):
        await caller.p2p.call(server.p2p.peer_id, f"DHTProtocol.{method}", request_, response_type, timeout=3)
    assert len(server.storage) == len(server.cache) == 0
    assert len(server.routing_table) == 0
    assert server.p2p.metrics.connections_dropped["broke the protocol"] == 1
    assert await caller.call_ping(server.p2p.peer_id) == server.node_id, "the node goes on"


@pytest.mark.parametrize(
    "subkey",
    [
        b"\xc1",
        b"\x81",
        b"\x00\x00",
        MSGPackSerializer.dumps([1]),
        MSGPackSerializer.dumps({}),
        MSGPackSerializer.dumps(math.nan),
        MSGPackSerializer.dumps((math.nan,)),
        MSGPackSerializer.dumps(DictionaryDHTValue()),
    ],
    ids=repr,
)
@in_virtual_time
async def test_impossible_subkeys_are_refused_individually(subkey):
    caller, server = await pair()
    records = [NewRecord(DHTID(5), subkey, b"v", later(9)), plain(b"v", later(9))]
    assert await caller.call_store(server.p2p.peer_id, records) == [False, True]
    assert DHTID(5) not in server.storage


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        MSGPackSerializer.dumps([None, 5.0, [["k", "not bytes", 5.0]]]),
        MSGPackSerializer.dumps([None, math.inf, [["k", b"v", math.inf]]]),
        MSGPackSerializer.dumps([None, 5.0, [["k", b"v", -5.0]]]),
        MSGPackSerializer.dumps([None, 5.0, [[None, b"v", 5.0]]]),
        MSGPackSerializer.dumps([None, 5.0, [[math.nan, b"v", 5.0]]]),
        MSGPackSerializer.dumps([None, 5.0, [["x" * 5000, b"v", 5.0]]]),
    ],
    ids=lambda value: repr(value)[:50],
)
@in_virtual_time
async def test_malformed_dictionaries_are_refused(content):
    caller, server = await pair()
    record = NewRecord(KEY, WHOLE_DICTIONARY, content, later(9))
    assert await caller.call_store(server.p2p.peer_id, [record]) == [False]
    assert caller.records.read(KEY, Found.DICTIONARY, content, 2e9)[0] is None


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_raise_protocol_errors(data):
    for message_type in (PingRequest, PingResponse, StoreRequest, StoreResponse, FindRequest, FindResponse):
        with contextlib.suppress(ProtocolError):
            decode_header(data, message_type)
    with contextlib.suppress(ValueError):
        records.unpack_contact(msgspec.Raw(data))


# --- hostile answers --------------------------------------------------------------------------------------------------


def impostor(answer: Any) -> type[ServicerBase]:
    """A node that gives one and the same answer to every find."""

    class DHTProtocol(ServicerBase):
        async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse:
            return answer

    return DHTProtocol


OTHER = DHTID.generate("other").to_bytes()
NOTHING = FindResult(Found.NOTHING, b"", 0.0, [])


class AnyFindResponse(Header):
    results: Any
    node_ids: Any = b""
    contacts: Any = ()
    node_id: Any = OTHER


HOSTILE_ANSWERS = [
    AnyFindResponse(results=[]),
    AnyFindResponse(results=[NOTHING, NOTHING]),
    AnyFindResponse(results=None),
    AnyFindResponse(results=[["nonsense"]]),
    AnyFindResponse(results=[NOTHING], node_ids=OTHER),
    AnyFindResponse(results=[NOTHING], contacts=[5]),
    AnyFindResponse(results=[NOTHING], node_ids=b"short", contacts=[5]),
    AnyFindResponse(results=[NOTHING], node_id=b"short"),
    AnyFindResponse(results=[[0, b"", 0.0, [-1]]]),
    AnyFindResponse(results=[[0, b"", 0.0, list(range(1000))]]),
    AnyFindResponse(results=[[17, b"", 0.0, []]]),
]


@pytest.mark.parametrize("answer", HOSTILE_ANSWERS, ids=lambda value: repr(value)[:70])
@in_virtual_time
async def test_hostile_answers_count_as_none(answer):
    swarm = Swarm()
    caller = await make_protocol(swarm)
    p2p: P2P = await swarm.p2p()
    await impostor(answer)().add_p2p_handlers(p2p)
    caller.p2p.add_addresses(p2p.peer_id, await p2p.get_visible_maddrs())
    assert await caller.call_find(p2p.peer_id, [KEY]) is None
    assert len(caller.routing_table) == 0


@pytest.mark.parametrize(
    "result",
    [
        FindResult(Found.PLAIN, b"v", math.nan, [99]),
        FindResult(Found.PLAIN, b"v", math.inf, [0, 1]),
        FindResult(Found.PLAIN, b"v", -1.0, []),
        FindResult(Found.DICTIONARY, b"v", 2e9, []),
        FindResult(Found.TOO_MUCH, b"v", 2e9, []),
    ],
    ids=repr,
)
@in_virtual_time
async def test_impossible_finds_count_as_nothing(result):
    swarm = Swarm()
    caller = await make_protocol(swarm)
    p2p = await swarm.p2p()
    contact = pack_contact(NodeContact(p2p.peer_id.to_bytes(), []))
    response = FindResponse(results=[result], node_ids=OTHER, contacts=[contact], node_id=OTHER)
    await impostor(response)().add_p2p_handlers(p2p)
    caller.p2p.add_addresses(p2p.peer_id, await p2p.get_visible_maddrs())
    record = (await caller.call_find(p2p.peer_id, [KEY])).records[KEY]
    assert record.value is None
    assert record.expiration_time == -math.inf
    assert all(neighbor == int.from_bytes(OTHER, "big") for neighbor in record.neighbors)


# --- learning ---------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_full_bucket_replaces_dead_nodes():
    swarm = Swarm()
    settings = {"bucket_size": 2, "depth_modulo": 1, "wait_timeout": 1}
    server = await make_protocol(swarm, **settings)
    rng = random.Random(0)
    far_away = server.node_id ^ 2**159
    others = []
    for _ in range(4):
        others.append(await make_protocol(swarm, node_id=DHTID(far_away ^ rng.getrandbits(150)), **settings))
        await introduce(others[-1], server)
    near = await make_protocol(swarm, node_id=DHTID(server.node_id ^ 1), **settings)
    await introduce(near, server)
    await near.call_ping(server.p2p.peer_id)
    first, second, third, fourth = others
    for other in (first, second):
        await other.call_ping(server.p2p.peer_id)
    await third.call_ping(server.p2p.peer_id)
    await asyncio.sleep(2)
    assert third.node_id not in dict(server.routing_table), "the oldest one is alive and stays"
    await first.p2p.shutdown()
    await second.call_ping(server.p2p.peer_id)
    await asyncio.sleep(10)
    await fourth.call_ping(server.p2p.peer_id)
    await asyncio.sleep(2)
    members = dict(server.routing_table)
    assert first.node_id not in members
    assert second.node_id in members
    assert fourth.node_id in members, "the latest replacement moves up"


@in_virtual_time
async def test_nothing_goes_on_after_the_shutdown():
    caller, server = await pair()
    await server.shutdown()
    await server.shutdown()
    assert await caller.call_ping(server.p2p.peer_id) is None, "no handlers any more"
    task = server.spawn(asyncio.sleep(100))
    await asyncio.sleep(0.01)
    assert task.cancelled()


@pytest.mark.parametrize(("neighbors_only", "calls"), [(False, 2), (True, 1)])
@in_virtual_time
async def test_node_refusing_all_values_costs_one_timeout(neighbors_only, calls):
    """It answers the first question, and no other one."""
    asked = 0

    class DHTProtocol(ServicerBase):
        async def rpc_find(self, request: FindRequest, context: P2PContext) -> FindResponse:
            nonlocal asked
            asked += 1
            if asked > 1:
                await asyncio.sleep(1e6)
            return FindResponse([FindResult(Found.TOO_MUCH, b"", 0.0, [])] * len(request.keys), b"", [], OTHER)

    swarm = Swarm()
    caller = await make_protocol(swarm)
    p2p = await swarm.p2p()
    await DHTProtocol().add_p2p_handlers(p2p)
    caller.p2p.add_addresses(p2p.peer_id, await p2p.get_visible_maddrs())
    keys = [DHTID.generate(str(number)) for number in range(8)]
    answer = await caller.call_find(p2p.peer_id, keys, neighbors_only=neighbors_only)
    assert answer is not None
    assert answer.records == {}
    assert asked == calls
