"""Training with DiLoCo goes on while peers are killed and others come, and all end with the same bits."""

from __future__ import annotations

import pytest

from tests.system import outer_churn

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow_drill
def test_models_stay_equal_while_peers_are_killed() -> None:
    churn = outer_churn.run(peers=3, seconds=9, kill_every=3, pause=0.02)
    assert len(churn.victims) == 3
    assert churn.agreed is not None
    assert not churn.problems(), churn.log
