"""Loss scaling: against torch's scaler, in place and not, in the background, with overflows."""

from __future__ import annotations

import inspect
import re
import sys
import threading
import warnings

import pytest
import torch

from shoal.optim import GradScaler, Optimizer
from tests.optim.conftest import in_parallel, wait_until

pytestmark = pytest.mark.devices

SCALE = 2.0**10


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def sgd(groups) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch).float(), batch[:, :2].float().cos())


def make_scaler(**options) -> GradScaler:
    return GradScaler(**{"init_scale": SCALE, "device": "cpu", **options})


@pytest.fixture
def make_optimizer(make_dhts, closing):
    def make(model: torch.nn.Module, **options) -> Optimizer:
        (dht,) = make_dhts(1)
        training = {"optimizer": sgd(model.parameters())}
        if options.pop("offload", False):
            training = {"optimizer": sgd, "params": model.parameters()}
        defaults = {"run_id": "run", "target_batch_size": 16, "matchmaking_time": 10.0, "averaging_timeout": 20.0}
        opt = closing(Optimizer(dht=dht, **{**defaults, **training, **options}))
        opt.tracker.performance_ema.update = lambda *_: 0.0  # epochs end by count, however slow this machine is
        return opt

    return make


MODES = {
    "in place": {"reuse_grad_buffers": True},
    "accumulators": {},
    "in place, offloaded": {"reuse_grad_buffers": True, "offload": True},
    "in place, delayed": {"reuse_grad_buffers": True, "offload": True, "delay_optimizer_step": True},
    "delayed": {"offload": True, "delay_optimizer_step": True},
    "local updates": {"use_local_updates": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_steps_and_scales_are_those_of_torch(make_optimizer, mode):
    """Batches of unequal sizes make up an epoch each; the second epoch's first attempt overflows."""
    model, reference = make_model(), make_model()
    opt, plain = make_optimizer(model, **MODES[mode]), sgd(reference.parameters())
    scaler = make_scaler(growth_interval=10)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10)
    sizes = [[16], [16], [16]] if mode == "local updates" else [[6, 10], [16], [4, 4, 8]]
    rng = torch.Generator().manual_seed(1)
    in_place = MODES[mode].get("reuse_grad_buffers", False)
    for epoch, shares in enumerate(sizes):
        batches = [torch.randn(size, 6, generator=rng) for size in shares]
        if epoch == 1:
            for m, s, o in ((model, scaler, opt), (reference, torch_scaler, plain)):
                if o is plain or not in_place:
                    o.zero_grad()
                s.scale(loss_of(m, batches[0]) * torch.inf).backward()
                if o is opt:
                    assert s.step(o, batch_size=16) is False
                else:
                    s.step(o)
                s.update()
            if mode != "local updates":
                assert opt.local_epoch == 1
        for batch in batches:
            if not in_place:
                opt.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            assert scaler.step(opt, batch_size=len(batch)) is False
            scaler.update()
        plain.zero_grad()
        torch_scaler.scale(loss_of(reference, torch.cat(batches))).backward()
        torch_scaler.step(plain)
        torch_scaler.update()
        opt.state_averager.finish_jobs(10)
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found, expected)
    if "delayed" not in mode:  # there the scale hears of a step when it has been made
        assert scaler.get_scale() == torch_scaler.get_scale() == SCALE / 2
        assert scaler.state_dict() == torch_scaler.state_dict()


def test_outside_a_global_step_gradients_stay_scaled(make_optimizer):
    model = make_model()
    opt = make_optimizer(model, reuse_grad_buffers=True)
    scaler = make_scaler()
    loss = loss_of(model, torch.ones(4, 6))
    (true,) = torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
    scaler.scale(loss).backward()
    assert scaler.unscale_(opt) is False
    torch.testing.assert_close(model[0].weight.grad, true * SCALE)
    assert scaler.update() is False, "neither a step nor an overflow"
    with scaler.running_global_step():
        assert scaler.unscale_(opt) is True
        torch.testing.assert_close(model[0].weight.grad, true)
        before = model[0].weight.detach().clone()
        assert scaler.step(opt.opt) is True
        with pytest.raises(RuntimeError, match="unscaled"):
            scaler.step(opt.opt)
    torch.testing.assert_close(model[0].weight, before - 0.1 * true)
    assert scaler.update() is True
    assert scaler.update() is False


