"""Which stage a peer holds: where newcomers go, who moves, and that all of it comes to rest."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p import Identity
from shoal.stages.directory import StageRecord
from shoal.stages.placement import SETTLING_SECONDS, Move, may_move, move_of, rank_of, rates_of, stage_for_newcomer

NOW = 10_000.0
IDS = [Identity.generate(random.Random(number)).peer_id for number in range(150)]


def record(stage, rate, **values):
    return StageRecord(**{"stage": stage, "epoch": 1, "rate": rate, "serves_auto": True, "time": NOW, **values})


def swarm(*stages, **values):
    """Peers with these rates in each stage."""
    ids = iter(IDS)
    return {stage: {next(ids): record(stage, rate, **values) for rate in rates} for stage, rates in enumerate(stages)}


def changed(peers, peer, **values):
    """The same, with other values in the record of a peer."""
    return {
        stage: {each: msgspec.structs.replace(r, **values) if each == peer else r for each, r in records.items()}
        for stage, records in peers.items()
    }


def moved(peers, move):
    """The same after a move."""
    new = msgspec.structs.replace(peers[move.source][move.peer], stage=move.target)
    rest = {stage: {p: r for p, r in records.items() if p != move.peer} for stage, records in peers.items()}
    return rest | {move.target: rest[move.target] | {move.peer: new}}


def settle(peers):
    """Let peers move until none does; returns the swarm and the number of moves."""
    for step in range(1000):
        if (move := move_of(peers, step)) is None:
            return peers, step
        before, peers = rates_of(peers), moved(peers, move)
        after = rates_of(peers)
        assert min(after.values()) >= min(before.values())
        assert min(after[move.source], after[move.target]) > before[move.target]
        assert peers[move.source]
    raise AssertionError("it does not come to rest")


def test_four_and_one_become_three_and_two():
    peers, moves = settle(swarm([1] * 4, [1]))
    assert ([len(each) for each in peers.values()], moves) == ([3, 2], 1)
    assert rates_of(peers) == {0: 3, 1: 2}


@pytest.mark.parametrize(
    ("stages", "after"),
    [
        ([[1] * 4, [1], [1]], [2, 2, 2]),  # two are poorest: a move to one of them is of use
        ([[1] * 3, []], [2, 1]),
        ([[1], []], [1, 0]),  # the last peer of a stage never moves
        ([[1] * 3, [1] * 2], [3, 2]),
        ([[1] * 12, [1] * 10], [12, 10]),  # 10 % are not worth a move
        ([[1] * 40, [1] * 20], [32, 28]),
        ([[100, 2], [10]], [1, 2]),  # the slow one moves: the fast one would be missed
        ([[100, 1], [10]], [2, 1]),  # nothing would be better by more than a tenth
        ([[], [], [1] * 7], [2, 2, 3]),
    ],
)
def test_where_peers_come_to_rest(stages, after):
    peers, _ = settle(swarm(*stages))
    assert sorted(len(each) for each in peers.values()) == sorted(after)


def test_the_mover_is_drawn_by_rank_among_those_that_may_be_moved():
    peers = swarm([1] * 4, [1])
    first = {step: min(peers[0], key=lambda peer, step=step: rank_of(peer, step)) for step in range(20)}
    assert {step: move_of(peers, step) for step in range(20)} == {step: Move(first[step], 0, 1) for step in range(20)}
    assert len(set(first.values())) > 2
    fixed = changed(peers, first[0], serves_auto=False)
    assert move_of(fixed, 0).peer not in (None, first[0])
    assert move_of(swarm([1] * 4, [1], serves_auto=False), 0) is None
    # If the richest stage has nobody to give, the next one has.
    peers = swarm([10] * 5, [1] * 4, [1])
    peers[0] = {peer: msgspec.structs.replace(each, serves_auto=False) for peer, each in peers[0].items()}
    assert move_of(peers, 0)[1:] == (1, 2)


def test_only_one_peer_moves_at_a_time():
    peers = swarm([1] * 6, [1])
    for plans in ({"moves_to": 1}, {"is_leaving": True, "moves_to": 1}, {"is_joining": True}):
        peer = next(iter(peers[0]))
        assert move_of(changed(peers, peer, since=NOW - 1, **plans), 0) is None
        long_ago = changed(peers, peer, since=NOW - SETTLING_SECONDS, **plans)
        assert move_of(long_ago, 0)  # it never arrives, and nobody waits for it
        assert rates_of(long_ago) == {0: 6 if plans == {"moves_to": 1} else 5, 1: 1}
    leaving = changed(peers, peer, is_leaving=True)  # for good
    assert rates_of(leaving) == {0: 5, 1: 1}
    assert move_of(leaving, 0)


def test_a_peer_does_not_move_if_all_others_leave():
    peers = swarm([1, 1], [])
    move = move_of(peers, 0)
    declared = changed(peers, move.peer, moves_to=1, since=NOW)
    assert may_move(declared, move, 0)
    (other,) = set(peers[0]) - {move.peer}
    assert not may_move(changed(declared, other, is_leaving=True), move, 0)
    assert not may_move(changed(declared, other, is_joining=True, since=NOW), move, 0)


def test_a_peer_that_does_not_tell_its_speed_is_as_fast_as_others():
    assert rates_of(swarm([4, 0], [4])) == {0: 8, 1: 4}
    assert rates_of(swarm([0, 0], [0])) == {0: 2, 1: 1}


rates = st.floats(0.1, 300.0)
stages_of_peers = st.lists(st.lists(rates, max_size=8), min_size=1, max_size=6)


@given(stages_of_peers, st.lists(st.booleans(), min_size=48, max_size=48))
def test_any_swarm_comes_to_rest(stages, may_be_moved):
    peers = swarm(*stages)
    for peer, is_auto in zip(IDS, may_be_moved, strict=False):
        peers = changed(peers, peer, serves_auto=is_auto)
    peers, moves = settle(peers)
    assert moves <= 2 * sum(map(len, stages))


@given(st.integers(2, 8), st.lists(st.integers(0, 7), min_size=8, max_size=100))
def test_peers_that_are_alike_spread_evenly(count, places):
    peers, _ = settle(swarm(*[[1] * sum(place % count == stage for place in places) for stage in range(count)]))
    sizes = [len(each) for each in peers.values()]
    assert max(sizes) - min(sizes) <= max(1, 0.2 * min(sizes))


@given(stages_of_peers.filter(lambda stages: len(stages) > 1), st.randoms(use_true_random=False), st.integers(0, 99))
def test_if_views_differ_still_only_one_moves(stages, rng, step):
    peers = swarm(*stages)

    def seen():
        return {
            stage: {p: msgspec.structs.replace(r, rate=r.rate * rng.uniform(0.7, 1.4)) for p, r in records.items()}
            for stage, records in peers.items()
        }

    declared = []
    for records in peers.values():
        for peer in records:
            move = move_of(seen(), step)
            if move is not None and move.peer == peer:
                declared.append(move)
    for move in declared:
        plans = {"moves_to": move.target, "since": NOW}
        peers = changed(peers, move.peer, **plans)
    confirmed = [move for move in declared if may_move(seen(), move, step)]
    assert len(confirmed) <= 1
    for move in confirmed:
        assert len(peers[move.source]) > 1
    if declared == [move_of(swarm(*stages), step)]:
        assert may_move(peers, declared[0], step)


@given(stages_of_peers, st.integers(1, 10), st.randoms(use_true_random=False))
def test_newcomers_that_come_together_spread(stages, count, rng):
    peers, newcomers = swarm(*stages), IDS[-count:]
    since = {peer: NOW + rng.random() for peer in newcomers}
    # At first nobody sees the others.
    chosen = {peer: stage_for_newcomer(peers, peer, since[peer]) for peer in newcomers}
    for _ in range(count):
        for peer, stage in chosen.items():
            rest = {s: {p: r for p, r in records.items() if p != peer} for s, records in peers.items()}
            new = record(stage, 0.0, is_joining=True, since=since[peer], time=NOW + 2)
            peers = rest | {stage: rest[stage] | {peer: new}}
        chosen = {peer: stage_for_newcomer(peers, peer, since[peer]) for peer in newcomers}
    assert all(peer in peers[stage] for peer, stage in chosen.items())  # all are content
    empty = sum(not records for records in swarm(*stages).values())
    assert sum(not records for records in peers.values()) == max(0, empty - count)
