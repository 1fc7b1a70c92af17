"""Optimizer from end to end: alone, in company, joining, losing others, leaving."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from shoal.averaging import AveragingStage, StepControl
from shoal.dht import DHT
from shoal.optim import Optimizer, joint_optimizer
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.joint_optimizer import let_go
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress_tracker import ProgressTracker
from shoal.optim.recovery import when
from shoal.optim.recovery.when import Synchronization
from shoal.p2p import PeerID
from shoal.testing import Host, Network, run
from tests.device import chosen_device
from tests.drills import mostly_drills
from tests.optim.conftest import (
    PATIENCE,
    Trainer,
    backward,
    check_identical,
    in_parallel,
    make_model,
    may_use_sequential_schedules,
    meet,
    over_sockets,
    sgd,
    values,
    wait_until,
)
from tests.simulation.facades import facades_in_virtual_time, in_virtual_thread, pause

IN_BACKGROUND = {"offload": True, "delay_grad_averaging": True}


def test_a_peer_alone_trains_as_torch_does(make_trainers):
    (trainer,) = make_trainers(1, target=32)
    reference = make_model()
    optimizer, rng = sgd(reference.parameters()), torch.Generator().manual_seed(0)
    for _ in range(12):
        trainer.step()
    assert trainer.opt.local_epoch == 3
    for _ in range(3):
        optimizer.zero_grad()
        backward(reference, torch.cat([torch.randn(8, 6, generator=rng) for _ in range(4)]))
        optimizer.step()
    torch.testing.assert_close(values(trainer.model), values(reference))
    assert trainer.opt.tracker.global_epoch == 3
    assert trainer.opt.grad_averager.local_samples_accumulated == 0
    assert trainer.opt.is_synchronized_with_peers()


@pytest.mark.parametrize(("count", "seconds", "is_told"), [(2, 41.0, True), (2, 19.0, False), (1, 41.0, False)])
def test_batches_too_long_for_full_groups_are_told(make_trainers, monkeypatch, caplog, count, seconds, is_told):
    """Else the groups are small for no reason that the user could see. All wait for ten seconds here."""
    trainers = make_trainers(count, target=16 * count)
    monkeypatch.setattr(ProgressBoard, "batch_time", seconds)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(2) for t in trainers))
    lines = [each.getMessage() for each in caplog.records if "smaller batches" in each.getMessage()]
    assert len(lines) == count * is_told, "once"
    assert all("41.0 s, and others wait 10.0 s" in line and "matchmaking_time=21 or more" in line for line in lines)


def test_speed_is_measured_and_epochs_take_their_time():
    """In virtual time, so that the figures are exact. Nothing before the first batch is part of the speed."""

    def live(host: Host) -> list[tuple[int, float, float]]:
        with DHT(start=True, transport=host.transport(), rng=host.rng, name="") as dht:
            model = make_model()
            options = {"matchmaking_time": 10.0, "averaging_timeout": 20.0, "delay_state_averaging": False}
            with Optimizer(
                dht=dht, run_id="run", target_batch_size=320, optimizer=sgd(model.parameters()), **options
            ) as opt:
                pause(30.0)  # such as to load the data
                seen = []
                while opt.local_epoch < 3:
                    pause(0.2)
                    opt.zero_grad()
                    backward(model, torch.randn(8, 6))
                    opt.step(batch_size=8)
                    seen.append((opt.local_epoch, opt.tracker.performance_ema.samples_per_second, time.monotonic()))
                return seen

    async def main() -> list[tuple[int, float, float]]:
        host = Network().add_host()
        with facades_in_virtual_time():
            return await host.run(in_virtual_thread(lambda: live(host)))

    seen = run(main(), seed=0)
    assert len(seen) == 120, "forty batches in each epoch"
    assert [speed for _, speed, _ in seen[1:]] == pytest.approx([40.0] * 119)
    begins = [next(at for epoch, _, at in seen if epoch == number) for number in (1, 2, 3)]
    assert [after - before for before, after in itertools.pairwise(begins)] == pytest.approx([8.0] * 2, abs=0.01)


@pytest.mark.devices
@pytest.mark.pretend
@over_sockets
@pytest.mark.parametrize(
    "options",
    mostly_drills(
        [
            {"delay_state_averaging": False},
            {"offload": True, "delay_optimizer_step": True, "delay_grad_averaging": True},
            {"average_opt_statistics": ["momentum_buffer"], "average_state_every": 2},
            {"reuse_grad_buffers": True, "delay_state_averaging": False},
            {"delay_state_averaging": True},
            {"offload": True},
            {"offload": True, "delay_optimizer_step": True},
            {"average_state_every": 2},
            {"average_opt_statistics": ["momentum_buffer"]},
        ],
        quick=4,
    ),
    ids=lambda options: ",".join(name for name, value in options.items() if value) or "synchronous",
)
def test_peers_stay_identical(make_trainers, options):
    trainers = make_trainers(3, **options)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
    check_identical(trainers)
    assert not torch.equal(values(trainers[0].model), values(make_model()))
    for trainer in trainers:
        assert len(trainer.opt.grad_averager.last_round.peers) == 3


def test_a_peer_that_missed_a_round_downloads(make_trainers, caplog):
    """In short epochs there is no time to ask others; what they have told is enough."""
    ahead, late = make_trainers(2, delay_state_averaging=False)
    late.opt.tracker.exchange.on_fetch = lambda: None
    meet(ahead, late)
    in_parallel(lambda: ahead.train_until(2), lambda: late.train_until(2))
    with late.opt.tracker.pause_updates():
        late.opt.state_averager.local_epoch = 1
        late.opt.tracker.update_epoch(1, members=[ahead.opt.dht.peer_id])
    with torch.no_grad():
        late.model[0].weight.zero_()
    wait_until(lambda: late.opt.tracker.global_epoch == 2, "half of the epoch is over")
    late.step()
    assert late.opt.local_epoch == 2
    check_identical([ahead, late])
    assert "local gradients" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"offload": True, "delay_optimizer_step": True, "delay_grad_averaging": True},
        {"use_local_updates": True, "delay_state_averaging": True},
    ],
    ids=["gradients", "parameters"],
)
def test_overlapping_peers_that_fall_behind_catch_up(make_trainers, options, caplog):
    """Else it would begin each round when the others have just made it."""
    trainers = make_trainers(3, **options)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
    late = trainers[2].opt
    with late.tracker.pause_updates():
        late.state_averager.local_epoch = 2
        late.tracker.update_epoch(2, members=[trainer.opt.dht.peer_id for trainer in trainers[:2]])
    in_parallel(*(lambda t=t: t.train_until(7, pace=0.1) for t in trainers))
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
        assert trainer.opt.local_epoch == 7
        assert len(trainer.opt.state_averager.last_round.peers) == 3
    assert not [r.getMessage() for r in caplog.records if r.name.startswith("shoal.optim") and r.levelname == "WARNING"]


def test_peers_of_different_speed_make_their_steps_together(make_trainers):
    trainers = make_trainers(3, target=200)
    meet(*trainers)
    in_parallel(
        *(lambda t=t, pace=pace: t.train_until(5, pace) for t, pace in zip(trainers, (0.002, 0.01, 0.03), strict=True))
    )
    check_identical(trainers)
    fast, medium, slow = trainers
    assert fast.samples > medium.samples > slow.samples


@over_sockets
def test_a_client_takes_part(make_trainers):
    trainers = make_trainers(3, clients=1)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
    check_identical(trainers)
    assert trainers[2].opt.client_mode


def test_an_auxiliary_peer_helps_without_batches(make_trainers, make_dhts, closing):
    trainers = make_trainers(2)
    (dht,) = make_dhts(1)
    options = {"matchmaking_time": 10.0, "averaging_timeout": 20.0, "auxiliary": True}
    model = make_model()
    helper = closing(
        Optimizer(dht=dht, run_id="run", target_batch_size=64, optimizer=sgd(model.parameters()), **options)
    )
    before = values(model)
    meet(*trainers)
    stop = threading.Event()

    def help_others() -> None:
        while not stop.wait(0.005):
            helper.step()

    thread = threading.Thread(target=help_others)
    thread.start()
    try:
        in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
    finally:
        stop.set()
        thread.join()
    check_identical(trainers)
    assert torch.equal(values(model), before), "its own parameters are left alone"


def test_local_updates_are_averaged_between_epochs(make_trainers):
    trainers = make_trainers(2, use_local_updates=True, delay_state_averaging=False)
    meet(*trainers)
    assert not torch.equal(values(trainers[0].model), values(trainers[1].model)), "every batch makes a step"
    in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
    check_identical(trainers)


def test_local_updates_go_on_while_parameters_are_averaged(make_trainers):
    options = {"use_local_updates": True, "optimizer": lambda p: torch.optim.SGD(p, lr=0.001)}
    trainers = make_trainers(2, seeds=[0, 1], delay_state_averaging=True, **options)
    assert (values(trainers[0].model) - values(trainers[1].model)).abs().max() > 0.3
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(4) for t in trainers))
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
        assert len(trainer.opt.state_averager.last_round.peers) == 2
    difference = (values(trainers[0].model) - values(trainers[1].model)).abs().max()
    assert difference < 0.05, "only the latest local steps differ"


SCHEDULES = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.9),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)],
        milestones=[2],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def learning_rates(schedule: Callable, epochs: int) -> list[float]:
    """What one process has before its first step, before its second, ..."""
    optimizer, found = sgd([torch.nn.Parameter(torch.zeros(1))]), []
    scheduler = schedule(optimizer)
    for _ in range(epochs + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def make_steps(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        trainer.step()


@may_use_sequential_schedules
@pytest.mark.parametrize(
    ("name", "asks", "offload"),
    [
        ("steps", True, False),
        ("steps", False, True),
        ("sequential", True, True),
        ("sequential", False, False),
        ("chained", True, False),
        ("chained", False, True),
    ],
)  # every two values together
def test_a_newcomer_downloads_before_it_counts(make_trainers, name, asks, offload):
    options = {"scheduler": SCHEDULES[name], "offload": offload}
    expected = learning_rates(SCHEDULES[name], 8)
    (first,) = make_trainers(1, **options)
    first.train_until(3)
    wait_until(lambda: first.opt.tracker.board.published, "its record can be found")
    (newcomer,) = make_trainers(1, seeds=[5], **options)
    accumulator = newcomer.opt.grad_averager.accumulator
    count, accumulator.add = accumulator.add, Mock(side_effect=StopIteration("a sample is about to be counted"))
    if asks:
        assert newcomer.opt.load_state_from_peers() is True
    with pytest.raises(StopIteration):
        make_steps(newcomer, 100)
    accumulator.add = count
    assert newcomer.opt.local_epoch == 3
    assert newcomer.opt.opt.param_groups[0]["lr"] == pytest.approx(expected[3])
    assert torch.equal(values(newcomer.model), values(first.model))
    for mine, others in zip(newcomer.opt.opt.state.values(), first.opt.opt.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], others["momentum_buffer"])
    meet(first, newcomer)
    in_parallel(lambda: first.train_until(6), lambda: newcomer.train_until(6))
    check_identical([first, newcomer])
    for trainer in (first, newcomer):
        assert trainer.opt.opt.param_groups[0]["lr"] == pytest.approx(expected[trainer.opt.local_epoch])


def test_a_silent_newcomer_is_brought_up_to_date(make_trainers):
    (first,) = make_trainers(1)
    first.train_until(4)
    (newcomer,) = make_trainers(1, seeds=[5])
    pause = threading.Event()
    while newcomer.opt.local_epoch == 0 and not pause.wait(0.01):
        newcomer.step()
    assert newcomer.opt.local_epoch == first.opt.local_epoch
    check_identical([first, newcomer])
    assert newcomer.opt.grad_averager.local_samples_accumulated == 0


def test_late_news_of_the_swarm_stops_a_step(make_trainers, monkeypatch):
    first, newcomer = make_trainers(2, seeds=[0, 5])
    tracker, report = newcomer.opt.tracker, newcomer.opt.tracker.report_local_progress
    wait_until(tracker.fetched_global_progress_this_epoch.is_set, "the newcomer has looked around and found nobody")

    def report_while_others_train(*args):
        first.train_until(3)
        wait_until(lambda: first.opt.tracker.board.published, "others can find it")
        report(*args)
        wait_until(lambda: tracker.is_introduced, "the newcomer has told everybody")

    monkeypatch.setattr(tracker, "report_local_progress", report_while_others_train)
    newcomer.step()
    assert newcomer.opt.local_epoch == first.opt.local_epoch
    check_identical([first, newcomer])


def test_a_newcomer_joins_an_overlapping_round(make_trainers):
    """At the donor's epoch it would be a round ahead of the donor, which would wait for it meanwhile."""
    options = {"offload": True, "delay_optimizer_step": True, "delay_grad_averaging": True}
    (first,) = make_trainers(1, **options)
    first.train_until(4)
    state = first.opt.state_averager
    state.finish_jobs(10)
    state._local_epoch += 1  # as while a step is made in the background
    with first.opt.tracker.pause_updates():
        first.opt.tracker.update_epoch(5)
    (newcomer,) = make_trainers(1, seeds=[5], **options)
    wait_until(lambda: newcomer.opt.tracker.global_epoch == 5, "the newcomer knows the swarm's epoch")
    newcomer.step()
    assert (newcomer.opt.local_epoch, first.opt.local_epoch) == (4, 5)
    check_identical([first, newcomer])
    newcomer.step()
    joins = newcomer.opt.local_epoch == 5  # others may know already that it takes part
    assert joins or newcomer.opt.grad_averager.local_samples_accumulated == 8, "it goes on, and downloads nothing more"


