"""Peers whose gradients or parameters are NaN: nobody else suffers, and they recover."""

from __future__ import annotations

import functools

import pytest
import torch

from shoal.compression import Float16Compression, Uniform8BitQuantization
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.averaging.swarm import warnings_of
from tests.drills import mostly_drills
from tests.optim.conftest import Trainer, backward, check_identical, in_parallel, meet, values

PLAIN = {"grad_averager": GradientAverager}
POWER_SGD = {"grad_averager": PowerSGDGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.1)}
POWER_EF = {"grad_averager": PowerEFGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.1)}


class Recorder:
    """Gives each peer a batch of its own, always the same, and notes what it steps with."""

    def __init__(self, trainer: Trainer, bad_epochs=()) -> None:
        self.trainer, self.bad_epochs = trainer, bad_epochs
        self.batch = torch.randn(8, 6, generator=trainer.rng)
        self.steps = {}
        """By epoch: parameters before the step, the gradient, and the round in which it was averaged."""
        trainer.opt.opt.register_step_pre_hook(self.note)
        trainer.step = self.step

    def note(self, *_):
        averager = self.trainer.opt.grad_averager
        stepped = [p for group in self.trainer.opt.opt.param_groups for p in group["params"]]
        gradient = torch.cat([p.grad.flatten() for p in stepped])
        epoch = self.trainer.opt.state_averager._stepped_epoch
        self.steps[epoch] = values(self.trainer.model), gradient, averager and averager.last_round

    def step(self):
        trainer, opt = self.trainer, self.trainer.opt
        if not opt.options.reuse_grad_buffers:
            opt.zero_grad()
        backward(trainer.model, self.batch * (torch.nan if opt.local_epoch in self.bad_epochs else 1.0))
        opt.step(batch_size=8)

    def gradient_at(self, parameters: torch.Tensor) -> torch.Tensor:
        model = self.trainer.model
        now = values(model)
        torch.nn.utils.vector_to_parameters(parameters, model.parameters())
        model.zero_grad()
        backward(model, self.batch)
        torch.nn.utils.vector_to_parameters(now, model.parameters())
        return torch.cat([p.grad.flatten() for p in model.parameters()])


def check_finite(trainers):
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
        assert values(trainer.model).isfinite().all()


def test_all_step_with_the_average_of_the_good(make_trainers, caplog):
    trainers = make_trainers(4, delay_state_averaging=False, **PLAIN)
    recorders = [Recorder(trainer, [1, 2] if i == 0 else []) for i, trainer in enumerate(trainers)]
    meet(*trainers)
    in_parallel(*(functools.partial(t.train_until, 4) for t in trainers))
    check_identical(trainers)
    check_finite(trainers)
    for epoch in (1, 2, 3):
        before, _, result = recorders[1].steps[epoch]
        weights = dict(zip(result.peers, result.weights, strict=True))
        weights = [weights[trainer.opt.dht.peer_id] for trainer in trainers]
        assert (weights[0] == 0) == (epoch < 3)
        assert min(weights[1:]) > 0
        mean = sum(w * r.gradient_at(before) for w, r in zip(weights, recorders, strict=True)) / sum(weights)
        for recorder in recorders:
            torch.testing.assert_close(recorder.steps[epoch][1], mean)
            assert torch.equal(recorder.steps[epoch][1], recorders[1].steps[epoch][1])
    assert len(warnings_of(caplog, "weight 0")) == 1
    assert not warnings_of(caplog, "skips")
    assert not warnings_of(caplog, "not averaged")


@pytest.mark.parametrize(
    "options",
    mostly_drills(
        [
            POWER_SGD,
            POWER_EF,
            {**PLAIN, "grad_compression": Uniform8BitQuantization()},
            {**PLAIN, "offload": True, "delay_optimizer_step": True, "delay_grad_averaging": True},
            {**PLAIN, "grad_compression": Float16Compression()},
            {**PLAIN, "reuse_grad_buffers": True},
            {**PLAIN, "offload": True, "delay_optimizer_step": True},
        ],
        quick=4,
    ),
    ids=["PowerSGD", "PowerEF", "8 bits", "delayed gradients", "float16", "reuse", "delayed step"],
)
def test_nobody_suffers_whatever_the_options(make_trainers, options):
    trainers = make_trainers(3, **options)
    recorders = [Recorder(trainer, [1, 2] if i == 0 else []) for i, trainer in enumerate(trainers)]
    meet(*trainers)
    in_parallel(*(functools.partial(t.train_until, 4) for t in trainers))
    check_finite(trainers)
    for trainer, recorder in zip(trainers, recorders, strict=True):
        assert not torch.equal(values(trainer.model), recorder.steps[1][0])
        for tensor in trainer.opt.grad_averager.get_memory():
            assert tensor.isfinite().all()
    if options.get("grad_compression") is None:
        check_identical(trainers)


@pytest.mark.parametrize("options", [PLAIN, POWER_SGD, POWER_EF], ids=["plain", "PowerSGD", "PowerEF"])
def test_if_all_are_bad_all_skip_the_step(make_trainers, options, caplog):
    trainers = make_trainers(3, delay_state_averaging=False, **options)
    recorders = [Recorder(trainer, [1]) for trainer in trainers]
    meet(*trainers)
    in_parallel(*(functools.partial(t.train_until, 4) for t in trainers))
    check_identical(trainers)
    check_finite(trainers)
    for recorder in recorders:
        assert set(recorder.steps) == {0, 2, 3}  # the hook is not called in a step that is skipped
        assert recorder.trainer.opt.grad_averager.last_round.share_averaged == 1
    assert len(warnings_of(caplog, "skips the step to epoch 2")) == 3


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"offload": True, "delay_optimizer_step": True}])
def test_a_peer_alone_skips_the_step(make_trainers, options, caplog):
    (trainer,) = make_trainers(1, target=16, scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1), **options)
    recorder = Recorder(trainer, [0, 1, 3])
    trainer.step()
    before = values(trainer.model)
    trainer.train_until(2)
    trainer.opt.state_averager.finish_jobs(10)
    assert torch.equal(values(trainer.model), before)
    assert trainer.opt.scheduler.last_epoch == 2  # it follows the epoch
    trainer.train_until(4)
    check_finite([trainer])
    assert not torch.equal(values(trainer.model), before)
    assert set(recorder.steps) == {2}
    messages = warnings_of(caplog, "skips the step to epoch")
    assert len(messages) == 2  # once for each time that it begins
    assert "gradient of parameter" in messages[0]


@pytest.mark.parametrize(
    "options",
    [{"delay_state_averaging": False, **PLAIN}, {"use_local_updates": True}],
    ids=["copied", "as differences"],
)
def test_bad_parameters_are_replaced_by_a_download(make_trainers, options, caplog):
    trainers = make_trainers(3, **options)
    meet(*trainers)
    in_parallel(*(functools.partial(t.train_until, 2) for t in trainers))
    with torch.no_grad():
        for trainer in trainers:
            trainer.opt.state_averager.finish_jobs(10)
        next(trainers[0].model.parameters())[1, 1] = torch.nan
    in_parallel(*(functools.partial(t.train_until, 6) for t in trainers))
    check_finite(trainers)
    [warning] = [w for w in warnings_of(caplog, "weight 0") if "parameter" in w]
    assert "1 of the 48 values" in warning
