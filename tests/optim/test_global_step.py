"""What a global step decides, as pure functions: when its rounds begin, and what follows from one that failed."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
import torch

from shoal.errors import AveragingError, MatchmakingException
from shoal.optim import Optimizer
from shoal.optim.global_step import averages_parameters, time_of_round, tries_again
from shoal.optim.options import Mode, Options, with_defaults


def options(**given: Any) -> Options:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    required = {"optimizer": torch.optim.SGD, "params": parameters, "run_id": "run", "target_batch_size": 8}
    return Options.resolve(**with_defaults(Optimizer, {**required, **given}))


@pytest.mark.parametrize(
    ("due", "begins"),
    [
        (105.0, 115.0),  # the others have 10 s after the end of the epoch
        (90.0, 110.0),  # it is over: they have 10 s from now on
        (190.0, 154.0),  # the group must begin before the round's 60 s are up
    ],
)
def test_a_round_waits_for_stragglers(due, begins):
    when = time_of_round(due, 100.0, options(matchmaking_time=10.0, averaging_timeout=60.0))
    assert when == {"scheduled_time": begins, "timeout": 60.0}


def test_parameters_are_averaged_every_few_epochs():
    assert [averages_parameters(epoch, options(average_state_every=3)) for epoch in range(1, 7)] == [
        False,
        False,
        True,
    ] * 2


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (None, True),
        (MatchmakingException("nobody came"), True),
        (AveragingError("a member failed"), True),
        (TimeoutError(), True),
        (concurrent.futures.CancelledError(), True),
        (ValueError("another round would end alike"), False),
    ],
)
def test_a_failed_round_is_tried_again_in_company(error, again):
    assert tries_again(error, keeps_gradients=True, others_can_come=True) is again
    assert not tries_again(error, keeps_gradients=True, others_can_come=False)
    assert not tries_again(error, keeps_gradients=False, others_can_come=True)


@pytest.mark.parametrize(
    ("switches", "mode"),
    [
        ({"delay_state_averaging": False}, Mode.SYNC),
        ({}, Mode.DELAY_STATE),
        ({"delay_optimizer_step": True, "delay_state_averaging": False}, Mode.DELAY_STEP),
        ({"delay_grad_averaging": True}, Mode.DELAY_ALL),
        ({"use_local_updates": True, "delay_state_averaging": False}, Mode.LOCAL),
        ({"grad_averager": None}, Mode.LOCAL_DELAY_STATE),
    ],
)
def test_inherited_switches_become_one_mode(switches, mode):
    found = options(**switches)
    assert found.mode is mode
    assert found.mode.overlaps is (mode in (Mode.DELAY_ALL, Mode.LOCAL_DELAY_STATE))
    assert found.use_local_updates is not mode.averages_gradients
