"""Runs of DiLoCo whose peers come and go stay one run, with the same bits; ``outer_churn.py`` tries more seeds."""

from __future__ import annotations

import pytest

from tests.simulation.outer_churn import SIZE, Churn

pytestmark = pytest.mark.timeout(600)


def check(churn: Churn) -> None:
    assert len(churn.peers) > SIZE, "some came"
    assert max(version for _, version in churn.links) > 10, "the run went on"


def test_peers_that_come_and_go_stay_one_run():
    check(Churn("open", 1, seconds=20.0, peace=30.0))


@pytest.mark.slow_drill
@pytest.mark.parametrize(("kind", "seed"), [("plain", 1), ("delayed", 2), ("open", 1)])
def test_they_do_so_for_longer(kind, seed):
    check(Churn(kind, seed, seconds=45.0, peace=45.0))


@pytest.mark.slow_drill
def test_the_same_seed_gives_the_same_run():
    first, second = (Churn("delayed", 3, seconds=10.0, peace=15.0) for _ in range(2))
    assert first.events == second.events
    assert first.links == second.links
