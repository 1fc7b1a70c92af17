"""Why a node keeps a record or not: as values, at the node, on the way, and for the user."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import DHT, DHTID, CompositeValidator, Outcome, Reason, RecordValidatorBase, StoreReport
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.local_records import LocalRecords, Payer, Room
from shoal.dht.records import NewRecord, NotKept, StoreResponse
from shoal.dht.validation import KEPT, PLAIN_VALUE, WHOLE_DICTIONARY, DHTRecord, outcome_of_failure
from shoal.errors import BusyError, NotAMemberError, ProtocolError, RefusedDialError, StreamClosedError
from shoal.p2p import Identity
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

KEY = DHTID.generate("key")
ALICE = Payer("alice", "alice")
OWNER_TAG = SignatureValidator().local_public_key


def later(seconds: float) -> float:
    return get_dht_time() + seconds


class OnlyShort(RecordValidatorBase):
    def validate(self, record: DHTRecord) -> bool:
        return len(record.value) < 20


def plain(value: bytes = b"value", seconds: float = 60.0, key: DHTID = KEY) -> NewRecord:
    return NewRecord(key, PLAIN_VALUE, value, later(seconds))


def entry(subkey: object, value: bytes = b"value", seconds: float = 60.0) -> NewRecord:
    return NewRecord(KEY, MSGPackSerializer.dumps(subkey), value, later(seconds))


def test_documents_list_each_reason_once():
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    section = text.split("## Why a store was refused")[1].split("\n## ")[0]
    assert Counter(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)) == Counter(map(str, Reason))


@in_virtual_time
async def test_node_says_why_it_refuses_a_record():
    def check(record: NewRecord, reason: Reason, detail: str = "", payer: Payer | None = ALICE) -> None:
        assert here.keep(record, payer) == Outcome(reason, detail)

    room = Room(10**6, 10**4, 100, 10**6, 100, entries_per_key=3, entries_per_key_and_peer=3)
    validator = CompositeValidator([OnlyShort(), SignatureValidator(PrivateKey())])
    here = LocalRecords(None, validator, room=room)
    check(plain(), Reason.KEPT)
    check(plain(), Reason.NOT_NEWER)
    check(plain(seconds=-1), Reason.EXPIRED)
    check(plain(b"x" * 100, 90), Reason.INVALID, "OnlyShort")
    check(entry(b"mine" + OWNER_TAG), Reason.WRONG_SIGNATURE)
    check(entry("a", seconds=30), Reason.OTHER_KIND)
    assert here.keep(plain(seconds=1e6), ALICE).reason is Reason.TOO_LONG
    assert here.keep(NewRecord(KEY, WHOLE_DICTIONARY, b"nonsense", later(60)), ALICE).reason is Reason.MALFORMED
    check(entry(0, seconds=100), Reason.KEPT)
    check(plain(), Reason.OTHER_KIND)
    for number in (1, 2):
        check(entry(number, seconds=100), Reason.KEPT)
    check(entry(3, seconds=100), Reason.CROWDED_KEY)
    counted = here._metrics.records_refused  # type: ignore[attr-defined]
    assert counted[Reason.NOT_NEWER] == counted[Reason.INVALID] == counted[Reason.CROWDED_KEY] == 1
    assert counted[Reason.OTHER_KIND] == 2
    assert here.keep(plain(), None).reason is Reason.OTHER_KIND
    assert counted[Reason.OTHER_KIND] == 2, "this node's own records are counted where they are stored"


@in_virtual_time
async def test_owned_entries_and_full_nodes_refuse_too():
    own = SignatureValidator(PrivateKey())
    here = LocalRecords(None, CompositeValidator([own]))
    unsigned = entry(b"mine" + own.local_public_key)
    signed = own.sign_value(DHTRecord(KEY.to_bytes(), unsigned.subkey, unsigned.value, unsigned.expiration_time))
    assert here.keep(unsigned._replace(value=signed))
    assert here.keep(plain(seconds=90)) == Outcome(Reason.OWNED)
    tiny = LocalRecords(None, None, own_id=0, room=Room(3000, 2000, 9, 10**6, 100))
    assert tiny.keep(plain(key=DHTID(1)))
    assert tiny.keep(plain(key=DHTID(2)), ALICE)
    assert tiny.keep(plain(key=DHTID(3)), ALICE) == Outcome(Reason.PEER_QUOTA)
    assert tiny.keep(plain(b"x" * 1500, key=DHTID(2**159))) == Outcome(Reason.NO_ROOM)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotAMemberError("not of this run"), Reason.NOT_A_MEMBER),
        (RefusedDialError("refused"), Reason.NOT_CONNECTED),
        (StreamClosedError("broke"), Reason.SILENT),
        (TimeoutError(), Reason.SILENT),
        (ProtocolError("nonsense"), Reason.BAD_ANSWER),
        (BusyError("too much"), Reason.FAILED),
    ],
)
def test_failed_calls_have_reasons(error, reason):
    outcome = outcome_of_failure(error)
    assert outcome == Outcome(reason, str(error))
    assert not outcome
    assert not outcome.answered


def test_messages_carry_reasons():
    outcomes = [KEPT, Outcome(Reason.INVALID, "OnlyShort"), Outcome(Reason.NOT_NEWER)]
    response = StoreResponse.of_outcomes(outcomes, None)
    assert [each is None for each in response.refusals] == [True, False, False]
    assert response.outcomes() == outcomes


@pytest.mark.parametrize("name", ["kept", "found", "a later version's reason", "no reason given", "\x1b[31m\nred"])
def test_unknown_or_lying_refusals_stay_refusals(name):
    [outcome] = StoreResponse(refusals=[NotKept(name, "\x1b[2J\ndetail")]).outcomes()
    assert outcome.reason is Reason.UNNAMED
    assert not outcome
    assert outcome.detail.isprintable()


def test_a_report_counts_those_that_answered():
    nodes = [Identity.generate().peer_id for _ in range(4)]
    silent, old = Outcome(Reason.SILENT), Outcome(Reason.NOT_NEWER)
    assert StoreReport(dict(zip(nodes, [KEPT, KEPT, old, silent], strict=True)))
    report = StoreReport(dict(zip(nodes, [KEPT, old, silent, silent], strict=True)))
    assert not report, "a tie"
    assert str(report) == "2 of 4 nodes: no answer; 1 of 4 nodes: kept; 1 of 4 nodes: not newer than what is there"
    assert not StoreReport({})
    assert "no node was found" in str(StoreReport({}))


@in_virtual_time
async def test_each_node_explains_a_store_and_a_get():
    swarm = Swarm(seed=5)
    nodes = await swarm.grow(7)
    owner, dead = nodes[0], nodes[1]
    report = await owner.store("key", "value", later(60), explain=True)
    assert report
    assert set(report.nodes.values()) == {KEPT}
    assert len(report.nodes) == owner.config.num_replicas
    refused = await nodes[2].store("key", "older", later(30), explain=True)
    assert not refused
    assert set(refused.nodes.values()) == {Outcome(Reason.NOT_NEWER)}
    assert refused.nodes.keys() == report.nodes.keys()
    assert nodes[2].p2p.metrics.stores_failed == Counter({Reason.NOT_NEWER: len(refused.nodes)})
    counted = sum(node.p2p.metrics.records_refused[Reason.NOT_NEWER] for node in nodes)
    assert counted == len(refused.nodes.keys() - {nodes[2].peer_id})
    [reader] = [node for node in nodes[2:] if node.peer_id not in report.nodes][:1]
    found = await reader.get("key", latest=True, explain=True)
    assert found.found.value == "value"
    assert {peer for peer, outcome in found.nodes.items() if outcome} == report.nodes.keys()
    missing = await reader.get("missing", explain=True)
    assert not missing
    assert set(missing.nodes.values()) == {Outcome(Reason.NOTHING)}
    assert reader.p2p.metrics.gets_failed[Reason.NOTHING] >= len(missing.nodes)
    await dead.p2p.shutdown()
    key = min(range(50), key=lambda key: DHTID.generate(key) ^ dead.node_id)
    [report] = (await owner.store_many([key], ["value"], later(60), explain=True)).values()
    assert report
    assert report.nodes[dead.peer_id].reason in (Reason.NOT_CONNECTED, Reason.SILENT)
    again = await owner.store("another", "value", later(60), explain=True)
    assert again.nodes[dead.peer_id] == Outcome(Reason.BACKED_OFF)


@in_virtual_time
async def test_invalid_records_name_the_validator():
    swarm = Swarm(seed=6)
    owner, *others = await swarm.grow(3)
    for node in others:
        node.protocol.record_validator.extend([OnlyShort()])
    report = await owner.store("key", "x" * 100, later(60), explain=True)
    assert not report
    assert [report.nodes[node.peer_id] for node in others] == [Outcome(Reason.INVALID, "OnlyShort")] * 2


def test_programs_get_reports_from_any_thread():
    with DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as dht:
        assert dht.store("key", "value", later(60)) is True
        report = dht.store("key", "older", later(30), explain=True)
        assert not report
        assert report.nodes == {dht.peer_id: Outcome(Reason.NOT_NEWER)}
        assert dht.store("key", "older", later(30), explain=True, return_future=True).result(10) == report
        entry_too = dht.store("key", "entry", later(30), subkey="name", explain=True)
        assert entry_too.nodes == {dht.peer_id: Outcome(Reason.OTHER_KIND)}
        assert dht.p2p.metrics.stores_failed == {Reason.NOT_NEWER: 2, Reason.OTHER_KIND: 1}
        found = dht.get("key", explain=True)
        assert found.found.value == "value"
        assert str(found) == "1 of 1 nodes: found (this peer's own copy)"
