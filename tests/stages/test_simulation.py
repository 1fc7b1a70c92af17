"""Stages at scale, in virtual time: peers of different speed that come and die, and what else can happen to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.stages_simulation import SCENARIOS, STORIES, Figures, Scenario, simulate
from tests.drills import mostly_drills

SMALL = Scenario(steps=8, microbatches=24, stages=3, peers=4, drivers=2, in_flight=8, session=300.0)


def check(made: Figures, share_twice: float = 0.005, *, in_flight: int = 0) -> None:
    """Nothing hangs, nothing is lost, and hardly anything is computed twice, except what was in flight at a driver that
    died, or in both halves of a network."""
    assert made.out_of_step == 0
    assert made.dropped == 0
    assert made.longest_step < 3 * made.median_step + 60  # there may be no peer of a stage for a minute
    assert made.lost_per_death * made.deaths <= 2 * made.deaths + in_flight or not made.deaths
    assert made.counted_twice <= share_twice * made.microbatches * SMALL.stages


def test_same_seed_gives_the_same_run() -> None:
    scenario = replace(SMALL, steps=3, microbatches=12, session=30.0)
    first, second, other = (simulate("plain", scenario, seed) for seed in (1, 1, 2))
    assert first.trace == second.trace != other.trace
    assert first.deaths == second.deaths > 0
    assert first.microbatches >= scenario.steps * scenario.microbatches


@pytest.mark.parametrize(
    "story", mostly_drills(["lonely", "lost_driver", *sorted({*STORIES} - {"lonely", "lost_driver"})], quick=2)
)
def test_swarms_outlive_what_happens_to_them(story: str) -> None:
    in_flight = SMALL.in_flight if story in ("cut", "lost_driver") else 0
    # In a network that is cut in two, both halves compute what they have.
    check(simulate(story, replace(SMALL, story=story)), 0.05 if story == "cut" else 0.005, in_flight=in_flight)


@pytest.mark.parametrize("spread", mostly_drills([30.0, 300.0]))
def test_nobody_waits_for_slow_peers_in_long_steps(spread: float) -> None:
    made = simulate("stable", replace(SMALL, spread=spread, steps=1, microbatches=192, session=1e9))
    check(made, 0.02)
    assert spread > 30.0 or not made.repaired  # a peer that is much slower than usual is given up
    assert made.share > 0.6


@pytest.mark.slow_drill
def test_many_steps_of_many_stages() -> None:
    check(simulate("plain", replace(SCENARIOS["plain"], steps=100, peers=2, microbatches=8, in_flight=2)))


@pytest.mark.slow_drill
def test_many_peers_share_long_steps() -> None:
    made = simulate("plain", replace(SCENARIOS["plain"], steps=2, microbatches=1024))
    check(made)
    assert made.share > 0.6
