"""Which peer of a stage gets a microbatch: what is expected of each, and what follows for a whole stage."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import NamedTuple

import pytest

from shoal.p2p import Identity
from shoal.stages.choice import (
    BEHIND_SECONDS,
    FAILURE_SECONDS,
    HALF_LIFE_SECONDS,
    MOST_MEASURED,
    UNTRIED_SHARE,
    Measurements,
    choose,
    expected_seconds,
)
from shoal.stages.directory import RENEWAL_SECONDS, StageRecord

NOW = 1000.0
PEERS = [Identity.generate(random.Random(number)).peer_id for number in range(100)]
A, B, C = PEERS[:3]


def record(rate, time=NOW, **values):
    return StageRecord(**{"stage": 0, "epoch": 5, "rate": rate, "room": 10**6, "count": 1, "time": time, **values})


def measured(**seconds):
    """What was seen after one microbatch at each of the peers A, B and C that took this long."""
    seen = Measurements()
    for name, each in seconds.items():
        peer = {"a": A, "b": B, "c": C}[name]
        seen.note_sent(peer, NOW)
        seen.note_done(peer, each, NOW)
    return seen


def choices(candidates, seen=None, **how):
    """All peers that may be chosen."""
    seen, how = seen or Measurements(), {"now": NOW, **how}
    return {choose(candidates, seen, rng=random.Random(seed), **how) for seed in range(30)}


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ({}, {None}),
        ({A: record(1), B: record(2)}, {B}),
        ({A: record(2), B: record(2.1), C: record(1)}, {A, B}),  # as good as each other
        ({A: record(1), B: record(2, queue=3)}, {A}),
        ({A: record(1), B: record(2, time=NOW - RENEWAL_SECONDS, queue=3)}, {B}),  # that queue is gone
        ({A: record(1), B: record(2, is_leaving=True), C: record(2, is_joining=True)}, {A}),
        ({A: record(4), B: record(2), C: record(0)}, {A}),
        ({A: record(0)}, {A}),  # it tells no speed, and is as fast as others
    ],
)
def test_the_peer_that_is_expected_to_be_done_first_is_chosen(candidates, chosen):
    assert choices(candidates) == chosen


def test_slow_peers_get_what_has_waited_for_as_long_as_fast_ones_would_save():
    candidates = {A: record(1), B: record(10)}
    assert choices(candidates, busy={B}) == choices(candidates, busy={B}, waited=0.8) == {None}
    assert choices(candidates, busy={B}, waited=1.0) == {A}
    assert choices(candidates, busy={A, B}, waited=1.0) == {None}
    assert choices({A: record(9.5), B: record(10)}, busy={B}) == {A}


def test_measurements_correct_what_records_claim():
    claims = {A: record(1000), B: record(2)}
    assert choices(claims) == {A}
    assert choices(claims, measured(a=3.0, b=0.6)) == {B}
    far = measured(a=0.5, b=0.3)  # the line counts as well
    assert choices({A: record(100), B: record(10)}, far) == {B}
    for _ in range(2):
        far.note_sent(B, NOW)
    assert choices({A: record(100), B: record(10)}, far) == {A}
    # What is not chosen for a while is tried again.
    assert choices(claims, measured(a=3.0, b=0.6), now=NOW + 5 * HALF_LIFE_SECONDS) == {A}


def test_a_timeout_is_a_slow_sample_and_its_charge_is_given_back():
    seen = measured(a=0.1, b=0.2)
    candidates = {A: record(10), B: record(5)}
    seen.note_sent(A, NOW)
    seen.note_failure(A, 0.01, NOW)  # a refusal is quick, but not fast
    assert not seen.of(A).sent
    assert choices(candidates, seen) == {B}
    assert expected_seconds(candidates[A], seen.of(A), NOW) == pytest.approx(0.8 * 0.1 + 0.2 * FAILURE_SECONDS)
    assert choices({A: record(10)}, seen) == {A}  # there is no other
    before = expected_seconds(candidates[B], seen.of(B), NOW)
    seen.note_sent(B, NOW)
    assert expected_seconds(candidates[B], seen.of(B), NOW) == 2 * before
    seen.take_back(B)
    assert expected_seconds(candidates[B], seen.of(B), NOW) == before
    seen.take_back(B)
    seen.note_done(B, 0.2, NOW)  # what was forgotten meanwhile does no harm


def test_those_that_failed_or_are_behind_are_left_out():
    candidates = {A: record(4, epoch=4), B: record(2)}
    assert choices(candidates, excluded={A}) == {B}
    assert choices(candidates, excluded={A, B}) == {None}
    seen = Measurements()
    assert choices(candidates, seen, step=5) == {A}  # the step has just begun, and the record may be older
    seen.note_behind(A, 5, NOW)
    assert choices(candidates, seen, step=5) == {B}
    assert choices(candidates, seen) == choices(candidates, seen, step=4) == {A}
    later = NOW + 2 * BEHIND_SECONDS
    assert choices(candidates, seen, step=5, now=later) == {A}
    candidates[A] = record(4, epoch=4, time=later)
    assert choices(candidates, seen, step=5, now=later) == {B}


def test_newcomers_are_tried_with_a_bounded_share():
    rng, seen = random.Random(0), measured(a=1.0)
    candidates = {A: record(1)} | {peer: record(50) for peer in PEERS[10:40]}
    sent = []
    for _ in range(100):
        sent.append(choose(candidates, seen, now=NOW, rng=rng))
        seen.note_sent(sent[-1], NOW)
    assert 1 <= sum(peer != A for peer in sent) <= UNTRIED_SHARE * len(sent)
    for peer in PEERS:  # memory is bounded, however many peers there are
        seen.note_sent(peer, NOW)
    assert len(seen._seen) <= MOST_MEASURED


class StageOutcome(NamedTuple):
    rate: float
    """Microbatches per second."""
    waits: list[float]
    """Seconds at a peer, sorted."""
    shares: list[float]
    """For each peer: the part of its time in which it computed."""


def simulate(rates, *, drivers=8, in_flight=8, claims=(), dead=(), seconds=60.0, warm=10.0, patience=2.0, seed=0):
    """Drivers that each keep some microbatches in flight at the peers of a stage, which compute one after another.

    A peer accepts what it can do within ``patience`` seconds, and two at least. Records are as old as in a real swarm.
    """
    rng, events, order = random.Random(seed), [], itertools.count()
    latency, claimed = 0.03, dict(enumerate(rates)) | dict(claims)
    queues, free_at, done = [0] * len(rates), [0.0] * len(rates), [0] * len(rates)
    records, seen, waits = {}, [Measurements() for _ in range(drivers)], []

    def at(time, function, *values):
        heapq.heappush(events, (time, next(order), function, values))

    def room(peer):
        return max(2, round(patience * rates[peer])) - queues[peer]

    def publish(now, peer):
        new = record(claimed[peer], now, queue=queues[peer], room=max(0, room(peer)))
        at(now + rng.uniform(0, 5), lambda _: records.update({PEERS[peer]: new}))
        at(now + RENEWAL_SECONDS, publish, peer)

    def send(now, driver, excluded=()):
        chosen = choose(records, seen[driver], now=now, rng=rng, excluded=excluded)
        if chosen is None:  # all are busy
            return at(now + 0.1, send, driver)
        peer = PEERS.index(chosen)
        seen[driver].note_sent(chosen, now)
        if peer in dead:
            at(now + 5.0, fail, driver, chosen, now)
        elif room(peer) <= 0:
            seen[driver].take_back(chosen)
            at(now + 2 * latency, send, driver, (*excluded, chosen))
        else:
            queues[peer] += 1
            free_at[peer] = max(now + latency, free_at[peer]) + rng.uniform(0.8, 1.2) / rates[peer]
            at(free_at[peer], finish, driver, peer, now)

    def fail(now, driver, chosen, sent):
        seen[driver].note_failure(chosen, now - sent, now)
        send(now, driver, (chosen,))

    def finish(now, driver, peer, sent):
        queues[peer] -= 1
        if now > warm:
            done[peer] += 1
            waits.append(now - sent)
        at(now + latency, receive, driver, peer, sent)

    def receive(now, driver, peer, sent):
        seen[driver].note_done(PEERS[peer], now - sent, now)
        send(now, driver)

    for peer in range(len(rates)):
        records[PEERS[peer]] = record(claimed[peer], 0.0)
        at(rng.uniform(0, RENEWAL_SECONDS), publish, peer)
    for driver in range(drivers):
        for _ in range(in_flight):
            at(0.0, send, driver)
    while events[0][0] < seconds:
        time, _, function, values = heapq.heappop(events)
        function(time, *values)
    shares = [each / rate / (seconds - warm) for each, rate in zip(done, rates, strict=True)]
    return StageOutcome(sum(done) / (seconds - warm), sorted(waits), shares)


@pytest.mark.parametrize(
    ("rates", "how", "share"),
    [
        ([300] + [1] * 7, {"drivers": 32, "in_flight": 16}, 0.97),  # the fast one alone would do 0.977
        ([1, 3, 10, 30, 100, 300], {}, 0.95),
        ([1, 3, 10, 30, 100, 300], {"drivers": 32}, 0.98),
        ([10] * 8, {}, 0.98),
        ([10] * 8, {"claims": {0: 1e6}}, 0.98),
        ([10] * 8, {"dead": {0, 1}}, 0.98 * 6 / 8),
    ],
)
def test_a_stage_does_nearly_what_its_peers_can_do_and_none_is_swamped(rates, how, share):
    outcome = simulate(rates, **how)
    assert outcome.rate >= share * sum(rates)
    waits = outcome.waits
    assert waits[int(0.99 * len(waits))] < 2 * waits[len(waits) // 2]


def test_peers_that_are_alike_do_alike():
    shares = simulate([10] * 8).shares
    assert max(shares) - min(shares) < 0.05