def test_useless_downloads_become_rare_and_are_told(make_trainers, caplog):
    """A user may download the state as often as needed, such as before each evaluation."""
    (first,) = make_trainers(1)
    first.train_until(2)
    (other,) = make_trainers(1, seeds=[5])
    keeping_up = other.opt._synchronization
    keeping_up.retries = when.Retries(threading.Event(), lambda: 0.0)
    for _ in range(when.QUICK_RETRIES + 1):
        assert other.opt.load_state_from_peers()
    assert keeping_up.retries.is_time(), "its step may download at once"
    assert "times in a row" not in caplog.text
    wait_until(lambda: other.opt.tracker.global_epoch == 2, "it knows how far the swarm is")
    for _ in range(when.QUICK_RETRIES + 1):
        other.opt.state_averager.local_epoch = 0
        other.step()
        assert other.opt.local_epoch == 2
    assert caplog.text.count("has downloaded the state 3 times in a row without a step with others") == 1
    assert not keeping_up.retries.is_time(), "the next one has to wait"


def test_without_a_donor_the_own_state_stays(make_trainers):
    (trainer,) = make_trainers(1)
    assert trainer.opt.load_state_from_peers(timeout=5) is False
    trainer.train_until(1)
    assert trainer.opt.local_epoch == 1


