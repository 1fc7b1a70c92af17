"""Training goes on while peers are killed and others come."""

from __future__ import annotations

import pytest

from tests.system import training_churn

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow_drill
def test_training_continues_while_peers_are_killed() -> None:
    churn = training_churn.run(peers=3, seconds=12, kill_every=3, pause=0.04)
    assert churn.killed == 4
    assert churn.last_epoch >= training_churn.LEAST_EPOCHS
    assert not churn.problems(), churn.log
