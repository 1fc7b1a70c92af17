"""Peers that are several processes, with real processes that meet over gloo."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest
import torch

from shoal.optim.ranks.multi_process import MultiProcessOptimizer
from tests.device import on_cpu_only
from tests.drills import mostly_drills
from tests.optim import ranks
from tests.processes import run_in_group

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("groups"), pytest.mark.timeout(300)]


@on_cpu_only  # gloo takes no tensors of a device that it does not know
@pytest.mark.parametrize(
    "scenario", mostly_drills([ranks.equivalence, ranks.download, ranks.under_ddp, ranks.background])
)
def test_two_processes_train_with_a_single_one(scenario: Callable[[], None]) -> None:
    run_in_group(scenario, 3)


@pytest.mark.slow_drill
def test_several_groups_at_once() -> None:
    run_in_group(ranks.several_groups, 4)


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.parametrize(("scenario", "victim"), [(ranks.another_process_dies, 1), (ranks.first_process_dies, 0)])
def test_a_process_that_dies_is_noticed_at_once(scenario: Callable[[], None], victim: int) -> None:
    run_in_group(scenario, 2, ends={victim: -signal.SIGKILL})


@pytest.mark.parametrize(
    "scenario", mostly_drills([ranks.first_process_fails, ranks.another_process_fails, ranks.wrong_use], quick=2)
)
def test_errors_reach_all_processes(scenario: Callable[[], None]) -> None:
    run_in_group(scenario, 2)


def test_without_a_process_group() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="init_process_group"):
        MultiProcessOptimizer(dht=None, optimizer=optimizer, run_id="run", target_batch_size=8)
