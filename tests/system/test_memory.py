"""The memory of a peer does not grow with the number of rounds."""

from __future__ import annotations

import sys

import pytest

from tests.system.swarm import Swarm

ALLOWED_GROWTH = 1.05
ALLOWED_GROWTH_OF_ROUNDS = 1.1
"""A peak rises when more messages than ever are under way at once. A leak of a megabyte per round would be more."""

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs getrusage"),
    pytest.mark.timeout(500),
]


@pytest.mark.slow_drill
def test_peak_memory_does_not_grow_with_rounds() -> None:
    with Swarm("average.py", 2, "--rounds", 50) as swarm:
        for peer in swarm.peers:
            peer.wait_for("done", 220)
            early, late = (peer.wait_for("round", 0, lambda e, n=n: e["round"] == n)["peak"] for n in (10, 50))
            assert late <= early * ALLOWED_GROWTH_OF_ROUNDS, f"{late / early:.3f} times as much"


@pytest.mark.slow_drill
def test_peak_memory_does_not_grow_with_epochs() -> None:
    options = ["--epochs", 50, "--target-batch-size", 64, "--matchmaking-time", 1]
    with Swarm("train.py", 2, *options) as swarm:
        for peer in swarm.peers:
            peer.wait_for("left", 220)
            assert len([event for event in peer.all("epoch") if len(event["group"]) == 2]) > 10, (
                "hardly any common round"
            )
            early, late = (peer.wait_for("epoch", 0, lambda e, n=n: e["epoch"] >= n)["peak"] for n in (10, 50))
            assert late <= early * ALLOWED_GROWTH, f"{late / early:.3f} times as much"
