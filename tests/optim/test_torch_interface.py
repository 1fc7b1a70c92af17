"""What users of torch optimizers do with theirs: schedules, hooks, groups, clipping, compiled models."""

from __future__ import annotations

import pytest
import torch

from tests.drills import mostly_drills
from tests.optim.conftest import backward, make_model, may_use_sequential_schedules, sgd, values


def train_alone(optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, torch.randn(8, 6, generator=rng))
        optimizer.step()


@may_use_sequential_schedules
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_an_own_schedule_moves_the_optimizer(make_trainers, offload):
    (trainer,) = make_trainers(1, target=8, offload=offload)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        trainer.opt,
        [
            torch.optim.lr_scheduler.LinearLR(trainer.opt, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(trainer.opt, 0.5),
        ],
        milestones=[2],
    )
    reference = make_model()
    optimizer = sgd(reference.parameters())
    expected = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    )
    rng = torch.Generator().manual_seed(0)
    for _ in range(4):
        trainer.step()
        schedule.step()
        optimizer.zero_grad()
        backward(reference, torch.randn(8, 6, generator=rng))
        optimizer.step()
        expected.step()
        assert schedule.get_last_lr() == expected.get_last_lr()
        assert trainer.opt.opt.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    torch.testing.assert_close(values(trainer.model), values(reference))


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_groups_may_differ_and_be_changed(make_trainers, offload):
    def with_groups(parameters):
        first, *others = parameters[0]["params"] if isinstance(parameters, list) else parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.01, momentum=0.5)

    (trainer,) = make_trainers(1, target=8, offload=offload, optimizer=with_groups)
    reference = make_model()
    optimizer = with_groups(reference.parameters())
    for groups in (trainer.opt.param_groups, optimizer.param_groups):
        groups[1]["momentum"] = 0.1
        groups[1].setdefault("weight_decay", 7)
        assert sorted(groups[1]) == sorted(optimizer.param_groups[1])
    trainer.train_until(3, pace=0)
    train_alone(optimizer, reference, 3)
    torch.testing.assert_close(values(trainer.model), values(reference))
    shown = [p for group in trainer.opt.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(shown, trainer.model.parameters(), strict=True))


def test_the_parameters_in_a_group_cannot_be_exchanged(make_trainers):
    (trainer,) = make_trainers(1, offload=True)
    (group,) = trainer.opt.param_groups
    with pytest.raises(ValueError, match="exchanged"):
        group["params"] = []
    with pytest.raises(ValueError, match="removed"):
        del group["params"]
    group["note"] = "mine"
    assert trainer.opt.opt.param_groups[0]["note"] == "mine"
    del group["note"]
    assert "note" not in group
    assert "lr" in repr(group)


@pytest.mark.parametrize("delay_optimizer_step", [False, True], ids=["", "in the background"])
def test_inner_hooks_see_only_global_steps(make_trainers, delay_optimizer_step):
    seen: list[str] = []

    def with_hooks(parameters):
        optimizer = sgd(parameters)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        return optimizer

    (trainer,) = make_trainers(
        1, target=8, offload=True, optimizer=with_hooks, delay_optimizer_step=delay_optimizer_step
    )
    assert seen == []
    trainer.train_until(2, pace=0)
    trainer.opt.state_averager.finish_jobs(10)
    assert seen == ["before", "after"] * 2


def test_a_hook_clips_the_whole_gradient(make_trainers):
    """Whichever parameters the optimizer has; also if it is registered later, on ``opt.opt``."""
    (trainer,) = make_trainers(1, target=8, offload=True)

    def clip(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    reference = make_model()
    optimizer = sgd(reference.parameters())
    for each in (trainer.opt.opt, optimizer):
        each.register_step_pre_hook(clip)
    trainer.train_until(3, pace=0)
    train_alone(optimizer, reference, 3)
    torch.testing.assert_close(values(trainer.model), values(reference))
    assert (values(trainer.model) - values(make_model())).norm() < 0.01


def test_background_errors_are_raised_next_step(make_trainers):
    (trainer,) = make_trainers(1, target=8, offload=True, delay_optimizer_step=True)

    def fail(optimizer, args, kwargs):
        raise ArithmeticError("not with these gradients")

    handle = trainer.opt.opt.register_step_pre_hook(fail)
    trainer.train_until(1, pace=0)
    with pytest.raises(ArithmeticError, match="not with these gradients"):
        trainer.opt.state_averager.finish_jobs(10)
    handle.remove()
    trainer.train_until(2, pace=0)
    trainer.opt.state_averager.finish_jobs(10)


def test_shutdown_closes_all_after_a_failure(make_trainers):
    (trainer,) = make_trainers(1, target=8, offload=True, delay_optimizer_step=True)

    def fail(optimizer, args, kwargs):
        raise ArithmeticError("not with these gradients")

    trainer.opt.opt.register_step_pre_hook(fail)
    trainer.train_until(1, pace=0)
    with pytest.raises(ArithmeticError, match="not with these gradients"):
        trainer.opt.shutdown()
    assert not trainer.opt.is_alive()
    assert not trainer.opt.grad_averager.is_alive()


@pytest.mark.leaves_something  # torch's compiler starts a thread that stays
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", mostly_drills([{}, {"reuse_grad_buffers": True}, {"offload": True}]), ids=str)
def test_compiled_models(make_trainers, backend, options):
    (trainer,) = make_trainers(1, target=16, **options)
    reference = make_model()
    optimizer, rng = sgd(reference.parameters()), torch.Generator().manual_seed(0)
    plain, trainer.model = trainer.model, torch.compile(trainer.model, backend=backend)
    for epoch in range(2):
        optimizer.zero_grad()
        batches = [torch.randn(8, 6, generator=rng) for _ in range(2)]
        backward(reference, torch.cat(batches))
        optimizer.step()
        if not options.get("reuse_grad_buffers"):
            trainer.opt.zero_grad()
        backward(trainer.model, batches[0])
        trainer.opt.grad_averager.accumulate_grads_(8)  # step() might go on without the second one
        if not options.get("reuse_grad_buffers"):
            trainer.opt.zero_grad()
        backward(trainer.model, batches[1])
        trainer.opt.step(batch_size=8)
        assert trainer.opt.local_epoch == epoch + 1
    torch.testing.assert_close(values(plain), values(reference))


@pytest.mark.leaves_something  # torch's compiler starts a thread that stays
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of the compiler itself
def test_a_compiled_step_of_training(make_trainers):
    """A compiled function calls step(), which the compiler leaves alone, and the optimizer's own step is compiled."""
    (trainer,) = make_trainers(1, target=8)
    inner = trainer.opt.opt
    inner.step = torch.compile(inner.step, backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def train_step(batch: torch.Tensor) -> None:
        trainer.opt.zero_grad()
        backward(trainer.model, batch)
        trainer.opt.step(batch_size=8)

    rng = torch.Generator().manual_seed(0)
    for epoch in range(3):
        train_step(torch.randn(8, 6, generator=rng))
        assert trainer.opt.local_epoch == epoch + 1
    reference = make_model()
    train_alone(sgd(reference.parameters()), reference, 3)
    torch.testing.assert_close(values(trainer.model), values(reference))
