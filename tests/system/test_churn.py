"""Averaging goes on while peers are killed and others come."""

from __future__ import annotations

import pytest

from tests.system import churn

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow_drill
def test_rounds_succeed_while_peers_are_killed_and_replaced() -> None:
    found = churn.run(peers=4, rounds=12, megabytes=2, kill_every=2.0, kills=3)
    assert found.killed == 3
    assert len(found.rounds) >= 24
    assert all(each["sound"] for each in found.rounds)
    assert found.success >= 0.9, [each for each in found.rounds if each["error"] or each["members"] < 2]
    assert all(threads <= 0 for threads, _ in found.left_over)