@pytest.mark.parametrize("reuse_grad_buffers", [False, True])
def test_batches_from_behind_are_dropped(make_trainers, monkeypatch, reuse_grad_buffers):
    """Nobody gave it the state, and those who were ahead are gone: it goes on by itself."""
    (trainer,) = make_trainers(1, grad_averager=GradientAverager, reuse_grad_buffers=reuse_grad_buffers)
    with monkeypatch.context() as behind:
        behind.setattr(Synchronization, "is_needed", lambda _: True)
        for _ in range(2):
            trainer.step()
    trainer.samples = 0
    trainer.train_until(1)
    reference = local_reference(trainer, [8] * (2 + trainer.samples // 8), seed=0, left_out=2)
    torch.testing.assert_close(values(trainer.model), reference)


@over_sockets
def test_records_of_dead_peers_hold_up_nobody(make_trainers):
    (first,) = make_trainers(1)
    first.train_until(5)
    wait_until(lambda: first.opt.tracker.board.published, "its record is there")
    (newcomer,) = make_trainers(1)
    first.opt.dht.portal.call(first.opt.dht.p2p.shutdown())  # as if killed: the record stays for a minute
    started = time.monotonic()
    newcomer.train_until(1)
    assert time.monotonic() - started < 20
    assert newcomer.opt.local_epoch == 1


def expect_company(trainer: Trainer, companion: ProgressTracker) -> None:
    companion.report_local_progress(0, 1)
    trainer.step()
    tracker = trainer.opt.tracker
    wait_until(lambda: tracker.expected_group_size == 2 and tracker.is_introduced, "the peers know each other")


def local_reference(trainer: Trainer, batch_sizes: list[int], seed: int, left_out: int = 0) -> torch.Tensor:
    model = make_model()
    optimizer, rng = sgd(model.parameters()), torch.Generator().manual_seed(seed)
    backward(model, torch.cat([torch.randn(size, 6, generator=rng) for size in batch_sizes][left_out:]))
    optimizer.step()
    return values(model)


def test_without_a_group_a_peer_finally_steps_alone(make_trainers, make_dhts, closing, caplog):
    (trainer,) = make_trainers(
        1, matchmaking_time=0.2, averaging_timeout=1.0, averager_opts={"request_timeout": 0.1}, target=10**6
    )
    (dht,) = make_dhts(1)
    companion = closing(ProgressTracker(dht, "run", 10**6, start=True))  # says that it takes part, never comes
    expect_company(trainer, companion)
    trainer.batch_size = 4  # batches of different sizes
    trainer.step()
    tries = 0
    with caplog.at_level(logging.WARNING):
        while trainer.opt.local_epoch == 0 and tries < 5:
            trainer.opt.tracker.board.hear(companion.local_progress, time.time() + 60, time.time(), end=time.time())
            trainer.opt.step(batch_size=0)
            tries += 1
    assert caplog.text.count("Training on, to meet the others") == 2
    assert "Proceeding with local gradients" in caplog.text
    assert (trainer.opt.local_epoch, tries) == (1, 3)
    torch.testing.assert_close(values(trainer.model), local_reference(trainer, [8, 4], seed=0))


def test_an_overlapping_step_is_made_up_for(make_trainers, make_dhts, closing):
    (trainer,) = make_trainers(1, matchmaking_time=0.2, averaging_timeout=1.0, target=10**6, **IN_BACKGROUND)
    (dht,) = make_dhts(1)
    companion = closing(ProgressTracker(dht, "run", 10**6, start=True))
    expect_company(trainer, companion)  # its only step so far came before that
    with companion.pause_updates():
        companion.update_epoch(1)
    wait_until(lambda: trainer.opt.tracker.global_epoch == 1, "the companion is ahead")
    trainer.step()
    trainer.opt.state_averager.finish_jobs(30)
    assert trainer.opt.local_epoch == 1
    torch.testing.assert_close(values(trainer.model), local_reference(trainer, [8, 8], seed=0))


class CutShort(GradientAverager):
    """Its rounds never get further than a part of the average."""

    async def average_in_group(self, session, tensors, infos) -> None:
        tensors[0].fill_(1e3)
        await asyncio.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, IN_BACKGROUND, {**IN_BACKGROUND, "reuse_grad_buffers": True}],
    ids=["synchronous", "in the background", "in place"],
)
def test_nothing_stays_of_a_failed_round(make_trainers, options):
    trainers = make_trainers(
        2,
        target=24,
        grad_averager=CutShort.get_factory(),
        matchmaking_time=1.0,
        averaging_timeout=4.0,
        allreduce_timeout=0.1,
        average_state_every=10,
        **options,
    )
    meet(*trainers)
    in_parallel(lambda: finish_first_epoch(trainers[0], gives_the_rest=True), lambda: finish_first_epoch(trainers[1]))
    references = [
        local_reference(t, sizes, seed=n) for n, (t, sizes) in enumerate(zip(trainers, ([8, 8], [8]), strict=True))
    ]
    for trainer, own in zip(trainers, references, strict=True):
        # Where rounds do not overlap, the peer that steps last may take over the state of the first one instead.
        possible = references if trainer.opt.tracker.board.moves_together else [own]
        assert any(torch.allclose(values(trainer.model), each) for each in possible)


