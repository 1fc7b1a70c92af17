"""Honest peers of any speed train together, and no rule against liars touches them."""

from __future__ import annotations

import functools
import statistics

import pytest

from tests.drills import mostly_drills
from tests.simulation.uneven import SLOW, Outcome, live_through_bursts, sizes_of_steps, train
from tests.simulation.uneven_facades import MATCHMAKING_SECONDS, MakeOptimizer, Program, low_communication, synchronous
from tests.simulation.uneven_facades import train as train_programs

SEEDS = 3


@functools.cache
def outcomes(peers: int, ratio: int, epoch_seconds: float, fast_is: str, seeds: int = SEEDS) -> list[Outcome]:
    slow, fast = [SLOW] * (peers - 1), [SLOW * ratio]
    speeds = fast + slow if fast_is == "first" else slow + fast
    return [train(speeds, epoch_seconds, seed) for seed in range(seeds)]


PLACES = ("first", "last")
CASES = [(3, 100, 60.0, "first"), (5, 300, 2.0, "last")]
DRILLS = [(n, r, s, f) for n in (2, 3, 5, 8, 20) for r in (10, 30, 100, 300) for s in (2.0, 10.0, 60.0) for f in PLACES]


@pytest.mark.parametrize("case", mostly_drills(dict.fromkeys([*CASES, *DRILLS]), quick=len(CASES)), ids=str)
def test_one_fast_peer_costs_a_swarm_nothing(case: tuple[int, int, float, str]) -> None:
    peers, ratio, epoch_seconds, fast_is = case
    uneven = outcomes(peers, ratio, epoch_seconds, fast_is)
    equal = outcomes(peers, 1, epoch_seconds, "first")
    assert sum(outcome.alone for outcome in uneven) == 0, "others could be reached"
    assert max(outcome.spread for outcome in uneven) <= 1, "there is one line of epochs"
    assert [outcome.warnings for outcome in uneven] == [()] * SEEDS
    goodput, usual = (statistics.mean(outcome.goodput for outcome in each) for each in (uneven, equal))
    # A batch of the fast peer is a twelfth of an epoch, so three runs of a few epochs vary by some percent.
    assert goodput >= 0.97 * usual - (0.03 if epoch_seconds < 60 else 0.0)


@pytest.mark.parametrize("first", mostly_drills(range(0, 2000, 5)))
def test_honest_peers_whose_speed_changes_are_never_accused(first: int) -> None:
    """They join and leave in any order, and any of them becomes up to a hundred times faster or slower at any time."""
    for seed in range(first, first + 5):
        lives = live_through_bursts(seed)
        assert lives.warnings == (), seed
        assert lives.alone_in_company == 0, seed
        # The longest batch of another peer, the wait for those that do not come, and a round.
        assert lives.longest_step <= lives.longest_batch + lives.matchmaking_time + 1.0, seed


@pytest.mark.parametrize("peers", mostly_drills([2, 4], quick=1))
def test_a_step_has_the_samples_that_it_should_have_although_machines_are_busy(peers: int) -> None:
    """Batches take a millisecond, and now and then a machine does something else for a fifth of a second."""
    sizes = sizes_of_steps(peers, epoch_seconds=1.0, epochs=20, seed=1)
    assert len(sizes) >= 15
    assert 0.9 <= statistics.median(sizes) <= 1.1
    assert min(sizes) >= 0.8, "no step begins early because a peer was thought to be faster than it is"


@pytest.mark.parametrize("fast_is", mostly_drills(["first", "last"]))
@pytest.mark.parametrize("make", [synchronous, low_communication])
def test_real_optimizers_of_different_speeds_make_the_same_epochs(make: MakeOptimizer, fast_is: str) -> None:
    """Eight peers, one of them a hundred times as fast as each other one."""
    slow, fast = [Program(10, 20 / 12) for _ in range(7)], Program(1000, 20 / 12)
    programs = [fast, *slow] if fast_is == "first" else [*slow, fast]
    warnings = train_programs(
        programs, make, target=round(20 * sum(program.speed for program in programs)), seconds=160
    )
    assert warnings == ()
    assert [program.epoch for program in programs] == [programs[0].epoch] * 8
    assert programs[0].epoch >= 7, "of eight, if nothing is lost"
    assert max(program.longest_step for program in programs) < MATCHMAKING_SECONDS + 1


@pytest.mark.parametrize("joins_at", mostly_drills([14.0, 0.0]))
def test_a_fast_newcomer_is_welcome_at_once(joins_at: float) -> None:
    """A graphics card joins four processors. One of its batches is an epoch."""
    processors = [Program(8, 0.05) for _ in range(4)]
    card = Program(2048, 0.4, joins_at)
    assert train_programs([*processors, card], synchronous, target=2000, seconds=40) == ()
    assert {program.epoch for program in processors} == {card.epoch}
    assert card.epoch >= 15, "many epochs of less than two seconds"
    assert max(program.longest_step for program in (*processors, card)) < MATCHMAKING_SECONDS + 1


@pytest.mark.parametrize(("batch_seconds", "target"), [(1.5, 192), (3.0, 640)])
def test_a_slow_newcomer_is_waited_for_after_its_download(batch_seconds: float, target: int) -> None:
    """Its first batch takes longer than an epoch of the others."""
    quick, slow = [Program(8, 0.05) for _ in range(2)], Program(8, batch_seconds, joins_at=5.0)
    warnings = train_programs([*quick, slow], synchronous, target=target, seconds=40)
    assert warnings == (), "others wait longer than half a batch"
    assert slow.epoch == quick[0].epoch == quick[1].epoch
    epochs = [epoch for _, epoch in slow.epochs[2:]]
    assert epochs == list(range(epochs[0], epochs[0] + len(epochs))), "it is in each round, and downloads only once"
    assert len(epochs) >= 7
