"""What the guard of an open run adds: limits to what members can claim, by what they have brought."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from shoal.guard.open import Contributions, OpenGuard, earliest_end, most_of
from shoal.optim.progress.records import Companion, LocalTrainingProgress

NOW, TRAINING = 1000.0, 10.0
OWN, FRIEND, FAST, LIAR, STRANGER = b"own", b"friend", b"fast", b"liar", b"stranger"


def record(peer: bytes, epoch: int = 3, samples: int = 0, speed: float = 0.0) -> LocalTrainingProgress:
    return LocalTrainingProgress(peer, epoch, samples, speed, NOW, False)


def companion(peer: bytes, epoch: int) -> Companion:
    return Companion(record(peer, epoch), NOW + 10_000, heard_at=NOW)


def veteran(**brought: float) -> OpenGuard:
    """A peer after a round in which it brought 100 samples."""
    guard = OpenGuard(OWN, bytes, NOW - TRAINING)
    guard.begin_to_wait([], NOW, 5.0)
    samples = {OWN: 100.0, **{peer.encode(): each for peer, each in brought.items()}}
    guard.note_round(samples, NOW)
    guard.note_weights(samples)
    guard.note_epoch(NOW, is_next=True)
    return guard


def test_a_peer_may_bring_four_times_what_it_or_most_brought() -> None:
    assert most_of(0.0, 100.0) == 400.0
    assert most_of(300.0, 100.0) == 1200.0


@pytest.mark.parametrize("times", [1, 10, 100, 300, 1000])
def test_a_fast_peer_counts_in_full_from_its_fifth_round(times: int) -> None:
    brought, counted = Contributions(), 0.0
    brought.note({OWN: 100.0, FRIEND: 100.0})
    for _ in range(5):
        counted = min(100.0 * times, brought.most(FAST))
        brought.note({OWN: 100.0, FRIEND: 100.0, FAST: counted})
    assert counted == 100.0 * times


def test_a_billion_in_the_first_round_is_forgotten_in_the_next() -> None:
    assert veteran(friend=100.0, liar=2.0**53).largest_weight(LIAR) == 1600.0
    assert veteran(liar=2.0**53).largest_weight(LIAR) == 1600.0, "there is no third member"


def test_a_peer_that_brings_less_once_may_bring_more_again() -> None:
    brought = Contributions()
    brought.note({OWN: 1.0, FAST: 4.0, FRIEND: 1.0})
    brought.note({OWN: 1.0, FAST: 0.0, FRIEND: 1.0})
    assert brought.most(FAST) == 8.0


def test_a_round_without_finite_gradients_says_nothing() -> None:
    brought = Contributions()
    brought.note({OWN: 0.0, FRIEND: 0.0})
    assert brought.most(FRIEND) == math.inf


def test_claims_are_cut_and_nobody_is_accused(caplog: pytest.LogCaptureFixture) -> None:
    guard = veteran(friend=100.0)
    with caplog.at_level(logging.INFO):
        [cut] = guard.limited([record(STRANGER, samples=10**9, speed=1e9)], NOW + 1)
    assert (cut.samples_accumulated, cut.samples_per_second) == (400, 400 / TRAINING)
    claim = record(FRIEND, samples=399, speed=39.0)
    assert guard.limited([claim], NOW + 1) == [claim]
    assert not caplog.records


def test_before_its_first_round_a_peer_believes_everything() -> None:
    guard, claim = OpenGuard(OWN, bytes, NOW), record(FRIEND, samples=10**9, speed=1e9)
    assert guard.limited([claim], NOW) == [claim]
    assert guard.largest_weight(FRIEND) == math.inf


def test_a_peer_limits_nothing_of_its_own() -> None:
    assert veteran(friend=1.0).largest_weight(OWN) == math.inf


def test_an_epoch_lasts_half_of_its_time_at_least() -> None:
    assert earliest_end(NOW, NOW + 10) == NOW + 5
    assert earliest_end(NOW, math.inf) == math.inf
    guard, others = veteran(friend=100.0), {FRIEND: companion(FRIEND, 3)}
    assert guard.called_end(others, 3, NOW + 10, NOW) == math.inf, "nobody says so"
    others[FRIEND] = replace(others[FRIEND], end=NOW + 1)
    assert guard.called_end(others, 3, NOW + 10, NOW) == NOW + 5
    others[FRIEND] = replace(others[FRIEND], end=NOW + 7)
    assert guard.called_end(others, 3, NOW + 10, NOW) == NOW + 7


def test_a_member_at_the_next_epoch_ends_this_one_after_half_of_it() -> None:
    guard, others = veteran(friend=100.0), {FRIEND: companion(FRIEND, 4), FAST: companion(FAST, 3)}
    assert FRIEND not in guard.credible(others, 3, NOW + 4, lambda _: NOW + 10)
    assert FRIEND in guard.credible(others, 3, NOW + 6, lambda _: NOW + 10)
    ahead = {peer: companion(peer, 4) for peer in (FRIEND, FAST)}
    assert set(guard.credible(ahead, 3, NOW + 1, lambda _: NOW + 10)) == {FRIEND, FAST}, "most are there"


def test_by_default_the_code_of_open_runs_is_not_imported() -> None:
    program = (
        "import shoal, sys; from shoal.optim import Optimizer, DiLoCo; assert 'shoal.guard.open' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