def finish_first_epoch(trainer: Trainer, gives_the_rest: bool = False) -> None:
    if gives_the_rest:
        trainer.step()
    pause = threading.Event()
    while trainer.opt.local_epoch == 0:
        trainer.opt.step(batch_size=0)
        pause.wait(0.002)
    trainer.opt.state_averager.finish_jobs(30)


def test_a_dead_companion_costs_no_waiting(make_trainers, make_dhts, closing):
    (trainer,) = make_trainers(1, matchmaking_time=60.0, averaging_timeout=60.0, target=10**6)
    (dht,) = make_dhts(1)
    companion = closing(ProgressTracker(dht, "run", 10**6, start=True))
    expect_company(trainer, companion)
    record = companion.local_progress
    dht.portal.call(dht.p2p.shutdown())  # as if killed
    trainer.opt.tracker.board.hear(record, time.time() + 60, time.time(), end=time.time())
    started = time.monotonic()
    trainer.opt.step(batch_size=0)
    assert trainer.opt.local_epoch == 1
    assert time.monotonic() - started < 30
    torch.testing.assert_close(values(trainer.model), local_reference(trainer, [8], seed=0))


@pytest.mark.timeout(120)
def test_leaving_members_do_not_stop_the_others(make_trainers):
    trainers = make_trainers(3, matchmaking_time=25.0, averaging_timeout=60.0)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(2) for t in trainers))
    trainers[2].opt.shutdown()
    started = time.monotonic()
    in_parallel(*(lambda t=t: t.train_until(4) for t in trainers[:2]))
    assert time.monotonic() - started < 20, "nobody waits for a peer that has said goodbye"
    check_identical(trainers[:2])


