"""Learning rate schedules: handed over to newcomers, and brought to an epoch by steps or by a jump."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from shoal.base.serializer import MSGPackSerializer
from shoal.optim.setup import schedules
from shoal.optim.setup.optimizer_state import dump_optimizer_state, load_optimizer_state
from shoal.optim.setup.schedules import (
    catch_up,
    check_scheduler,
    dump_scheduler_state,
    load_scheduler_state,
    position_of,
    scheduled_hyperparameters,
)
from tests.optim.conftest import may_use_sequential_schedules


def make_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))]


SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: StepLR(o, 1, gamma=0.5),
    "multi": lambda o: MultiStepLR(o, [2, 5], gamma=0.1),
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "cosine": lambda o: CosineAnnealingLR(o, 20),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=50),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, total_iters=3), StepLR(o, 2)], milestones=[3]),
    "chained": lambda o: ChainedScheduler([LinearLR(o, total_iters=3), ExponentialLR(o, 0.9)]),
}


def learning_rates(scheduler, optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@may_use_sequential_schedules
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_joiner_continues_the_schedule(name):
    donor = torch.optim.SGD(make_parameters(), lr=0.1, momentum=0.9)
    joiner = torch.optim.SGD(make_parameters(), lr=0.1, momentum=0.9)
    donor_schedule, schedule = SCHEDULERS[name](donor), SCHEDULERS[name](joiner)
    catch_up(donor_schedule, 4)
    sent = MSGPackSerializer.loads(MSGPackSerializer.dumps(dump_scheduler_state(donor_schedule)))
    metadata, tensors = dump_optimizer_state(donor)
    load_optimizer_state(joiner, metadata, tensors, scheduled_hyperparameters(schedule))
    load_scheduler_state(schedule, sent)
    catch_up(schedule, 4)
    assert joiner.param_groups[0]["lr"] == donor.param_groups[0]["lr"]
    assert learning_rates(schedule, joiner, 6) == learning_rates(donor_schedule, donor, 6)


def test_catching_up_only_goes_forward():
    optimizer = torch.optim.SGD(make_parameters(), lr=1.0)
    schedule = SCHEDULERS["lambda"](optimizer)
    catch_up(schedule, 9)
    assert optimizer.param_groups[0]["lr"] == 0.1
    catch_up(schedule, 3)
    assert schedule.last_epoch == 9


def test_a_hostile_schedule_cannot_replace_methods_or_forms():
    optimizer = torch.optim.SGD(make_parameters(), lr=1.0)
    schedule = SCHEDULERS["step"](optimizer)
    hostile = {"step": 5, "optimizer": 1, "__class__": "x", "last_epoch": "many", "base_lrs": [1, 2, 3], "gamma": [1]}
    load_scheduler_state(schedule, hostile)
    load_scheduler_state(schedule, "nonsense")
    assert schedule.last_epoch == 0
    assert schedule.optimizer is optimizer
    schedule.optimizer._opt_called = True
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_schedules_that_need_a_metric_are_refused():
    with pytest.raises(ValueError, match="metric"):
        check_scheduler(ReduceLROnPlateau(torch.optim.SGD(make_parameters(), lr=1.0)))


class Halving(LRScheduler):
    """As users write them: the rate follows from the number of steps."""

    def get_lr(self):
        return [base * 0.5 ** (self.last_epoch // 10) for base in self.base_lrs]


JUMPERS = {
    **SCHEDULERS,
    "one_cycle": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=100),
    "constant": lambda o: ConstantLR(o, factor=0.3, total_iters=20),
    "polynomial": lambda o: PolynomialLR(o, total_iters=100, power=2.0),
    "cyclic": lambda o: CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=7, mode="exp_range", gamma=0.99),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=8, T_mult=2),
    "own": Halving,
    "restarts_after_warmup": lambda o: SequentialLR(
        o, [LinearLR(o, total_iters=5), CosineAnnealingWarmRestarts(o, T_0=11)], milestones=[5]
    ),
    "sequence_of_three": lambda o: SequentialLR(
        o, [LinearLR(o, total_iters=5), ExponentialLR(o, 0.99), Halving(o)], milestones=[5, 30]
    ),
}


@may_use_sequential_schedules
@pytest.mark.parametrize("epoch", [27, 60])
@pytest.mark.parametrize("name", JUMPERS)
def test_a_jump_ends_where_steps_would(monkeypatch, name, epoch):
    stepped = torch.optim.SGD([{"params": p} for p in make_parameters()], lr=0.1, momentum=0.9)
    jumped = torch.optim.SGD([{"params": p} for p in make_parameters()], lr=0.1, momentum=0.9)
    schedule, jumping = JUMPERS[name](stepped), JUMPERS[name](jumped)
    catch_up(schedule, epoch)
    catch_up(jumping, 3)
    monkeypatch.setattr(schedules, "MOST_STEPS", 10)
    catch_up(jumping, epoch)
    assert position_of(jumping) == position_of(schedule) == epoch

    def rates(optimizer):
        return [group["lr"] for group in optimizer.param_groups]

    assert rates(jumped) == pytest.approx(rates(stepped), rel=1e-9)
    assert jumping.get_last_lr() == rates(jumped)
    for _ in range(15):
        schedule.step()
        jumping.step()
        assert rates(jumped) == pytest.approx(rates(stepped), rel=1e-9)


@may_use_sequential_schedules
@pytest.mark.parametrize("name", [name for name in JUMPERS if name != "one_cycle"])
def test_nobody_can_make_a_schedule_step_for_long(name):
    optimizer = torch.optim.SGD(make_parameters(), lr=0.1, momentum=0.9)
    schedule, steps = JUMPERS[name](optimizer), 0
    for part in (schedule, *getattr(schedule, "_schedulers", ())):
        step = part.step

        def counted(*args, step=step):
            nonlocal steps
            steps += 1
            step(*args)

        part.step = counted
    catch_up(schedule, 10**9)
    assert position_of(schedule) == 10**9
    assert steps <= 10
    assert 0 <= optimizer.param_groups[0]["lr"] <= 1


@may_use_sequential_schedules
def test_a_jump_keeps_the_rate_before(monkeypatch):
    monkeypatch.setattr(schedules, "MOST_STEPS", 10)
    for make in (
        lambda o: MultiplicativeLR(o, lambda step: 0.9),
        lambda o: ChainedScheduler([CosineAnnealingLR(o, 20), MultiplicativeLR(o, lambda step: 0.9)]),
        lambda o: ExponentialLR(o, 10.0**30),  # beyond what a float can hold
    ):
        optimizer = torch.optim.SGD(make_parameters(), lr=0.1)
        schedule = make(optimizer)
        catch_up(schedule, 5)
        before = optimizer.param_groups[0]["lr"]
        catch_up(schedule, 1000)
        assert position_of(schedule) == 1000
        after = optimizer.param_groups[0]["lr"]
        assert after == pytest.approx(before * 10.0**30) or before * 0.5 < after < before * 1.5


def test_affordable_steps_are_made():
    optimizer = torch.optim.SGD(make_parameters(), lr=1.0)
    schedule = MultiplicativeLR(optimizer, lambda step: 0.999)
    catch_up(schedule, 5000)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.999**5000)


def test_a_finished_schedule_says_so():
    optimizer = torch.optim.SGD(make_parameters(), lr=1.0)
    schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=50)
    with pytest.raises(ValueError, match="50"):
        catch_up(schedule, 10**9)


def test_a_rate_that_is_a_tensor_stays_one():
    optimizer = torch.optim.Adam(make_parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    catch_up(StepLR(optimizer, 10**8, gamma=0.1), 10**8)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)
