"""A record with an owner tag belongs to its owner alone, at every node and against every attack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht import DHTID, DHTNode
from shoal.dht.crypto import PrivateKey, PublicKey, SignatureValidator, tag_of
from shoal.dht.local_records import MOST_RECORDS_OF_A_TRUSTED_HOST, MOST_RECORDS_OF_THE_TRUSTED, LocalRecords, Payer
from shoal.dht.records import NewRecord
from shoal.dht.storage import DictionaryDHTValue, Unproven
from shoal.dht.store import make_record
from shoal.dht.validation import PLAIN_VALUE, WHOLE_DICTIONARY, CompositeValidator, DHTRecord
from shoal.p2p import Identity, PeerID
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

KEY, OTHER_KEY = "key", "other key"
KEY_ID = DHTID.generate(KEY)


def later(seconds: float) -> float:
    return get_dht_time() + seconds


class OwnedRecord:
    """A swarm in which each node has a key of its own, and one record that the first node has marked as its own."""

    def __init__(self, nodes: list[DHTNode], validators: list[SignatureValidator]) -> None:
        self.nodes, self.validators = nodes, validators
        self.owner, *self.others = nodes
        self.subkey = b"peer" + validators[0].local_public_key
        self.expires = later(100)

    @classmethod
    async def create(cls, size: int = 7) -> OwnedRecord:
        swarm = Swarm(seed=1)
        validators = [SignatureValidator(PrivateKey()) for _ in range(size)]
        nodes = [await swarm.node(record_validator=validator) for validator in validators]
        owned = cls(nodes, validators)
        assert await owned.owner.store(KEY, "mine", owned.expires, subkey=owned.subkey)
        return owned

    @property
    def captured(self) -> NewRecord:
        """The record as it travels, with its signature."""
        value = MSGPackSerializer.dumps("mine")
        record = DHTRecord(KEY_ID.to_bytes(), MSGPackSerializer.dumps(self.subkey), value, self.expires)
        return NewRecord(KEY_ID, record.subkey, self.validators[0].sign_value(record), self.expires)

    async def is_intact(self) -> None:
        """Everybody reads what the owner has written, and nothing else."""
        for reader in self.nodes:
            if reader.is_alive:
                found = await reader.get(KEY, latest=True)
                assert found.value == {self.subkey: ("mine", self.expires)}
                assert await reader.get(OTHER_KEY, latest=True) is None


@in_virtual_time
async def test_only_the_owner_can_overwrite_a_record():
    owned = await OwnedRecord.create()
    for attacker in owned.others:
        assert not await attacker.store(KEY, "forged", owned.expires + 10, subkey=owned.subkey)
        assert not await attacker.store(OTHER_KEY, "forged", owned.expires, subkey=owned.subkey)
    await owned.is_intact()
    assert await owned.owner.store(KEY, "again mine", owned.expires + 1, subkey=owned.subkey)
    for reader in owned.nodes:
        assert (await reader.get(KEY, latest=True)).value == {owned.subkey: ("again mine", owned.expires + 1)}


@in_virtual_time
async def test_record_stays_owned_after_its_owner_left():
    owned = await OwnedRecord.create()
    await owned.owner.shutdown()
    await owned.owner.p2p.shutdown()
    for attacker in owned.others:
        assert not await attacker.store(KEY, "forged", owned.expires + 10, subkey=owned.subkey)
    await owned.is_intact()


@in_virtual_time
async def test_others_write_beside_it_under_their_own_mark():
    owned = await OwnedRecord.create()
    for number, (node, validator) in enumerate(zip(owned.nodes, owned.validators, strict=True)):
        assert await node.store(KEY, number, owned.expires + 1, subkey=b"number" + validator.local_public_key)
    for reader in owned.nodes:
        found = await reader.get(KEY, latest=True)
        assert [item.value for item in found.value.values()].count("mine") == 1
        assert len(found.value) == 1 + len(owned.nodes)


# --- forgeries --------------------------------------------------------------------------------------------------------


def signed_by(validator: SignatureValidator, record: NewRecord, value: bytes) -> bytes:
    """The value with this validator's signature, whoever the owner is."""
    message = DHTRecord(record.key_id.to_bytes(), record.subkey, value, record.expiration_time)
    signature = validator._private_keys[validator.local_public_key].sign(validator.signed_bytes(message, value))
    return value + b"[signature:" + signature + b"]"


def later_expiration(owned: OwnedRecord) -> NewRecord:
    return owned.captured._replace(expiration_time=owned.expires + 10)