def test_a_leaving_peer_finishes_its_last_round(make_trainers, monkeypatch):
    """The other one is a moment later at that round."""
    leaves, late = make_trainers(2, seeds=[0, 1], averaging_timeout=60.0, delay_state_averaging=True)
    meet(leaves, late)
    is_leaving = threading.Event()
    let_go, schedule = leaves.opt.state_averager.let_go_of_searches, late.opt.state_averager.schedule_step
    monkeypatch.setattr(leaves.opt.state_averager, "let_go_of_searches", lambda: (is_leaving.set(), let_go()))
    monkeypatch.setattr(
        late.opt.state_averager, "schedule_step", lambda **options: is_leaving.wait(60) and schedule(**options)
    )

    def train_and_leave() -> None:
        leaves.train_until(1)
        leaves.opt.shutdown()

    in_parallel(train_and_leave, lambda: late.train_until(1))
    check_identical([leaves, late])


def test_leaving_between_rounds_delays_nobody(make_trainers, monkeypatch):
    """It has averaged gradients with the others, and says goodbye instead of averaging parameters."""
    stays, leaves = make_trainers(2, averaging_timeout=60.0, delay_state_averaging=False)
    meet(stays, leaves)

    def leave(**_):
        leaves.opt.shutdown()
        raise InterruptedError

    monkeypatch.setattr(leaves.opt.state_averager, "schedule_step", leave)

    def train_and_leave() -> None:
        with pytest.raises(InterruptedError):
            leaves.train_until(1)

    started = time.monotonic()
    in_parallel(lambda: stays.train_until(1), train_and_leave)
    assert stays.opt.grad_averager.last_round is not None
    assert time.monotonic() - started < 30, "the round would be given up after 60 s"


