"""Checkpoints resume a run: the optimizer, the epoch, the schedule, and what peers know of earlier rounds."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, SequentialLR, StepLR

from shoal.optim import DiLoCo
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.optim.conftest import Trainer, in_parallel, make_model, may_use_sequential_schedules, values, wait_until


def adam(groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=2), StepLR(optimizer, 2, gamma=0.5)], [2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return ChainedScheduler([LinearLR(optimizer, total_iters=3), ExponentialLR(optimizer, 0.9)])


def write_and_read(*trainers: Trainer) -> list[dict[str, Any]]:
    """What a user saves, as the strict loader of torch gives it back."""
    found = []
    for trainer in trainers:
        file = io.BytesIO()
        torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.opt.state_dict()}, file)
        file.seek(0)
        found.append(torch.load(file, weights_only=True))
    return found


def resume(trainer: Trainer, saved: dict[str, Any]) -> None:
    trainer.model.load_state_dict(saved["model"])
    trainer.opt.load_state_dict(saved["optimizer"])


def train_together(trainers: list[Trainer], epochs: int, seed: int) -> None:
    """In each epoch one batch of each peer; the same ones whenever the seed is the same."""

    def run(number: int, trainer: Trainer) -> None:
        trainer.rng = torch.Generator().manual_seed(1000 * seed + number)
        for epoch in range(trainer.opt.local_epoch, trainer.opt.local_epoch + epochs):
            trainer.step()
            while trainer.opt.local_epoch == epoch:
                trainer.opt.step(batch_size=0)

    in_parallel(*(lambda n=n, t=t: run(n, t) for n, t in enumerate(trainers)))


def know_each_other(trainers: list[Trainer]) -> None:
    for trainer in trainers:
        trainer.opt.tracker.report_local_progress(trainer.opt.local_epoch, 1)
    for trainer in trainers:
        wait_until(lambda t=trainer: t.opt.tracker.expected_group_size == len(trainers), "all peers know each other")


@may_use_sequential_schedules
@pytest.mark.parametrize(
    ("schedule", "offload", "dtype"),
    [
        pytest.param(None, False, torch.float32, id="float32"),
        pytest.param(None, True, torch.bfloat16, id="bfloat16-offload"),
        pytest.param(sequential, False, torch.bfloat16, id="bfloat16-sequential"),
        pytest.param(sequential, True, torch.float32, id="float32-offload-sequential"),
        pytest.param(chained, False, torch.bfloat16, id="bfloat16-chained"),
        pytest.param(chained, True, torch.float32, id="float32-offload-chained"),
    ],
)  # every two values together
def test_a_resumed_run_equals_an_uninterrupted_one(make_trainers, schedule, offload, dtype):
    options = {"optimizer": adam, "scheduler": schedule, "offload": offload, "target": 8, "dtype": dtype}
    (trainer,) = make_trainers(1, **options)
    trainer.train_until(3, pace=0)
    (saved,) = write_and_read(trainer)
    expected_rng = trainer.rng.get_state()
    trainer.train_until(7, pace=0)

    (resumed,) = make_trainers(1, run_id="resumed", seeds=[9], **options)
    resume(resumed, saved)
    assert resumed.opt.local_epoch == resumed.opt.tracker.global_epoch == 3
    if not offload:
        assert torch.equal(values(resumed.model), torch.cat([v.flatten() for v in saved["model"].values()]))
    resumed.rng.set_state(expected_rng)
    resumed.train_until(7, pace=0)
    assert resumed.samples == 32, "all batches count"
    assert torch.equal(values(resumed.model), values(trainer.model))
    assert resumed.opt.opt.param_groups[0]["lr"] == trainer.opt.opt.param_groups[0]["lr"]


@pytest.mark.parametrize("averager", [PowerSGDGradientAverager, PowerEFGradientAverager])
def test_memory_of_earlier_rounds_is_resumed(make_trainers, averager):
    factory = averager.get_factory(averager_rank=1, min_compression_ratio=0.3)
    options = {"grad_averager": factory, "target": 16, "delay_state_averaging": False, "use_ext_grad_buffer": False}
    trainers = make_trainers(2, **options)
    know_each_other(trainers)
    train_together(trainers, epochs=2, seed=6)
    saved = write_and_read(*trainers)
    train_together(trainers, epochs=3, seed=7)

    resumed = make_trainers(2, run_id="resumed", seeds=[8, 9], **options)
    for trainer, each in zip(resumed, saved, strict=True):
        resume(trainer, each)
        assert all(map(torch.equal, trainer.opt.grad_averager.get_memory(), each["optimizer"]["shoal"]["gradients"]))
    know_each_other(resumed)
    train_together(resumed, epochs=3, seed=7)
    for before, after in zip(trainers, resumed, strict=True):
        torch.testing.assert_close(values(after.model), values(before.model), rtol=1e-5, atol=1e-6)


def test_other_peers_follow_a_run_that_was_resumed(make_trainers):
    (trainer,) = make_trainers(1)
    trainer.train_until(3)
    (saved,) = write_and_read(trainer)
    first, second = make_trainers(2, run_id="resumed", seeds=[3, 4])
    resume(first, saved)
    first.step()
    wait_until(lambda: first.opt.tracker.board.introduced, "others can find it")
    while second.opt.local_epoch == 0:
        second.step()
    assert second.opt.local_epoch == first.opt.local_epoch == 3
    assert torch.equal(values(second.model), values(first.model))


def test_a_checkpoint_behind_the_swarm_catches_up(make_trainers):
    (first,) = make_trainers(1)
    first.train_until(1)
    (saved,) = write_and_read(first)
    first.train_until(5)
    (late,) = make_trainers(1, seeds=[3])
    resume(late, saved)
    assert late.opt.local_epoch == 1
    late.step()
    assert late.opt.local_epoch == 5
    assert torch.equal(values(late.model), values(first.model))


def test_after_loading_a_lone_other_peer_is_believed(make_trainers):
    """As a newcomer does: a state that was loaded says nothing of how far others are. accelerate always loads one."""
    (first,) = make_trainers(1)
    first.train_until(5)
    (late,) = make_trainers(1, seeds=[3])
    late.opt.load_state_dict(late.opt.state_dict())
    wait_until(lambda: late.opt.tracker.global_epoch == 5, "the other peer is believed")
    assert late.opt.load_state_from_peers()
    assert torch.equal(values(late.model), values(first.model))


def test_work_in_the_background_is_in_the_checkpoint(make_trainers):
    options = {"offload": True, "delay_optimizer_step": True, "target": 8}
    (trainer,) = make_trainers(1, **options)
    trainer.train_until(1)
    before = values(trainer.model)
    trainer.train_until(2)
    saved = trainer.opt.state_dict()
    assert saved["shoal"]["local_epoch"] == 2
    assert not torch.equal(values(trainer.model), before), "the step has been finished"
    wide = torch.cat([parameter.flatten() for parameter in saved["shoal"]["parameters"]])
    assert torch.equal(wide, values(trainer.model).to(wide.device))


def test_checkpoints_are_exchangeable_with_plain_torch(make_trainers):
    (trainer,) = make_trainers(1, optimizer=adam, scheduler=chained)
    trainer.train_until(2)
    (saved,) = write_and_read(trainer)
    model = make_model(5)
    plain = adam(model.parameters())
    plain.load_state_dict(saved["optimizer"])
    for parameter, own in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(plain.state[parameter]["exp_avg"], trainer.opt.opt.state[own]["exp_avg"])
    assert plain.param_groups[0]["lr"] == trainer.opt.opt.param_groups[0]["lr"]

    (other,) = make_trainers(1, run_id="other", optimizer=adam, scheduler=chained)
    rate = other.opt.opt.param_groups[0]["lr"]
    other.opt.load_state_dict(adam(make_model().parameters()).state_dict())
    assert other.opt.local_epoch == 0
    assert other.opt.opt.param_groups[0]["lr"] == rate, "of the schedule, which is at its beginning"
    assert all(state["exp_avg"].eq(0).all() for state in other.opt.opt.state.values()), "statistics always exist"


def test_a_checkpoint_without_its_schedule_slows_down_once(make_trainers):
    """Others wrote only ``state["local_epoch"]`` beside the state of the optimizer, learning rate included."""
    (trainer,) = make_trainers(1, scheduler=chained)
    trainer.train_until(4)
    saved = trainer.opt.state_dict()
    saved = {"state": {**saved["state"], "local_epoch": 4}, "param_groups": saved["param_groups"]}
    for group in saved["param_groups"]:
        del group["local_epoch"]
    (other,) = make_trainers(1, run_id="other", scheduler=chained)
    other.opt.load_state_dict(saved)
    assert other.opt.local_epoch == 4
    assert other.opt.opt.param_groups[0]["lr"] == pytest.approx(trainer.opt.opt.param_groups[0]["lr"])


def test_a_checkpoint_that_does_not_fit_is_refused(make_trainers, caplog):
    low_rank = PowerEFGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.3)
    (trainer,) = make_trainers(1, optimizer=adam, offload=True, grad_averager=low_rank)
    trainer.train_until(1)
    saved = trainer.opt.state_dict()
    kept = copy.deepcopy(saved)
    trainer.opt.load_state_dict(saved)
    assert str(saved) == str(kept)
    groups = [{**saved["param_groups"][0], "params": [0]}]
    hostile = [
        {**saved, "shoal": {**saved["shoal"], "local_epoch": -1}},
        {**saved, "shoal": {**saved["shoal"], "local_epoch": "7"}},
        {**saved, "shoal": {**saved["shoal"], "parameters": [torch.zeros(3)]}},
        {**saved, "param_groups": groups},
    ]
    for each in hostile:
        with pytest.raises(ValueError, match=r"."):
            trainer.opt.load_state_dict(each)
        assert trainer.opt.local_epoch == 1
    (other,) = make_trainers(1, run_id="other", optimizer=adam, offload=True, grad_averager=GradientAverager)
    with caplog.at_level(logging.WARNING):
        other.opt.load_state_dict(saved)
    assert "begins without its buffers" in caplog.text
    assert other.opt.local_epoch == 1


# --- torch's own tools ------------------------------------------------------------------------------------------------


def stateless(groups) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("optimizer", [adam, stateless])
def test_tools_of_torch_save_and_restore_an_optimizer(make_trainers, optimizer, offload):
    (trainer,) = make_trainers(1, optimizer=optimizer, offload=offload, scheduler=chained)
    trainer.train_until(3)
    trainer.opt.zero_grad()
    saved = get_optimizer_state_dict(trainer.model, trainer.opt)
    names = {name for name, _ in trainer.model.named_parameters()}
    assert set(saved["state"]) == set(saved["param_groups"][0]["params"]) == names
    assert trainer.opt.local_epoch == 3, "the tools have not made a step"
    (other,) = make_trainers(1, run_id="other", optimizer=optimizer, offload=offload, scheduler=chained)
    set_optimizer_state_dict(other.model, other.opt, saved)
    assert other.opt.local_epoch == 3
    assert other.opt.grad_averager.local_samples_accumulated == 0
    assert other.opt.param_groups[0]["lr"] == pytest.approx(trainer.opt.param_groups[0]["lr"])
    assert "local_epoch" not in other.opt.opt.param_groups[0]
    for mine, theirs in zip(other.opt.opt.state.values(), trainer.opt.opt.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_tools_of_torch_do_not_step_a_diloco(make_dhts, closing):
    """Also before its first step, when its inner optimizer has no statistics."""
    (dht,) = make_dhts(1)
    model = make_model()
    options = {"sync_every": 1, "batch_size_per_step": 4, "run_id": "run"}
    opt = closing(DiLoCo(dht=dht, optimizer=adam(model.parameters()), **options))
    saved = get_optimizer_state_dict(model, opt)
    assert opt.inner_steps == 0
    assert set(saved["state"]) == {name for name, _ in model.named_parameters()}
