"""Chains of updates: who lacks some of them, who trains another model, and which of several models goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.optim.diloco.version_history import (
    OuterStatement,
    VersionHistory,
    has_other_bits,
    parse_links,
    settle,
    steps_between,
)


def chain(*rounds: bytes, start: float = 0.0, samples: int = 10, length: int = 5) -> VersionHistory:
    made = VersionHistory.begin(torch.full((3,), start), length)
    for each in rounds:
        made.extend(each, samples)
    return made


def verdict(*chains: VersionHistory):
    return settle([OuterStatement(each.links) for each in chains])


def test_each_update_adds_a_link():
    made = chain(b"a", b"b")
    assert [link.version for link in made.links] == [0, 1, 2]
    assert [link.samples for link in made.links] == [0, 10, 20]
    assert made.newest == chain(b"a", b"b").newest
    assert made.newest.hash != chain(b"b", b"a").newest.hash
    assert len(chain(*(bytes([i]) for i in range(20))).links) == 5


def test_who_lacks_updates_is_of_the_same_lineage():
    ahead, behind, far = chain(b"a", b"b", b"c"), chain(b"a"), chain()
    assert steps_between(behind.links, ahead.links) == 2
    assert steps_between(ahead.links, ahead.links) == 0
    assert steps_between(ahead.links, behind.links) is None
    found = verdict(behind, ahead, far, ahead)
    assert found.base == ahead.newest
    assert found.behind == {0: 2, 1: 0, 2: 3, 3: 0}


def test_a_lineage_goes_on_from_its_newest_version():
    """Else a second update would be made of what others have updated before."""
    ahead, others = chain(b"a", b"b", b"c"), chain(b"a")
    assert verdict(ahead, others, others, others).base == ahead.newest
    assert verdict(ahead, others, others, others).behind == {0: 0, 1: 2, 2: 2, 3: 2}


def test_a_fifth_of_the_members_leads_nobody_to_a_version_that_only_they_have():
    """It may be an invention, and the others would ask each other for it in vain."""
    liar, others = chain(b"a", b"b", b"c"), chain(b"a")
    assert verdict(liar, *[others] * 4).base == others.newest
    assert verdict(liar, liar, *[others] * 4).base == liar.newest


def test_who_has_heard_of_a_version_speaks_for_it_as_who_has_it():
    """It was in that round, or lacked something in it."""
    ahead, others = chain(b"a", b"b", b"c"), chain(b"a")
    statements = [OuterStatement(each.links) for each in (ahead, *[others] * 4)]
    statements[3] = replace(statements[3], known=ahead.newest)
    assert settle(statements).base == ahead.newest
    statements[3] = replace(statements[3], known=chain(b"a", b"x", b"y").newest)
    assert settle(statements).base == others.newest, "no member has that one"


def test_there_is_no_second_update_of_what_some_have_heard_to_be_updated():
    """They were in the round that has updated it, without what it updated, and none of those who had it is here."""
    ahead, others, behind = chain(b"a", b"b", b"c"), chain(b"a", b"b"), chain(b"a")
    statements = [OuterStatement(each.links) for each in (others, others, behind, behind)]
    assert settle(statements).behind == {0: 0, 1: 0, 2: 1, 3: 1}
    statements[2] = replace(statements[2], known=ahead.newest)
    assert settle(statements).base == others.newest, "it is only one, and may lie"
    statements[3] = replace(statements[3], known=ahead.newest)
    assert settle(statements).base == ahead.newest
    assert settle(statements).behind == {0: 1, 1: 1, 2: 2, 3: 2}, "all get it first"
    assert settle(statements[:3]).base == ahead.newest, "of three, one is enough"
    statements[0] = OuterStatement(ahead.links)
    assert settle(statements).behind == {0: 0, 1: 1, 2: 2, 3: 2}


def test_too_far_behind_is_another_lineage():
    rounds = [bytes([i]) for i in range(6)]
    assert steps_between(chain().links, chain(*rounds).links) is None
    assert verdict(chain(), chain(*rounds), chain(*rounds)).behind == {1: 0, 2: 0}


def test_the_lineage_with_most_members_wins_then_most_samples_then_the_smaller_hash():
    lonely = chain(b"x", b"y", samples=10**6)
    assert verdict(lonely, chain(b"a"), chain(b"a")).behind == {1: 0, 2: 0}
    assert verdict(chain(b"a"), lonely).behind == {1: 0}
    one, other = chain(start=1.0), chain(start=2.0)
    smaller = min((one, other), key=lambda each: each.newest.hash)
    assert verdict(one, other).behind == {[one, other].index(smaller): 0}
    assert verdict(other, one).behind == {[other, one].index(smaller): 0}


def test_members_that_join_two_others_make_them_one_lineage():
    """The first and the last one have no link in common that they still know, but the one between knows both."""
    rounds = [bytes([i]) for i in range(6)]
    first, middle, last = chain(*rounds[:2]), chain(*rounds[:5]), chain(*rounds, length=3)
    assert steps_between(first.links, last.links) is None
    assert verdict(first, last, middle).behind == {1: 0, 2: 1}
    assert verdict(first, *[middle] * 4, last).behind == {0: 3, 1: 0, 2: 0, 3: 0, 4: 0}


def test_statements_travel_and_what_makes_no_sense_counts_for_nobody():
    said = OuterStatement(chain(b"a").links, 5, 40, 3, bytes(16), known=chain(b"a", b"b").newest)
    assert OuterStatement.parse(said.dump()) == said
    good = said.dump()
    bad = [
        None,
        [],
        {**good, "links": []},
        {**good, "links": [[0, b"short", 0]]},
        {**good, "links": [[0, bytes(16), -1]]},
        {**good, "links": [[0, bytes(16), 0], [2, bytes(16), 0]]},
        {**good, "links": [[-1, bytes(16), 0]]},
        {**good, "samples": -1},
        {**good, "steps": 1.5},
        {**good, "expected": 2**63},
        {**good, "digest": b"short"},
        {**good, "digest": 5},
        {**good, "known": [1, b"short", 0]},
        {**good, "known": 1},
    ]
    assert all(OuterStatement.parse(each) is None for each in bad)
    assert settle([None, replace(said, known=None)]).behind == {1: 0}
    assert settle([None, None]).base is None
    with pytest.raises(ValueError, match="1 to 64 links"):
        parse_links([list(chain().newest)] * 65)


def test_links_survive_a_checkpoint():
    made = chain(b"a", b"b")
    again = VersionHistory(parse_links(made.dump()), 5)
    assert again.links == made.links


def test_the_bits_of_most_members_of_the_same_version_are_right():
    here, ahead = chain(b"a").links, chain(b"a", b"b").links
    one, other = bytes(16), b"\xff" * 16

    def told(*digests):
        return [None if digest is None else OuterStatement(here, digest=digest) for digest in digests]

    def judged(statements):
        return [has_other_bits(statements, own) for own in range(len(statements))]

    assert judged(told(one, other, other)) == [True, False, False]
    assert judged(told(one, other)) == [False, True]
    assert judged(told(one, b"", None, one)) == [False] * 4
    assert judged([*told(other), OuterStatement(ahead, digest=one), OuterStatement(ahead, digest=one)]) == [False] * 3


def test_what_only_clients_have_does_not_go_on():
    """Nobody could download it from them, and those that lack it would wait for ever."""
    here, there = chain(b"a").links, chain(b"b").links
    statements = [OuterStatement(here), OuterStatement(there), OuterStatement(there)]
    assert settle(statements).behind == {1: 0, 2: 0}
    assert settle(statements, clients=(1, 2)).behind == {0: 0}
    assert settle(statements, clients=(1,)).behind == {1: 0, 2: 0}
    assert settle(statements, clients=(0, 1, 2)).behind == {1: 0, 2: 0}
    ahead = chain(b"a", b"x").links
    statements = [OuterStatement(here), OuterStatement(ahead), OuterStatement(ahead)]
    assert settle(statements).behind == {0: 1, 1: 0, 2: 0}
    assert settle(statements, clients=(1, 2)).behind == {0: 0}
    assert settle(statements, clients=(1,)).behind == {0: 1, 1: 0, 2: 0}
    digests = [OuterStatement(here, digest=digest) for digest in (b"\xff" * 16, bytes(16), bytes(16))]
    assert [has_other_bits(digests, own, clients=(1, 2)) for own in range(3)] == [False, True, True]
    assert [has_other_bits(digests, own, clients=(1,)) for own in range(3)] == [True, False, False]