def test_a_step_with_infinite_gradients_is_skipped(make_optimizer, caplog):
    model = make_model()
    opt = make_optimizer(model, reuse_grad_buffers=True)
    scaler = make_scaler()
    scaler.scale(loss_of(model, torch.ones(4, 6)) * torch.nan).backward()
    assert not scaler.are_grads_finite(opt)
    model[0].weight.grad.zero_()
    model.zero_grad()
    assert not scaler.are_grads_finite(opt, use_cached=True)
    assert scaler.are_grads_finite(opt)
    scaler.scale(loss_of(model, torch.ones(4, 6)) * torch.nan).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with scaler.running_global_step():
        scaler.unscale_(opt)
        assert scaler.step(opt.opt) is True
    assert "not finite" in caplog.text
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert scaler.update() is True
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision(make_optimizer, dtype):
    """Gradients too small for half precision reach the optimizer's own parameters."""
    model, reference = make_model().to(dtype), make_model().to(dtype).float()
    opt = make_optimizer(model, offload=True, reuse_grad_buffers=True)
    scaler, plain = make_scaler(init_scale=2.0**16), sgd(reference.parameters())
    batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    scaler.scale(loss_of(model, batch) * 1e-7).backward()
    scaler.step(opt, batch_size=16)
    (loss_of(reference, batch.float()) * 1e-7).backward()
    stepped = [s.grad for s in opt.state_averager.optimizer_parameters]
    assert opt.local_epoch == 1
    if dtype == torch.bfloat16:
        for found, parameter in zip(stepped, reference.parameters(), strict=True):
            assert (found - parameter.grad).norm() < 0.05 * parameter.grad.norm()
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    plain.zero_grad()


def test_peers_with_different_scales_stay_identical(make_dhts, closing):
    models, opts = [], []
    for dht in make_dhts(2):
        models.append(make_model())
        options = {"matchmaking_time": 10.0, "averaging_timeout": 20.0, "reuse_grad_buffers": True}
        opts.append(
            closing(
                Optimizer(
                    dht=dht,
                    run_id="run",
                    target_batch_size=64,
                    optimizer=sgd(models[-1].parameters()),
                    delay_state_averaging=False,
                    average_state_every=10**6,
                    **options,
                )
            )
        )
    scalers = [make_scaler(init_scale=scale) for scale in (2.0**8, 2.0**14)]
    pause = threading.Event()

    def train(index: int, until: int) -> None:
        rng = torch.Generator().manual_seed(index)
        while opts[index].local_epoch < until:
            batch = torch.randn(4 + 4 * index, 6, generator=rng)
            scalers[index].scale(loss_of(models[index], batch)).backward()
            scalers[index].step(opts[index], batch_size=len(batch))
            scalers[index].update()
            pause.wait(0.005)
            if until == 0:
                break

    for index, opt in enumerate(opts):
        scalers[index].scale(loss_of(models[index], torch.ones(4, 6))).backward()
        scalers[index].step(opt, batch_size=4)
    for opt in opts:
        wait_until(lambda o=opt: o.tracker.expected_group_size == 2, "the peers know each other")
    in_parallel(lambda: train(0, 3), lambda: train(1, 3))
    for a, b, first in zip(models[0].parameters(), models[1].parameters(), make_model().parameters(), strict=True):
        assert torch.equal(a, b)
        assert 0 < (a - first).abs().max() < 1


def test_scaled_and_unscaled_gradients_do_not_mix(make_optimizer):
    model = make_model()
    opt, scaler = make_optimizer(model, reuse_grad_buffers=True, target_batch_size=100), make_scaler()
    scaler.scale(loss_of(model, torch.ones(4, 6))).backward()
    scaler.step(opt, batch_size=4)
    with pytest.raises(ValueError, match="together"):
        opt.step(batch_size=4)


