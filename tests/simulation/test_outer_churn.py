"""Runs of DiLoCo whose peers come and go stay one run, with the same bits; ``outer_churn.py`` tries more seeds."""

from __future__ import annotations

import pytest

from tests.simulation.outer_churn import Churn


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "seed"), [("plain", 1), ("open", 1), ("4 bits", 2)], ids=["plain", "open", "4 bits"])
def test_peers_that_come_and_go_stay_one_run(kind, seed):
    churn = Churn(kind, seed)
    assert len(churn.peers) > 6, "some came"
    assert max(version for _, version in churn.links) > 10, "the run went on"


@pytest.mark.timeout(600)
def test_the_same_seed_gives_the_same_run():
    first, second = Churn("delayed", 3, seconds=20.0), Churn("delayed", 3, seconds=20.0)
    assert first.events == second.events
    assert [peer.log for peer in first.peers] == [peer.log for peer in second.peers]