def another_key(owned: OwnedRecord) -> NewRecord:
    return owned.captured._replace(key_id=DHTID.generate(OTHER_KEY))


def another_subkey(owned: OwnedRecord) -> NewRecord:
    return owned.captured._replace(subkey=MSGPackSerializer.dumps(b"other " + owned.subkey))


def another_value(owned: OwnedRecord) -> NewRecord:
    value = owned.captured.value.replace(b"mine", b"ours")
    return owned.captured._replace(value=value, expiration_time=owned.expires + 10)


def unsigned(owned: OwnedRecord) -> NewRecord:
    return owned.captured._replace(value=MSGPackSerializer.dumps("forged"), expiration_time=owned.expires + 10)


def signed_by_somebody_else(owned: OwnedRecord) -> NewRecord:
    record = owned.captured._replace(expiration_time=owned.expires + 10)
    return record._replace(value=signed_by(owned.validators[1], record, MSGPackSerializer.dumps("forged")))


def two_signatures(owned: OwnedRecord) -> NewRecord:
    record = owned.captured._replace(expiration_time=owned.expires + 10)
    return record._replace(value=signed_by(owned.validators[1], record, record.value))


def two_owners(owned: OwnedRecord) -> NewRecord:
    """Signed by the second one, who could otherwise take what is the first one's."""
    subkey = MSGPackSerializer.dumps(owned.subkey + owned.validators[1].local_public_key)
    record = owned.captured._replace(subkey=subkey, expiration_time=owned.expires + 10)
    return record._replace(value=signed_by(owned.validators[1], record, MSGPackSerializer.dumps("forged")))


def whole_dictionary(owned: OwnedRecord) -> NewRecord:
    """A forged entry among good ones."""
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    dictionary.store("good", MSGPackSerializer.dumps(1), owned.expires)
    dictionary.store(owned.subkey, MSGPackSerializer.dumps("forged"), owned.expires + 10)
    return NewRecord(KEY_ID, WHOLE_DICTIONARY, dictionary.packb(), owned.expires + 10)


