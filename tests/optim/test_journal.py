"""The journal: versions, the updates behind them, how two peers stand to each other, and what a round updates."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from shoal.optim.diloco.messages import OuterStatement, has_other_bits
from shoal.optim.history.fork_choice import choose_version, compare
from shoal.optim.history.journal import Journal, Update, parse_entries
from shoal.optim.history.window import EXACT, OVERLAPPING, Relation, Window, relation, takes_part


@pytest.mark.parametrize(
    ("own", "other", "window", "common", "expected"),
    [
        (5, 5, EXACT, None, "with"),
        (5, 6, EXACT, None, "behind"),
        (6, 5, EXACT, None, "ahead"),
        (5, 6, OVERLAPPING, None, "with"),
        (5, 7, OVERLAPPING, None, "behind"),
        (7, 5, OVERLAPPING, None, "with"),
        (8, 5, OVERLAPPING, None, "ahead"),
        (6, 6, EXACT, 5, "elsewhere"),
        (6, 5, EXACT, 5, "ahead"),
        (6, 6, Window(1, 1), 5, "with"),
        (7, 6, Window(1, 1), 5, "ahead"),
        (6, 7, Window(1, 1), 5, "behind"),
        (7, 7, Window(1, 1), 5, "elsewhere"),
    ],
)
def test_relation_of_two_positions(own, other, window, common, expected):
    assert relation(own, other, window, common) is Relation(expected)


@pytest.mark.parametrize(
    ("theirs", "last", "is_finishing", "expected"),
    [
        (4, 5, False, False),
        (4, 5, True, True),
        (3, 5, True, False),
        (5, 5, False, True),
        (6, 5, False, False),
        (7, 7, False, True),
    ],
)
def test_who_takes_part_in_a_round(theirs, last, is_finishing, expected):
    assert takes_part(theirs, 5, last, is_finishing=is_finishing) is expected


def chain(*rounds: bytes, start: float = 0.0, samples: int = 10, length: int = 5) -> Journal:
    made = Journal.begin(torch.full((3,), start), length)
    for each in rounds:
        made.append(made.newest.followed_by(each, samples))
    return made


def choose(statements, clients=()):
    said = {n: each for n, each in enumerate(statements) if each is not None}
    heard = {n: each.known for n, each in said.items() if each.known is not None}
    return choose_version({n: each.entries for n, each in said.items()}, heard, clients)


def choice_of(*chains: Journal):
    return choose([OuterStatement(each.entries) for each in chains])


def update(journal, round_id, length=100):
    last = journal.newest
    made = Update(last.version + 1, last.hash, round_id, 5, (torch.randn(length),))
    journal.append(last.followed_by(round_id, 5), made)
    return made


def test_the_latest_updates_are_kept():
    journal = Journal.begin(torch.zeros(100), 64)
    for n in range(9):
        update(journal, bytes([n]))
    assert [each.version for each in journal.since(7)] == [8, 9], "as many bytes as outer parameters and momentum"
    assert journal.since(6) == [], "the first one is not kept any more"
    assert journal.since(9) == []


def test_more_updates_are_kept_for_newcomers():
    journal = Journal.begin(torch.zeros(100), 64)
    journal.serves_newcomers = True
    for n in range(10):
        update(journal, bytes([n]))
    assert len(journal.since(2)) == 8
    journal.append(journal.newest.followed_by(b"other", 5))
    assert journal.since(9) == [], "the update after it is not known"


def test_updates_are_taken_in_order_of_version():
    source, journal = (Journal.begin(torch.zeros(100), 64) for _ in range(2))
    source.serves_newcomers = True
    updates = [update(source, bytes([n])) for n in range(3)]
    journal.receive([updates[2], updates[1]])
    assert journal.take_next() is None
    journal.receive([updates[0]])
    while (each := journal.take_next()) is not None:
        journal.append(journal.newest.followed_by(each.round_id, each.samples), each)
    assert journal.entries == source.entries


def test_updates_of_another_branch_are_dropped():
    source, journal = Journal.begin(torch.ones(100), 64), Journal.begin(torch.zeros(100), 64)
    journal.receive([update(source, b"a")])
    assert journal.take_next() is None
    assert journal.newest.version == 0


def test_a_full_inbox_keeps_the_newest_updates():
    source, journal = (Journal.begin(torch.zeros(100), 64) for _ in range(2))
    updates = [update(source, bytes([n])) for n in range(3)]
    journal.receive(updates, most=2)
    assert journal.take_next() is None


def test_entries_are_taken_back():
    journal = chain(b"a", b"b")
    journal.take_back(1)
    assert journal.entries == chain(b"a").entries
    journal.take_back(9)
    assert journal.entries == ()


def test_a_journal_survives_a_checkpoint():
    made = chain(b"a", b"b")
    assert Journal(parse_entries(made.dump()), 5).entries == made.entries


def test_each_update_adds_an_entry():
    made = chain(b"a", b"b")
    assert [entry.version for entry in made.entries] == [0, 1, 2]
    assert [entry.samples for entry in made.entries] == [0, 10, 20]
    assert made.newest == chain(b"a", b"b").newest
    assert made.newest.hash != chain(b"b", b"a").newest.hash
    assert len(chain(*(bytes([i]) for i in range(20))).entries) == 5


def test_a_peer_that_lacks_updates_is_behind():
    ahead, behind, far = chain(b"a", b"b", b"c"), chain(b"a"), chain()
    assert compare(behind.entries, ahead.entries) is Relation.BEHIND
    assert compare(ahead.entries, ahead.entries) is Relation.WITH
    assert compare(ahead.entries, behind.entries) is Relation.AHEAD
    found = choice_of(behind, ahead, far, ahead)
    assert found.base == ahead.newest
    assert found.behind == {0: 2, 1: 0, 2: 3, 3: 0}


def test_the_newest_version_of_a_branch_is_updated():
    """Else a second update would be made of what others have updated before."""
    ahead, others = chain(b"a", b"b", b"c"), chain(b"a")
    assert choice_of(ahead, others, others, others).base == ahead.newest
    assert choice_of(ahead, others, others, others).behind == {0: 0, 1: 2, 2: 2, 3: 2}


def test_a_fifth_of_the_members_misleads_nobody():
    """It may be an invention, and the others would ask each other for it in vain."""
    liar, others = chain(b"a", b"b", b"c"), chain(b"a")
    assert choice_of(liar, *[others] * 4).base == others.newest
    assert choice_of(liar, liar, *[others] * 4).base == liar.newest


def test_hearing_of_a_version_counts_like_having_it():
    """It was in that round, or lacked something in it."""
    ahead, others = chain(b"a", b"b", b"c"), chain(b"a")
    statements = [OuterStatement(each.entries) for each in (ahead, *[others] * 4)]
    statements[3] = replace(statements[3], known=ahead.newest)
    assert choose(statements).base == ahead.newest
    statements[3] = replace(statements[3], known=chain(b"a", b"x", b"y").newest)
    assert choose(statements).base == others.newest, "no member has that one"


def test_a_known_update_is_not_made_twice():
    """They were in the round that has updated it, without what it updated, and none of those who had it is here."""
    ahead, others, behind = chain(b"a", b"b", b"c"), chain(b"a", b"b"), chain(b"a")
    statements = [OuterStatement(each.entries) for each in (others, others, behind, behind)]
    assert choose(statements).behind == {0: 0, 1: 0, 2: 1, 3: 1}
    statements[2] = replace(statements[2], known=ahead.newest)
    assert choose(statements).base == others.newest, "it is only one, and may lie"
    statements[3] = replace(statements[3], known=ahead.newest)
    assert choose(statements).base == ahead.newest
    assert choose(statements).behind == {0: 1, 1: 1, 2: 2, 3: 2}, "all get it first"
    assert choose(statements[:3]).base == ahead.newest, "of three, one is enough"
    statements[0] = OuterStatement(ahead.entries)
    assert choose(statements).behind == {0: 0, 1: 1, 2: 2, 3: 2}


def test_too_far_behind_is_another_branch():
    rounds = [bytes([i]) for i in range(6)]
    assert compare(chain().entries, chain(*rounds).entries) is Relation.ELSEWHERE
    assert choice_of(chain(), chain(*rounds), chain(*rounds)).behind == {1: 0, 2: 0}


def test_a_member_behind_both_branches_follows_the_winner():
    behind, one, other = chain(), chain(b"a", samples=99), chain(b"b")
    found = choice_of(behind, one, other, other)
    assert found.base == other.newest
    assert found.behind == {0: 1, 2: 0, 3: 0}


def test_members_then_samples_then_hash_decide():
    lonely = chain(b"x", b"y", samples=10**6)
    assert choice_of(lonely, chain(b"a"), chain(b"a")).behind == {1: 0, 2: 0}
    assert choice_of(chain(b"a"), lonely).behind == {1: 0}
    one, other = chain(start=1.0), chain(start=2.0)
    smaller = min((one, other), key=lambda each: each.newest.hash)
    assert choice_of(one, other).behind == {[one, other].index(smaller): 0}
    assert choice_of(other, one).behind == {[other, one].index(smaller): 0}


def test_a_member_between_two_others_joins_them():
    """The first and the last one have no link in common that they still know, but the one between knows both."""
    rounds = [bytes([i]) for i in range(6)]
    first, middle, last = chain(*rounds[:2]), chain(*rounds[:5]), chain(*rounds, length=3)
    assert compare(first.entries, last.entries) is Relation.ELSEWHERE
    assert choice_of(first, last, middle).behind == {1: 0, 2: 1}
    assert choice_of(first, *[middle] * 4, last).behind == {0: 3, 1: 0, 2: 0, 3: 0, 4: 0}


def test_malformed_statements_are_left_out():
    said = OuterStatement(chain(b"a").entries, 5, 40, 3, bytes(16), known=chain(b"a", b"b").newest)
    assert OuterStatement.parse(said.dump()) == said
    good = said.dump()
    bad = [
        None,
        [],
        {**good, "entries": []},
        {**good, "entries": [[0, b"short", 0]]},
        {**good, "entries": [[0, bytes(16), -1]]},
        {**good, "entries": [[0, bytes(16), 0], [2, bytes(16), 0]]},
        {**good, "entries": [[-1, bytes(16), 0]]},
        {**good, "samples": -1},
        {**good, "steps": 1.5},
        {**good, "expected": 2**63},
        {**good, "digest": bytes(17)},
        {**good, "digest": 5},
        {**good, "known": [1, b"short", 0]},
        {**good, "known": 1},
    ]
    assert all(OuterStatement.parse(each) is None for each in bad)
    assert choose([None, replace(said, known=None)]).behind == {1: 0}
    assert choose([None, None]) is None
    with pytest.raises(ValueError, match="1 to 64 versions"):
        parse_entries([list(chain().newest)] * 65)


def test_the_bits_of_most_members_are_right():
    here, ahead = chain(b"a").entries, chain(b"a", b"b").entries
    one, other = bytes(16), b"\xff" * 16

    def told(*digests):
        return [None if digest is None else OuterStatement(here, digest=digest) for digest in digests]

    def judged(statements):
        return [has_other_bits(statements, own) for own in range(len(statements))]

    assert judged(told(one, other, other)) == [True, False, False]
    assert judged(told(one, other)) == [False, True]
    assert judged(told(one, b"", None, one)) == [False] * 4
    assert judged([*told(other), OuterStatement(ahead, digest=one), OuterStatement(ahead, digest=one)]) == [False] * 3


def test_what_only_clients_have_is_dropped():
    """Nobody could download it from them, and those that lack it would wait for ever."""
    here, there = chain(b"a").entries, chain(b"b").entries
    statements = [OuterStatement(here), OuterStatement(there), OuterStatement(there)]
    assert choose(statements).behind == {1: 0, 2: 0}
    assert choose(statements, clients=(1, 2)).behind == {0: 0}
    assert choose(statements, clients=(1,)).behind == {1: 0, 2: 0}
    assert choose(statements, clients=(0, 1, 2)).behind == {1: 0, 2: 0}
    ahead = chain(b"a", b"x").entries
    statements = [OuterStatement(here), OuterStatement(ahead), OuterStatement(ahead)]
    assert choose(statements).behind == {0: 1, 1: 0, 2: 0}
    assert choose(statements, clients=(1, 2)).behind == {0: 0}
    assert choose(statements, clients=(1,)).behind == {0: 1, 1: 0, 2: 0}
    digests = [OuterStatement(here, digest=digest) for digest in (b"\xff" * 16, bytes(16), bytes(16))]
    assert [has_other_bits(digests, own, clients=(1, 2)) for own in range(3)] == [False, True, True]
    assert [has_other_bits(digests, own, clients=(1,)) for own in range(3)] == [True, False, False]
