"""DiLoCo with peers whose processes share a model, with real processes that meet over gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.device import on_cpu_only
from tests.optim.diloco import sharded
from tests.processes import run_in_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("groups"),
    pytest.mark.timeout(300),
    on_cpu_only,  # gloo takes no tensors of a device that it does not know
]


@pytest.mark.parametrize("scenario", [sharded.equivalence, sharded.latecomer, sharded.checkpoint])
def test_two_peers_of_two_processes(scenario: Callable[[], None]) -> None:
    run_in_group(scenario, 4)


def test_a_peer_goes_on_without_one_whose_process_died() -> None:
    run_in_group(sharded.a_process_dies, 4, {3: -9})


def test_a_peer_goes_on_without_one_whose_first_process_died() -> None:
    run_in_group(sharded.a_first_process_dies, 4, {2: -9})


def test_peers_of_other_numbers_of_processes_are_told() -> None:
    run_in_group(sharded.other_numbers_of_processes, 3)


def test_wrong_use() -> None:
    run_in_group(sharded.wrong_use, 2)
