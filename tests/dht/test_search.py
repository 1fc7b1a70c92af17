"""How the answers of several nodes about one key become one result."""

from __future__ import annotations

import itertools

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.get import KeySearch, PendingSearches
from shoal.dht.routing import DHTID
from shoal.dht.storage import DictionaryDHTValue, StoredValue
from shoal.dht.validation import CompositeValidator
from tests.dht.virtual_time import in_virtual_time

KEY = DHTID.generate("key")
NODES = [DHTID(number) for number in range(5)]


def later(seconds: float) -> float:
    return get_dht_time() + seconds


def plain(value: object) -> bytes:
    return MSGPackSerializer.dumps(value)


def dictionary(**entries: tuple[object, float]) -> DictionaryDHTValue[bytes]:
    made: DictionaryDHTValue[bytes] = DictionaryDHTValue()
    for name, (value, expires) in entries.items():
        made.store(name, plain(value), expires)
    return made


def result_of(*candidates: tuple[StoredValue, float]):
    search = KeySearch(KEY, float("inf"), CompositeValidator())
    for node, (value, expires) in zip(NODES, candidates, strict=False):
        search.add_candidate(value, expires, node)
    search.finish()
    return search.future.result(), search.source


@in_virtual_time
async def test_latest_plain_value_wins():
    values = [(plain("old"), later(10)), (plain("new"), later(20)), (plain("tie"), later(20))]
    for order in itertools.permutations(values):
        found, source = result_of(*order)
        expected = next(value for value in order if value[1] == later(20))
        assert found == (MSGPackSerializer.loads(expected[0]), later(20))
        assert source == NODES[order.index(expected)]
    assert result_of() == (None, None)
    assert result_of((plain("gone"), later(-1)))[0] is None


@in_virtual_time
async def test_dictionaries_are_united_entry_by_entry():
    parts = [
        dictionary(a=(1, later(10)), b=("old", later(20))),
        dictionary(b=("new", later(30)), c=(3, later(5))),
        dictionary(a=("older", later(9)), d=(4, later(40))),
    ]
    copies = [part.packb() for part in parts]
    for order in itertools.permutations(parts):
        found, source = result_of(*((part, part.latest_expiration_time) for part in order))
        assert {name: item.value for name, item in found.value.items()} == {"a": 1, "b": "new", "c": 3, "d": 4}
        assert found.expiration_time == later(40)
        assert source == NODES[order.index(parts[2])]
    assert [part.packb() for part in parts] == copies, "what nodes keep is not changed by reading it"


@pytest.mark.parametrize("plain_first", [False, True])
@pytest.mark.parametrize("plain_lives_longer", [False, True])
@in_virtual_time
async def test_later_of_plain_value_and_dictionary_wins(plain_first, plain_lives_longer):
    entries = dictionary(a=(1, later(20)))
    candidates = [(plain("plain"), later(30 if plain_lives_longer else 10)), (entries, later(20))]
    found, _ = result_of(*(candidates if plain_first else candidates[::-1]))
    assert found.value == ("plain" if plain_lives_longer else {"a": (1, later(20))})


@in_virtual_time
async def test_result_serves_searches_that_need_no_more():
    pending = PendingSearches()
    first, *others = (
        KeySearch(KEY, sufficient, CompositeValidator()) for sufficient in (later(50), later(5), later(50), later(51))
    )
    stranger = KeySearch(DHTID(7), later(5), CompositeValidator())
    for search in (first, *others, stranger):
        pending.join(search)
    first.add_candidate(plain("found"), later(10), NODES[0])
    pending.share_result(first)
    assert [other.finished for other in others] == [True, True, False], "the finder has looked for as much as that"
    assert not stranger.finished
    assert pending[KEY] == [others[2]]
    assert others[0].future.result() == ("found", later(10))


@in_virtual_time
async def test_sample_serves_searches_for_fewer_entries():
    pending = PendingSearches()
    most = [8, 0, 9, 8, 3]
    sample, *others = (KeySearch(KEY, float("inf"), CompositeValidator(), most_entries=number) for number in most)
    for search in (sample, *others):
        pending.join(search)
    sample.add_candidate(dictionary(a=(1, later(10))), later(10), NODES[0])
    pending.share_result(sample)
    assert [other.finished for other in others] == [False, False, True, True]
    everything = others[0]
    everything.add_candidate(dictionary(a=(1, later(10)), b=(2, later(10))), later(10), NODES[0])
    pending.share_result(everything)
    assert others[1].finished