def test_arriving_during_a_step_delays_nobody(make_trainers, monkeypatch):
    """It has to average gradients first: both would wait for each other, in different rounds."""
    (trainer,) = make_trainers(1, delay_state_averaging=False)
    newcomer = PeerID(b"a peer that comes too late")
    expected = Mock(side_effect=[set(), {newcomer}, {newcomer}])
    monkeypatch.setattr(trainer.opt.tracker, "expected_members", expected)
    looks_for_a_group = Mock(side_effect=AssertionError("nobody can be there"))
    monkeypatch.setattr(trainer.opt.state_averager, "schedule_step", looks_for_a_group)
    trainer.opt.global_step.run()
    assert expected.called
    assert trainer.opt.local_epoch == 1


@pytest.mark.parametrize("delay_state_averaging", [False, True])
def test_an_epoch_apart_they_still_average_parameters(make_trainers, monkeypatch, delay_state_averaging):
    """One of them was about to miss a round, and came to the next one of the other."""
    trainers = make_trainers(2, target=10**6, delay_state_averaging=delay_state_averaging)
    meet(*trainers)
    ahead, behind = trainers
    ahead.opt.state_averager.local_epoch = 1
    with ahead.opt.tracker.pause_updates():
        ahead.opt.tracker.update_epoch(1)
    wait_until(lambda: behind.opt.tracker.global_epoch == 1, "it is known who is ahead")
    for trainer, other in ((ahead, behind), (behind, ahead)):
        monkeypatch.setattr(
            trainer.opt.tracker, "expected_members", lambda *_, other=other, **__: {other.opt.dht.peer_id}
        )
    in_parallel(*(trainer.opt.global_step.run for trainer in trainers))
    assert (ahead.opt.local_epoch, behind.opt.local_epoch) == (2, 1)
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
        assert trainer.opt.state_averager.last_round is not None


def test_a_step_returns_the_loss_of_its_closure(make_trainers):
    (trainer,) = make_trainers(1)
    batch = torch.ones(4, 6, device=chosen_device())

    def closure() -> torch.Tensor:
        loss = trainer.model(batch).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = trainer.opt.step(closure, batch_size=4)
    assert loss.item() > 0
    assert trainer.opt.local_progress.samples_accumulated == 4


def test_shutdown_ends_everything_and_can_be_repeated(make_trainers):
    trainers = make_trainers(2, target=10**6)
    meet(*trainers)
    opt = trainers[0].opt
    control = opt.global_step.scheduled_grads = opt.grad_averager.schedule_step()
    opt.shutdown()
    opt.shutdown()
    assert control.done()
    assert not opt.is_alive()
    assert not opt.tracker.is_alive()
    assert not opt.grad_averager.is_alive()
    assert trainers[1].opt.is_alive()


