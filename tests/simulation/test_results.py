"""Whatever breaks in a round: a result says whose values are in the averages, and nothing is counted twice or lost."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.cutting import KINDS, check

SEEDS = 4


@pytest.mark.parametrize("with_deaths", [False, True], ids=["nobody dies", "some die"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_what_they_say(kind: str, with_deaths: bool) -> None:
    """``python -m tests.simulation.cutting`` tries more seeds."""
    ways: Counter[str] = Counter()
    for seed in range(SEEDS):
        ways += check(kind, seed, with_deaths=with_deaths)
    assert ways["content"] + ways["with losses"] > 0


def test_a_member_out_of_reach_of_a_reducer_that_is_lost_itself() -> None:
    """The reducer does not get to tell the coordinator whom it has left out, but has told it with its averages."""
    assert check("many calls", 14)["with losses"] == 3
