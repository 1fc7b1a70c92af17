"""Peers with DiLoCo that are several processes, with real processes that meet over gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.device import on_cpu_only
from tests.drills import mostly_drills
from tests.optim.diloco import ranks
from tests.processes import run_in_group

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("groups"), pytest.mark.timeout(300)]


@on_cpu_only  # gloo takes no tensors of a device that it does not know
@pytest.mark.parametrize("scenario", mostly_drills([ranks.equivalence, ranks.a_newcomer, ranks.scaled]))
def test_peers_of_two_and_one_processes(scenario: Callable[[], None]) -> None:
    run_in_group(scenario, 3)


def test_wrong_use() -> None:
    run_in_group(ranks.wrong_use, 2)