def test_a_silent_peer_delays_shutdown_one_round(monkeypatch):
    waits, now = [], [0.0]

    def wait(futures, timeout):
        waits.append(({*futures}, timeout))
        now[0] += timeout

    monkeypatch.setattr(joint_optimizer.concurrent.futures, "wait", wait)
    monkeypatch.setattr(when.time, "monotonic", lambda: now[0])
    controls = [StepControl(scheduled_time=0.0, deadline=1e12) for _ in range(3)]
    for control in controls[:2]:
        control.stage = AveragingStage.RUNNING_ALLREDUCE
    step, averager = Mock(), Mock()
    step.let_go_of_rounds = lambda timeout: let_go([None, *controls], timeout)
    step.settings.averaging_timeout = 60.0
    Synchronization.end_other_work(Mock(_global_step=step, _state_averager=averager, _averaging_timeout=60.0))
    assert waits == [({*controls[:2]}, 60.0)], "both rounds at once"
    assert all(control.cancelled() for control in controls)
    averager.finish_jobs.assert_called_once_with(1.0)


def test_shutdown_waits_for_no_absent_member(make_trainers, monkeypatch):
    """The time limit of the round would be longer than that of this test."""
    (trainer,) = make_trainers(
        1, use_local_updates=True, delay_state_averaging=True, averaging_timeout=600.0, matchmaking_time=0.5
    )
    has_left = PeerID(b"a peer that has left without a word")
    for method in ("expected_members", "still_expected"):
        monkeypatch.setattr(trainer.opt.tracker, method, lambda *_, **__: {has_left})
    trainer.opt.global_step.run()
    assert [job for job in trainer.opt.state_averager._jobs if not job.finished.done()]
    trainer.opt.shutdown()
    assert trainer.opt.local_epoch == 1


def test_an_optimizer_that_is_dropped_shuts_itself_down(make_dhts):
    (dht,) = make_dhts(1)
    model = make_model()
    opt = Optimizer(dht=dht, run_id="run", target_batch_size=8, optimizer=sgd(model.parameters()))
    tracker, averager = opt.tracker, opt.state_averager
    del opt
    wait_until(lambda: not tracker.is_alive() and not averager.is_alive(), "the parts are shut down")


def train_until_all_have_met(trainers: list[Trainer]) -> None:
    """Until the last one has been in a round with all others, and two epochs longer."""
    goal, pause, last = [10**6], threading.Event(), trainers[-1]

    def train(trainer: Trainer) -> None:
        while trainer.opt.local_epoch < goal[0]:
            trainer.step()
            latest = last.opt.grad_averager.last_round
            if trainer is last and goal[0] == 10**6 and latest and len(latest.peers) == len(trainers):
                goal[0] = trainer.opt.local_epoch + 2
            pause.wait(0.05)  # in epochs of milliseconds a newcomer would always be behind

    in_parallel(*(lambda t=t: train(t) for t in trainers))


DELAYED = {"offload": True, "delay_optimizer_step": True}


