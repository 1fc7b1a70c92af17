"""Answers leave out what the asker has: contacts of nodes, and entries of dictionaries."""

from __future__ import annotations

import functools
import random
from collections import Counter
from statistics import fmean

from shoal.base.clock import get_dht_time
from shoal.dht.protocol import DHTProtocol
from shoal.dht.records import (
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    FindRequest,
    FindResponse,
    HaveSet,
    numbers_of_entries,
    pack_known,
)
from shoal.dht.routing import DHTID, ID_BITS
from shoal.dht.storage import DictionaryDHTValue, ValueWithExpiration
from shoal.dht.traverse import Lookup
from shoal.p2p import P2PContext
from tests.dht.swarm import Swarm
from tests.dht.virtual_time import in_virtual_time

RNG = random.Random(1)
NUMBERS = [RNG.getrandbits(ID_BITS) for _ in range(2 * MAX_KNOWN)]


def test_what_was_packed_is_known_and_nothing_else():
    packed = pack_known(NUMBERS, RNG)
    assert len(packed) == MAX_KNOWN_BYTES
    known = HaveSet(packed)
    assert all(number in known for number in NUMBERS[:MAX_KNOWN])
    assert not any(number in known for number in NUMBERS[MAX_KNOWN:])
    nothing = HaveSet(b"")
    assert not nothing
    assert NUMBERS[0] not in nothing
    assert not HaveSet(pack_known([], RNG))


def test_any_bytes_can_be_read():
    for size in range(30):
        known = HaveSet(RNG.randbytes(size))
        assert bool(known) == (size >= 12)
        assert NUMBERS[0] not in known


def test_collisions_of_fingerprints_last_one_request():
    number, packed = NUMBERS[0], pack_known([NUMBERS[0]], RNG)
    # Whoever knew the factor could make them.
    factor = int.from_bytes(packed[:8], "big") | 1
    lookalikes = [(number + step * pow(factor, -1, 2**64)) % 2**64 for step in range(1, 100)]
    assert all(lookalike in HaveSet(packed) for lookalike in lookalikes)
    others = [HaveSet(pack_known([number], RNG)) for _ in range(100)]
    assert not any(lookalike in other for other in others for lookalike in lookalikes)


def test_known_entries_are_left_out_until_stored_again():
    key, now = DHTID.generate("key"), get_dht_time()
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    for number in range(10):
        dictionary.store(number, b"value", now + 60 + number)
    numbers = numbers_of_entries(key, dictionary.items())
    known = HaveSet(pack_known([numbers[number] for number in range(8)], RNG))
    assert sorted(subkey for subkey, _ in known.without_known(key, dictionary).items()) == [8, 9]
    dictionary.store(0, b"news", now + 99)
    rest = DictionaryDHTValue.unpackb(known.without_known(key, dictionary).packb())
    assert {subkey: item.value for subkey, item in rest.items()} == {0: b"news", 8: b"value", 9: b"value"}
    assert known.without_known(DHTID.generate("another key"), dictionary) is dictionary
    everything = HaveSet(pack_known(numbers_of_entries(key, dictionary.items()).values(), RNG))
    nothing_new = DictionaryDHTValue.unpackb(everything.without_known(key, dictionary).packb())
    assert not len(nothing_new)
    assert nothing_new.latest_expiration_time == now + 99


def test_equal_subkeys_of_different_types_differ():
    item = ValueWithExpiration(b"value", get_dht_time() + 60)
    spellings = [1, True, 1.0, b"1", "1"]
    numbers = [numbers_of_entries(DHTID.generate("key"), [(subkey, item)])[subkey] for subkey in spellings * 2]
    assert len(set(numbers)) == len(spellings)
    assert numbers[: len(spellings)] == numbers[len(spellings) :]


def test_samples_of_entries_hide_nobody():
    key, now = DHTID.generate("key"), get_dht_time()
    dictionary: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    for number in range(100):  # the last ninety are of somebody who stores all the time
        dictionary.store(number, b"value", now + 60 + number)
    samples = [HaveSet(pack_known([], RNG)).without_known(key, dictionary, 50) for _ in range(40)]
    assert {len(sample) for sample in samples} == {50}
    assert 0.4 < fmean(number in sample for sample in samples for number in range(10)) < 0.6
    assert HaveSet(b"").without_known(key, dictionary, 100) is dictionary
    numbers = numbers_of_entries(key, dictionary.items())
    everything = HaveSet(pack_known(numbers.values(), RNG))
    assert not len(everything.without_known(key, dictionary, 50)), "no others instead"