def test_a_global_step_knows_the_accumulated_scale(make_optimizer):
    model, reference = make_model(), make_model()
    opt, scaler = make_optimizer(model, reuse_grad_buffers=True, target_batch_size=8), make_scaler()
    scaler.scale(loss_of(model, torch.ones(4, 6))).backward()
    scaler.step(opt, batch_size=4)
    opt.tracker.target_batch_size = 4
    opt.tracker.board.target_batch_size = 4
    opt.global_step.run(opt._scaling.before_global_step(opt, None))
    plain = sgd(reference.parameters())
    loss_of(reference, torch.ones(4, 6)).backward()
    plain.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_closures_scale_their_own_loss(make_optimizer):
    model, reference = make_model(), make_model()
    opt, scaler = make_optimizer(model), make_scaler()

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(model, torch.ones(16, 6))
        scaler.scale(loss).backward()
        return loss

    scaler.step(opt, closure, batch_size=16)
    plain = sgd(reference.parameters())
    loss_of(reference, torch.ones(16, 6)).backward()
    plain.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_torch_scaler_works_unless_gradients_accumulate_in_place(make_optimizer):
    model, reference = make_model(), make_model()
    opt = make_optimizer(model, batch_size_per_step=16)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(loss_of(model, torch.ones(16, 6))).backward()
    scaler.step(opt)
    scaler.update()
    plain = sgd(reference.parameters())
    loss_of(reference, torch.ones(16, 6)).backward()
    plain.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    in_place = make_optimizer(make_model(), run_id="other", reuse_grad_buffers=True, batch_size_per_step=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch announces that it will not pass itself any more
        with pytest.raises(ValueError, match=r"shoal\.GradScaler"):
            scaler.step(in_place)


def test_a_disabled_scaler_changes_nothing(make_optimizer):
    model, reference = make_model(), make_model()
    opt, scaler = make_optimizer(model, reuse_grad_buffers=True), make_scaler(enabled=False)
    scaler.scale(loss_of(model, torch.ones(16, 6))).backward()
    assert scaler.unscale_(opt) is False
    assert scaler.are_grads_finite(opt)
    assert scaler.step(opt, batch_size=16) is False
    assert scaler.update() is False
    plain = sgd(reference.parameters())
    loss_of(reference, torch.ones(16, 6)).backward()
    plain.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_scale_changes_as_that_of_torch(make_optimizer):
    """Up to the largest number, and from a saved state."""
    model, reference = make_model(), make_model()
    opt, plain = make_optimizer(model, batch_size_per_step=16), sgd(reference.parameters())
    options = {"init_scale": 2.0**126, "growth_interval": 2, "backoff_factor": 0.25}
    scaler, torch_scaler = make_scaler(**options), torch.amp.GradScaler("cpu", **options)
    for overflows in (False, False, False, False, True, False, False, True, True, False, False, False):
        for m, s, o in ((model, scaler, opt), (reference, torch_scaler, plain)):
            o.zero_grad()
            loss = loss_of(m, torch.ones(16, 6)) * 1e-9
            s.scale(loss * torch.inf if overflows else loss).backward()
            s.step(o)
            s.update()
        assert scaler.state_dict() == torch_scaler.state_dict()
    restored = make_scaler()
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()
    restored.scale(torch.ones(()))
    assert restored.update(new_scale=4.0)
    assert restored.get_scale() == 4.0


def test_a_tiny_scale_can_grow_again(make_optimizer):
    """A peer whose loss is NaN for a while gets good parameters from the others, and must be able to use them."""
    model, scaler = make_model(), make_scaler(growth_interval=1)
    opt = make_optimizer(model, batch_size_per_step=4, target_batch_size=4)
    batch = torch.randn(4, 6)
    for factor in [torch.nan] * 200 + [1.0] * 2:
        opt.zero_grad()
        scaler.scale(loss_of(model, batch) * factor).backward()
        scaler.step(opt)
        if factor == 1.0:
            assert opt.local_epoch > 0
        scaler.update()
    assert 0 < scaler.get_scale() < 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_only_public_methods_of_torch_are_used():
    source = inspect.getsource(sys.modules[GradScaler.__module__])
    torch_private = {
        name for name in dir(torch.amp.GradScaler("cpu")) if name.startswith("_") and not name.startswith("__")
    }
    assert not {name for name in torch_private - {"_growth_tracker"} if re.search(rf"self\.{name}\b", source)}


def test_other_optimizers_are_refused():
    with pytest.raises(AssertionError, match=r"shoal\.Optimizer"):
        make_scaler().unscale_(sgd(make_model().parameters()))