def train_until_all_are_alike(trainers: list[Trainer]) -> None:
    """One epoch after the other: on a busy machine one of them may be late for the last round, but not for all."""
    deadline = time.monotonic() + PATIENCE

    def alike() -> bool:
        for trainer in trainers:
            trainer.opt.state_averager.finish_jobs(10)
        rounds = [trainer.opt.grad_averager.last_round for trainer in trainers]
        models = [values(trainer.model) for trainer in trainers]
        return all(len(each.peers) == len(trainers) for each in rounds) and all(map(models[0].equal, models))

    while not alike():
        assert time.monotonic() < deadline, "they stay different"
        epoch = max(trainer.opt.local_epoch for trainer in trainers) + 1
        in_parallel(*(lambda t=t, epoch=epoch: t.train_until(epoch) for t in trainers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("averager", "use_ext_grad_buffer", "options"),
    [
        pytest.param(
            averager,
            has_buffer,
            DELAYED if is_delayed else {},
            id=f"{averager.__name__}-{has_buffer}-{is_delayed}",
            marks=[pytest.mark.slow_drill] if is_delayed or not has_buffer else [],
        )
        for averager, has_buffer, is_delayed in (
            (GradientAverager, True, True),
            (GradientAverager, False, False),
            (PowerSGDGradientAverager, True, False),
            (PowerSGDGradientAverager, False, True),
            (PowerEFGradientAverager, True, True),
            (PowerEFGradientAverager, False, False),
        )
    ],
)  # every two values together
def test_every_gradient_averager_works_with_newcomers(make_trainers, averager, use_ext_grad_buffer, options):
    preset = {} if averager is GradientAverager else {"averager_rank": 1, "min_compression_ratio": 0.3}
    options = {"grad_averager": averager.get_factory(**preset), "use_ext_grad_buffer": use_ext_grad_buffer, **options}
    trainers = make_trainers(2, **options)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
    (newcomer,) = make_trainers(1, seeds=[5], **options)
    own = newcomer.opt.grad_averager.get_buffers()
    assert newcomer.opt.load_state_from_peers() is True
    downloaded = newcomer.opt.grad_averager.get_buffers()
    if averager is GradientAverager:
        assert downloaded == []
    else:
        assert all(map(torch.equal, downloaded, own)) is not use_ext_grad_buffer
    everybody = [*trainers, newcomer]
    train_until_all_have_met(everybody)
    train_until_all_are_alike(everybody)
    check_identical(everybody)
    for trainer in everybody:
        assert len(trainer.opt.grad_averager.last_round.peers) == 3
        buffers = trainer.opt.grad_averager.get_buffers()
        assert all(map(torch.equal, buffers, trainers[0].opt.grad_averager.get_buffers()))


def test_the_buffers_of_another_setting_are_refused(make_trainers, caplog):
    (first,) = make_trainers(1, grad_averager=PowerEFGradientAverager.get_factory(averager_rank=1))
    first.train_until(2)
    (newcomer,) = make_trainers(1, seeds=[5], grad_averager=GradientAverager)
    before = values(newcomer.model)
    newcomer.opt.tracker.board.company = None  # as before it has heard the settings of the other
    assert newcomer.opt.load_state_from_peers(timeout=10) is False
    assert "is of no use: it has" in caplog.text
    assert torch.equal(values(newcomer.model), before)


@pytest.mark.parametrize("verdict", [False, True])
def test_a_newcomer_may_refuse_the_state(make_trainers, verdict, caplog):
    (first,) = make_trainers(1)
    first.train_until(3)
    seen = []

    def check_state() -> bool:
        seen.append((newcomer.opt.local_epoch, values(newcomer.model), threading.current_thread()))
        return verdict

    (newcomer,) = make_trainers(1, seeds=[5], check_state=check_state)
    before = values(newcomer.model)
    assert newcomer.opt.load_state_from_peers(timeout=20) is verdict
    assert torch.equal(values(newcomer.model), values(first.model) if verdict else before)
    assert newcomer.opt.local_epoch == newcomer.opt.tracker.local_progress.epoch == (3 if verdict else 0)
    [(epoch, model, thread)] = seen
    assert (epoch, thread) == (3, threading.current_thread())
    assert torch.equal(model, values(first.model))
    told = f"the state of peer {first.opt.dht.peer_id} is refused: check_state returned False"
    assert caplog.text.count(told) == (0 if verdict else 1)


@pytest.mark.parametrize("averager_opts", [{}, {"target_group_size": 2}])
def test_the_first_peer_is_told_and_not_warned(make_trainers, averager_opts, caplog):
    caplog.set_level(logging.INFO, logger="shoal")
    (first,) = make_trainers(1, averager_opts=averager_opts)
    assert first.opt.load_state_from_peers(timeout=20) is False
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "its own" in record.getMessage()]
    assert told == [("INFO", "this peer is the first of its run: it begins with its own state")]


@pytest.mark.parametrize("averager_opts", [{}, {"target_group_size": 2}])
def test_what_donors_say_about_themselves_does_not_count(make_trainers, averager_opts):
    first, liar = make_trainers(2, averager_opts=averager_opts)
    liar.opt.state_averager.state_sharing_priority = 1e12
    in_parallel(lambda: first.train_until(3), lambda: liar.train_until(3))
    liar.opt.state_averager.state_sharing_priority = 1e12
    downloads = first.opt.state_averager.node.state_downloads
    wait_until(lambda: first.opt.tracker.board.time_of_record(liar.opt.dht.peer_id.to_bytes()), "they know each other")
    [(rank, peer)] = first.opt.dht.portal.call(downloads.find_donors())
    assert peer == liar.opt.dht.peer_id
    assert -rank <= 4