class Told:
    """Counts what nodes tell each other."""

    def __init__(self, monkeypatch) -> None:
        self.contacts, self.entries, self.answers = 0, 0, 0
        self.entries_by_node = Counter[int]()
        answer = DHTProtocol.rpc_find

        @functools.wraps(answer)
        async def rpc_find(node: DHTProtocol, request: FindRequest, context: P2PContext) -> FindResponse:
            response = await answer(node, request, context)
            self.answers += 1
            self.contacts += len(response.contacts)
            for result in response.results:
                if result.value:
                    count = len(DictionaryDHTValue.unpackb(result.value))
                    self.entries += count
                    self.entries_by_node[node.node_id] += count
            return response

        monkeypatch.setattr(DHTProtocol, "rpc_find", rpc_find)


async def swarm_with_a_dictionary(entries: int) -> Swarm:
    swarm = Swarm(seed=1)
    await swarm.grow(24)
    expiration = get_dht_time() + 600
    for number in range(entries):
        assert await swarm.nodes[number % 24].store("key", number, expiration, subkey=number)
    return swarm


@in_virtual_time
async def test_nobody_is_told_what_it_knows(monkeypatch):
    told = Told(monkeypatch)
    swarm = await swarm_with_a_dictionary(40)
    told.answers = told.contacts = 0
    for node in swarm.nodes[:8]:
        found = await node.get("key", latest=True, keep_copies=False)
        assert {subkey: item.value for subkey, item in found.value.items()} == {number: number for number in range(40)}
    assert told.answers > 8 * 10, "most of the swarm is asked"
    assert told.contacts < 2 * told.answers, "instead of twenty"
    assert told.entries < 4 * 8 * 40, "instead of five times: four nodes are asked at the same time"
    told.entries = 0
    found = await swarm.nodes[9].get("key", latest=True, keep_copies=False, num_workers=1)
    assert len(found.value) == 40
    assert told.entries == 40, "one after the other"
    told.entries = 0
    found = await swarm.nodes[9].get("key", latest=True, keep_copies=False, num_workers=1, most_entries=7)
    assert 7 <= len(found.value) <= told.entries <= 5 * 7, "of each node that has them"


@in_virtual_time
async def test_askers_without_have_set_are_told_all(monkeypatch):
    told = Told(monkeypatch)
    swarm = await swarm_with_a_dictionary(40)
    told.answers = told.contacts = 0
    monkeypatch.setattr("shoal.dht.traverse.pack_known", lambda numbers, rng: b"")  # as in earlier versions
    found = await swarm.nodes[3].get("key", latest=True, keep_copies=False)
    assert len(found.value) == 40
    assert told.contacts == 20 * told.answers


@in_virtual_time
async def test_several_keys_lead_to_the_same_nodes(monkeypatch):
    swarm = await swarm_with_a_dictionary(0)
    keys = [DHTID.generate(f"key {number}") for number in range(16)]
    node = swarm.nodes[0]
    together = await node.find_nearest_nodes(keys, k_nearest=5)
    monkeypatch.setattr("shoal.dht.traverse.pack_known", lambda numbers, rng: b"")
    alone = [await node.find_nearest_nodes([key], k_nearest=5) for key in keys]
    assert [list(together[key]) for key in keys] == [list(found[key]) for key, found in zip(keys, alone, strict=True)]


@in_virtual_time
async def test_nodes_with_chosen_ids_are_told_again(monkeypatch):
    swarm, said = await swarm_with_a_dictionary(0), []

    def note(numbers: list[int], rng: random.Random) -> bytes:
        said.append(list(numbers))
        return pack_known(numbers, rng)

    monkeypatch.setattr("shoal.dht.traverse.pack_known", note)
    target = DHTID.generate("key")
    lookup, wary = (Lookup(swarm.nodes[0].protocol) for _ in range(2))
    nearest = lookup.starting_nodes(target)
    await lookup.ask(nearest[1], [target])
    wary.chosen.add(wary.starting_nodes(target)[0])  # perhaps somebody lies about who that is
    await wary.ask(nearest[1], [target])
    assert set(nearest) == set(said[0])
    assert set(nearest[1:]) <= set(said[1])
    assert nearest[0] not in said[1]


@in_virtual_time
async def test_holders_of_a_dictionary_take_turns(monkeypatch):
    """To whoever asks two of them, as each tracker does."""
    told = Told(monkeypatch)
    swarm = await swarm_with_a_dictionary(40)
    readers = [node for node in swarm.nodes if not node.protocol.storage.get(DHTID.generate("key"))]
    for _ in range(4):
        for node in readers:
            found = await node.get("key", latest=True, keep_copies=False, beam_size=2, num_workers=1)
            assert len(found.value) == 40
    assert told.entries == 4 * len(readers) * 40
    assert len(told.entries_by_node) == 5
    assert max(told.entries_by_node.values()) < told.entries / 3
