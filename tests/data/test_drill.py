"""A pass of real processes of which one is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.drill import pass_over

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("systems")]


@pytest.mark.timeout(300)
@pytest.mark.slow_drill
def test_everything_is_seen_though_a_process_is_killed(tmp_path: Path) -> None:
    def once_others_work(_: float, deaths: int) -> bool:
        return deaths == 0 and sum(file.stat().st_size > 0 for file in tmp_path.iterdir()) == 3

    outcome = pass_over(tmp_path, processes=3, samples=1200, chunk=16, seconds=0.02, may_kill=once_others_work)
    assert outcome.deaths == 1
    assert set(outcome.seen) == set(range(1200))
    # What the killed one was at, and what it had done since it last said so, on a machine of any speed.
    assert outcome.seen.total() <= 1200 + 600
