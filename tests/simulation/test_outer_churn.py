"""Runs of DiLoCo whose peers come and go stay one run, with the same bits; ``outer_churn.py`` tries more seeds."""

from __future__ import annotations

import pytest

from tests.drills import mostly_drills
from tests.simulation.outer_churn import SIZE, Churn

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("kind", mostly_drills(["open", "plain", "delayed"]))
def test_peers_that_come_and_go_stay_one_run(kind):
    churn = Churn(kind, 2 if kind == "delayed" else 1, seconds=45.0, peace=45.0)
    assert len(churn.peers) > SIZE, "some came"
    assert max(version for _, version in churn.links) > 10, "the run went on"


def test_the_same_seed_gives_the_same_run():
    first, second = (Churn("delayed", 3, seconds=10.0, peace=15.0) for _ in range(2))
    assert first.events == second.events
    assert [peer.log for peer in first.peers] == [peer.log for peer in second.peers]