FORGERIES: list[Callable[[OwnedRecord], NewRecord]] = [
    later_expiration,
    another_key,
    another_subkey,
    another_value,
    unsigned,
    signed_by_somebody_else,
    two_signatures,
    two_owners,
    whole_dictionary,
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
@pytest.mark.parametrize("in_cache", [False, True], ids=["storage", "cache"])
@in_virtual_time
async def test_a_forgery_is_refused_by_every_node(forge, in_cache):
    owned = await OwnedRecord.create()
    forged = forge(owned)._replace(in_cache=in_cache)
    for attacker in owned.others:
        for victim in owned.nodes:
            if victim is attacker:
                accepted = [bool(attacker.protocol.records.keep(forged))]
            else:
                accepted = await attacker.protocol.call_store(victim.peer_id, [forged])
            assert accepted == [False]
    await owned.is_intact()


@in_virtual_time
async def test_the_captured_record_itself_may_be_repeated():
    owned = await OwnedRecord.create()
    holders = [node for node in owned.nodes if KEY_ID in node.protocol.storage]
    outsiders = [node for node in owned.nodes if node not in holders]
    asker = owned.others[0]
    for node in owned.nodes:
        if node is not asker:
            assert await asker.protocol.call_store(node.peer_id, [owned.captured]) == [node in outsiders]
    await owned.is_intact()


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
@in_virtual_time
async def test_a_forgery_is_believed_by_no_reader(forge):
    """A node that checks nothing holds it and tells everybody."""
    owned = await OwnedRecord.create()
    owned.owner.protocol.records.keep(owned.captured)  # it may be none of the nodes that were chosen to hold it
    forged = forge(owned)
    for number in range(1, len(owned.nodes)):
        liar = owned.nodes[number]
        liar.protocol.records.record_validator = CompositeValidator()
        assert liar.protocol.records.keep(forged)
    honest = owned.owner
    for key, expected in ((KEY, {owned.subkey: ("mine", owned.expires)}), (OTHER_KEY, None)):
        found = await honest.get(key, latest=True)
        assert (None if found is None else found.value) == expected


@in_virtual_time
async def test_a_plain_value_does_not_push_it_aside():
    owned = await OwnedRecord.create()
    plain = NewRecord(KEY_ID, PLAIN_VALUE, MSGPackSerializer.dumps("plain"), owned.expires + 10)
    for attacker in owned.others:
        await attacker.store(KEY, "plain", owned.expires + 10)
        for victim in owned.nodes:
            if victim is not attacker:
                had_it = KEY_ID in victim.protocol.storage
                assert await attacker.protocol.call_store(victim.peer_id, [plain]) == [False] or not had_it
    for reader in owned.nodes:
        reader.protocol.cache.clear()
        found = await reader.get(KEY, latest=True)
        assert found.value == {owned.subkey: ("mine", owned.expires)}


@pytest.mark.parametrize("in_cache", [False, True], ids=["storage", "cache"])
@in_virtual_time
async def test_nor_does_one_that_was_there_before(in_cache):
    """At nodes that the owner did not reach, and in the caches of all."""
    owned = await OwnedRecord.create()
    plain = NewRecord(KEY_ID, PLAIN_VALUE, MSGPackSerializer.dumps("plain"), owned.expires + 10, in_cache)
    for node in owned.nodes:
        node.protocol.cache.clear()
        if in_cache or KEY_ID not in node.protocol.storage:
            local = node.protocol.cache if in_cache else node.protocol.storage
            assert local.store(KEY_ID, plain.value, plain.expiration_time)
    for reader in owned.nodes:
        found = await reader.get(KEY, latest=True)
        assert found.value == {owned.subkey: ("mine", owned.expires)}


@pytest.mark.parametrize("in_cache", [False, True], ids=["storage", "cache"])
@in_virtual_time
async def test_plain_values_make_way_for_owners(in_cache):
    owned = await OwnedRecord.create()
    plain = NewRecord(DHTID.generate("taken"), PLAIN_VALUE, MSGPackSerializer.dumps("plain"), later(1000), in_cache)
    for node in owned.nodes:
        assert node.protocol.records.keep(plain)
    assert not await owned.owner.store("taken", "too late", later(-1), subkey=owned.subkey)
    for reader in owned.nodes:
        assert (await reader.get("taken", latest=True)).value == "plain"
    assert await owned.owner.store("taken", "mine", owned.expires, subkey=owned.subkey)
    for reader in owned.nodes:
        found = await reader.get("taken", latest=True)
        assert found.value == {owned.subkey: ("mine", owned.expires)}


@in_virtual_time
async def test_plain_values_replace_dictionaries_that_nobody_owns():
    owned = await OwnedRecord.create()
    owner, *others = owned.nodes
    assert await owner.store("open", 1, later(50), subkey="a")
    assert await others[0].store("open", "plain", later(60))
    for reader in owned.nodes:
        assert (await reader.get("open", latest=True)).value == "plain"


# --- what an owner itself brings --------------------------------------------------------------------------------------


def unsigned_by(peer: PeerID, name: str = "", value: str = "never signed") -> NewRecord:
    """A record under a peer's own tag, with something in place of the signature."""
    signature = b"[signature:" + b"A" * 86 + b"==]"
    subkey = MSGPackSerializer.dumps(name.encode() + tag_of(peer))
    return NewRecord(KEY_ID, subkey, MSGPackSerializer.dumps(value) + signature, later(100))


@pytest.fixture
def looks(monkeypatch) -> list[bytes]:
    """The signatures that have been looked at."""
    looked_at = []
    verify = PublicKey.verify

    def note_and_verify(self: PublicKey, data: bytes, signature: bytes) -> bool:
        looked_at.append(signature)
        return verify(self, data, signature)

    monkeypatch.setattr(PublicKey, "verify", note_and_verify)
    return looked_at


@in_virtual_time
async def test_signatures_are_checked_before_others_get_entries(looks):
    swarm = Swarm()
    owner, *_ = nodes = [await swarm.node() for _ in range(3)]
    for number in range(5):
        assert await owner.store(KEY, number, later(100 + number), subkey=tag_of(owner.peer_id))
    for node in nodes:
        found = await node.get(KEY, latest=True)
        assert [item.value for item in found.value.values()] == [4]
    assert not looks, "each of them has it from the owner"
    stranger = await swarm.node(client_mode=True)
    for _ in range(3):
        assert await stranger.get(KEY, latest=True) == found
    assert len(set(looks)) == 1
    assert 2 <= len(looks) <= 4, "the stranger has looked once, and so has each that told it"


@in_virtual_time
async def test_an_owner_without_signatures_harms_nobody(caplog):
    """Those that have heard it from the owner believe it. Others would take them for forgers if they passed it on."""
    swarm = Swarm()
    liar, honest, *others = nodes = [await swarm.node() for _ in range(4)]
    assert await honest.store(KEY, "mine", later(100), subkey=tag_of(honest.peer_id))
    for node in (honest, *others):
        assert await liar.protocol.call_store(node.peer_id, [unsigned_by(liar.peer_id)]) == [True]
    newcomer = await swarm.node()
    await asyncio.sleep(1)
    assert KEY_ID in newcomer.protocol.storage, "its neighbors give it what it should hold"
    for node in (newcomer, await swarm.node(client_mode=True)):
        found = await node.get(KEY, latest=True)
        assert {subkey: item.value for subkey, item in found.value.items()} == {tag_of(honest.peer_id): "mine"}
    refused = [node.p2p.metrics.records_refused["wrong signature"] for node in nodes]
    assert sum(refused) >= 2
    assert max(refused) == 1, "it is gone where it was looked at"
    [warning] = [record.getMessage() for record in caplog.records if "wrong signature" in record.getMessage()]
    assert str(liar.peer_id) in warning


@in_virtual_time
async def test_copies_for_others_are_looked_at_too():
    swarm = Swarm()
    owners, [reader, teller, outsider] = await swarm.grow(2), await swarm.grow(3)
    for owner, holder, expires in zip(owners, (reader, teller), (later(50), later(100)), strict=True):
        record = make_record(KEY, tag_of(owner.peer_id), "mine", expires, owner.protocol.record_validator)
        assert await owner.protocol.call_store(holder.peer_id, [record]) == [True]
    assert await reader.protocol.call_store(outsider.peer_id, [unsigned_by(reader.peer_id)]) == [True]
    found = await reader.get(KEY, latest=True)
    assert found.value.keys() == {tag_of(owner.peer_id) for owner in owners}
    await asyncio.sleep(1)
    copies = [node for node in owners if KEY_ID in node.protocol.cache]
    assert copies, "the nearest node that knew nothing has got one"
    assert all(len(node.protocol.cache.get(KEY_ID).value) == 2 for node in copies)


@in_virtual_time
async def test_forged_entries_vanish_from_the_whole_value():
    node, owner = await Swarm().node(), Identity.generate().peer_id
    here = LocalRecords(None, node.protocol.record_validator)
    assert here.keep(unsigned_by(owner), Payer(owner, owner))
    part = here.find(KEY_ID)[0].copy()
    here.prove(KEY_ID, part)
    assert part.is_empty
    assert here.find(KEY_ID) is None


@in_virtual_time
async def test_nobody_else_may_bring_it_unproven():
    swarm = Swarm()
    owner, other, holder = [await swarm.node() for _ in range(3)]
    assert await other.protocol.call_store(holder.peer_id, [unsigned_by(owner.peer_id)]) == [False]
    bare = unsigned_by(owner.peer_id)._replace(value=MSGPackSerializer.dumps("bare"))
    assert await owner.protocol.call_store(holder.peer_id, [bare]) == [False]


@in_virtual_time
async def test_peers_with_many_records_are_checked_immediately():
    """Else their signatures would be checked all together, while the loop stands still."""
    swarm = Swarm()
    liar, holder = await swarm.node(), await swarm.node()
    records = [unsigned_by(liar.peer_id, str(number)) for number in range(MOST_RECORDS_OF_THE_TRUSTED + 5)]
    accepted = await liar.protocol.call_store(holder.peer_id, records)
    assert accepted == [True] * MOST_RECORDS_OF_THE_TRUSTED + [False] * 5


@in_virtual_time
async def test_hosts_with_many_records_are_checked_immediately():
    node = await Swarm().node()
    here = LocalRecords(None, node.protocol.record_validator)
    peers = [Identity.generate().peer_id for _ in range(MOST_RECORDS_OF_A_TRUSTED_HOST + 5)]
    accepted = [bool(here.keep(unsigned_by(peer), Payer(peer, "one host"))) for peer in peers]
    assert accepted == [True] * MOST_RECORDS_OF_A_TRUSTED_HOST + [False] * 5
    assert here.keep(unsigned_by(peers[-1]), Payer(peers[-1], "another host"))
    here.prove(KEY_ID, here.find(KEY_ID)[0])
    assert here.find(KEY_ID) is None
    assert not here.nbytes


def test_what_is_not_proven_cannot_be_packed():
    value: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    value.store("name", Unproven(b"value"), later(10))
    with pytest.raises(TypeError, match="Unproven"):
        value.packb()
    value.replace_value("name", b"value")
    assert DictionaryDHTValue.unpackb(value.packb()).get("name") == value.get("name")
