"""Real processes whose TCP connections are reset in the middle of rounds: they lose nothing but a moment."""

from __future__ import annotations

import pytest

from tests.system.swarm import Swarm

ROUNDS = 6

pytestmark = pytest.mark.timeout(300)


def test_reset_connection_loses_no_part() -> None:
    with Swarm("average_over_breaks.py", 3, "--rounds", ROUNDS) as swarm:
        for peer in swarm.peers:
            peer.wait_for("done", 200)
        for number in range(1, ROUNDS + 1):
            found = [peer.wait_for("round", 0, lambda e, n=number: e["round"] == n) for peer in swarm.peers]
            assert [each["share"] for each in found] == [1.0] * 3
            assert [each["failed"] for each in found] == [0] * 3
            assert len({each["digest"] for each in found}) == 1
        assert any(event["broke"] for peer in swarm.peers for event in peer.all("broke"))
        assert sum(peer.all("round")[-1]["resumed"] for peer in swarm.peers) >= 2
