"""Inner optimizers: one or several, made or to be made, with schedules, and what an overflow skips."""

from __future__ import annotations

import functools
from unittest.mock import Mock

import pytest
import torch

import shoal
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.inner import InnerOptimizers

SGD = functools.partial(torch.optim.SGD, lr=1.0)


def parameters(count=2):
    return [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_a_function_or_an_optimizer_or_several():
    a, b = parameters()
    for given, params in [(SGD, [a, b]), (SGD([a, b]), None), ([SGD([a]), SGD([b])], None)]:
        inner = InnerOptimizers(given, params, None)
        assert [*map(id, inner.parameters)] == [id(a), id(b)]
        assert ("optimizers" in inner.state_dict()) == isinstance(given, list)
    assert len(inner.param_groups) == 2


def test_all_step_and_all_schedules_move():
    a, b = parameters()
    halve = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    inner = InnerOptimizers([SGD([a]), SGD([b])], None, halve)
    a.grad, b.grad = torch.ones(2), torch.ones(2)
    assert inner.step(Mock(), None)
    inner.move_schedules(2)
    assert [group["lr"] for group in inner.param_groups] == [0.25, 0.25]
    inner.move_schedules(1)
    assert inner.param_groups[0]["lr"] == 0.25
    inner.step(Mock(), None)
    assert a.tolist() == b.tolist() == [-1.25, -1.25]


@pytest.mark.parametrize("named", [True, False])
def test_unfreezing_a_parameter_is_refused(named):
    """No fragment has it, so that each peer would have values of its own."""
    a, b = parameters()
    b.requires_grad_(False)
    inner = InnerOptimizers(SGD, [("a", a), ("b", b)] if named else [a, b], None)
    a.grad = torch.ones(2)
    assert inner.step(Mock(), None)
    a.requires_grad_(False)  # it is exchanged all the same
    assert inner.step(Mock(), None)
    b.requires_grad_(True)
    with pytest.raises(
        ValueError, match=f"parameter {'b' if named else 'number 1'} was frozen .* freeze it afterwards"
    ):
        inner.step(Mock(), None)


def test_an_overflow_in_one_of_them_skips_all():
    a, b = parameters()
    inner = InnerOptimizers([SGD([a]), SGD([b])], None, None)
    scaler = shoal.GradScaler(device="cpu", init_scale=4.0)
    scaler.scale(torch.zeros(1))
    trainer = Mock(param_groups=inner.param_groups)
    a.grad, b.grad = torch.ones(2), torch.tensor([1.0, float("inf")])
    assert not inner.step(trainer, scaler)
    assert not a.any()
    scaler.update()
    assert scaler.get_scale() == 2.0
    b.grad = torch.ones(2)
    assert inner.step(trainer, scaler)
    assert a.tolist() == b.tolist() == [-0.5, -0.5]


def test_gradients_are_unscaled_once_before_they_are_clipped(make_dhts, closing):
    (dht,) = make_dhts(1)
    (a,) = parameters(1)
    opt = closing(DiLoCo(dht=dht, run_id="run", optimizer=SGD([a]), sync_every=100, batch_size_per_step=1))
    scaler = shoal.GradScaler(device="cpu", init_scale=4.0)
    for step in (1, 2):
        opt.zero_grad()
        scaler.scale(3 * a.sum()).backward()
        assert scaler.unscale_(opt)
        assert a.grad.tolist() == [3.0, 3.0]
        torch.nn.utils.clip_grad_value_([a], 1.0)
        scaler.step(opt)
        scaler.update()
        assert a.tolist() == [-step, -step]
    opt.zero_grad()
    scaler.scale(3 * a.sum()).backward()
    scaler.step(opt)
    assert a.tolist() == [-5.0, -5.0]
    with pytest.raises(ValueError, match=r"must be a shoal\.GradScaler, got GradScaler"):
        opt.step(grad_scaler=torch.amp.GradScaler("cpu"))


def test_statistics_that_are_not_finite_are_forgotten():
    (a,) = parameters(1)
    inner = InnerOptimizers(torch.optim.Adam([a]), None, None)
    a.grad = torch.tensor([1.0, float("nan")])
    inner.step(Mock(), None)
    inner.forget_what_is_not_finite()
    statistics = inner.optimizers[0].state[a]
    assert statistics["exp_avg"][0] > 0
    assert statistics["exp_avg"][1] == statistics["exp_avg_sq"][1] == 0


def test_what_contradicts_itself():
    a, b = parameters()
    schedule = torch.optim.lr_scheduler.ExponentialLR(SGD([a]), gamma=0.5)
    for given, scheduler, message in [
        ([], None, "empty list"),
        ([SGD([a]), SGD], None, "only a single one"),
        ([SGD([a]), SGD([b])], schedule, "for each of them"),
        ([SGD([a]), SGD([a])], None, "by two optimizers"),
        (SGD, None, "together with params"),
    ]:
        with pytest.raises(ValueError, match=message):
            InnerOptimizers(given, None, scheduler)
