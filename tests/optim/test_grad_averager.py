"""Accumulating gradients, and averaging them with other peers by samples."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from shoal.averaging import AveragingStage
from shoal.base.clock import get_dht_time
from shoal.errors import AveragingError
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.joint_optimizer import let_go
from tests.optim.conftest import in_parallel, wait_until

pytestmark = pytest.mark.devices


def make_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 4, dtype=dtype)), torch.nn.Parameter(torch.randn(5, dtype=dtype))]


def set_grads(parameters, value: float) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)


def mean_of(accumulator: GradientAccumulator) -> list[torch.Tensor]:
    targets = [torch.full_like(p, torch.nan).detach() for p in accumulator.parameters]
    accumulator.write_mean(targets)
    return targets


def test_every_sample_counts_the_same():
    parameters = make_parameters()
    accumulator = GradientAccumulator(parameters)
    for batch_size, value in [(4, 1.0), (8, 1.0), (4, 5.0)]:
        set_grads(parameters, value)
        accumulator.add(batch_size)
    assert (accumulator.samples, accumulator.batches) == (16, 3)
    for mean in mean_of(accumulator):
        assert torch.equal(mean, torch.full_like(mean, 2.0))
    accumulator.reset()
    assert all(torch.equal(mean, torch.zeros_like(mean)) for mean in mean_of(accumulator))


def test_a_gradient_that_became_grad_is_weighted():
    """A parameter that first takes part in a later batch, whose loss is made of two."""
    used, late = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    accumulator = GradientAccumulator([used, late], reuse_grad_buffers=True)
    used.sum().backward()
    accumulator.add(2)
    for factor in (1.0, 3.0):
        (factor * late).sum().backward()
    accumulator.add(4)
    _, mean = mean_of(accumulator)
    assert mean.item() == pytest.approx((1.0 + 3.0) * 4 / 6)


def test_it_equals_the_gradient_of_the_whole_batch():
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3).double()
    data = torch.randn(20, 6).double()
    accumulator = GradientAccumulator(list(model.parameters()))
    for part in data.split([3, 7, 10]):
        model.zero_grad()
        model(part).square().mean().backward()
        accumulator.add(len(part))
    model.zero_grad()
    model(data).square().mean().backward()
    for mean, parameter in zip(mean_of(accumulator), model.parameters(), strict=True):
        torch.testing.assert_close(mean, parameter.grad, rtol=1e-12, atol=1e-15)


def test_missing_gradients_are_zero_and_stay_missing():
    parameters = make_parameters()
    accumulator = GradientAccumulator(parameters)
    parameters[0].grad = torch.ones(3, 4)
    accumulator.add(2)
    assert parameters[1].grad is None
    means = mean_of(accumulator)
    assert torch.equal(means[0], torch.ones(3, 4))
    assert torch.equal(means[1], torch.zeros(5))


def test_half_precision_is_summed_in_single_precision():
    parameters = make_parameters(torch.float16)
    accumulator = GradientAccumulator(parameters)
    for _ in range(100):
        set_grads(parameters, 1000.0)  # the sum is beyond the range of fp16
        accumulator.add(1)
    assert accumulator.buffers[0].dtype == torch.float32
    assert mean_of(accumulator)[0].dtype == torch.float16
    assert torch.equal(mean_of(accumulator)[0], torch.full((3, 4), 1000.0).half())


def test_reused_buffers_hold_the_sum_that_backward_makes(caplog):
    parameters = make_parameters()
    accumulator = GradientAccumulator(parameters, reuse_grad_buffers=True)
    for _ in range(2):
        sum(p.sum() for p in parameters).backward()
        accumulator.add(4)
    grads = [p.grad for p in parameters]
    assert all(torch.equal(mean, torch.ones_like(mean)) for mean in mean_of(accumulator))
    assert accumulator.buffers[0] is grads[0]
    assert caplog.text == ""
    accumulator.reset()
    assert parameters[0].grad is grads[0]
    assert grads[0].sum() == 0


def test_reused_buffers_weigh_batches_by_their_size():
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3).double()
    data = torch.randn(31, 6).double()
    accumulator = GradientAccumulator(list(model.parameters()), reuse_grad_buffers=True)
    for _ in range(2):
        for part in data.split([3, 7, 3, 10, 8]):
            losses = model(part).square().sum(0) / (3 * len(part))
            losses[0].backward(retain_graph=True)  # one batch in two passes
            losses[1:].sum().backward()
            torch.autograd.grad(model(part).sum(), [model.weight])  # somebody else's gradients
            accumulator.add(len(part))
        means = mean_of(accumulator)
        reference = torch.nn.Linear(6, 3).double()
        reference.load_state_dict(model.state_dict())
        reference(data).square().mean().backward()
        for mean, parameter in zip(means, reference.parameters(), strict=True):
            torch.testing.assert_close(mean, parameter.grad, rtol=1e-12, atol=1e-15)
        accumulator.reset()


def test_nothing_is_remembered_of_batches_of_one_size():
    parameters = make_parameters()
    accumulator = GradientAccumulator(parameters, reuse_grad_buffers=True)
    accumulator.expect_batches_of(4)
    references = []
    parameters[0].register_hook(lambda grad: references.append(weakref.ref(grad)))
    for _ in range(2):
        sum(p.sum() for p in parameters).backward()
        assert references[-1]() is None or references[-1]() is parameters[0].grad
        accumulator.add(4)
    assert all(torch.equal(mean, torch.ones_like(mean)) for mean in mean_of(accumulator))


def test_a_batch_of_unexpected_size_is_told(caplog):
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3).double()
    accumulator = GradientAccumulator(list(model.parameters()), reuse_grad_buffers=True)
    accumulator.expect_batches_of(4)
    sizes, counted_as = [4, 3, 3, 4], [4, 4, 3, 4]
    data, total = torch.randn(sum(sizes), 6).double(), 0.0
    for part, weight in zip(data.split(sizes), counted_as, strict=True):
        model(part).square().mean().backward()
        accumulator.add(len(part))
        total += weight * model(part).square().mean()
    assert accumulator.samples == sum(counted_as)
    assert caplog.text.count("a batch of 3 samples instead of 4") == 1
    wanted = torch.autograd.grad(total / sum(counted_as), list(model.parameters()))
    for mean, grad in zip(mean_of(accumulator), wanted, strict=True):
        torch.testing.assert_close(mean, grad, rtol=1e-12, atol=1e-15)


def test_gradients_that_cannot_be_weighted_are_told(caplog):
    parameters = make_parameters()
    accumulator = GradientAccumulator(parameters, reuse_grad_buffers=True)
    set_grads(parameters, 1.0)
    with caplog.at_level(logging.WARNING):
        for batch_size in (3, 3, 2, 2):
            accumulator.add(batch_size)
    assert caplog.text.count("not made by backward") == 1


def test_gradients_of_backward_are_not_kept():
    parameters = make_parameters()
    accumulator = GradientAccumulator(parameters, reuse_grad_buffers=True)
    references = []
    parameters[0].register_hook(lambda grad: references.append(weakref.ref(grad)))
    sum((p * 2).sum() for p in parameters).backward()
    accumulator.add(1)
    assert references[-1]() is None
    sum((p * 2).sum() for p in parameters).backward()
    accumulator.close()
    assert references[-1]() is None
    sum((p * 2).sum() for p in parameters).backward()
    assert references[-1]() is None
    assert all(torch.equal(p.grad, torch.full_like(p, 6.0)) for p in parameters)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_empty_batches_are_refused(batch_size):
    with pytest.raises(ValueError, match="batch_size"):
        GradientAccumulator(make_parameters()).add(batch_size)


def make_averagers(make_dhts, closing, count: int, **options) -> list[GradientAverager]:
    options = {"prefix": "grads", "min_matchmaking_time": 30.0, "start": True, **options}
    return [closing(GradientAverager(make_parameters(), dht=dht, **options)) for dht in make_dhts(count)]


@pytest.mark.parametrize("reuse_grad_buffers", [False, True])
def test_peers_average_by_samples(make_dhts, closing, reuse_grad_buffers):
    averagers = make_averagers(make_dhts, closing, 3, reuse_grad_buffers=reuse_grad_buffers)
    when = get_dht_time() + 45.0
    controls = [averager.schedule_step(when, expected_group_size=3) for averager in averagers]
    for index, averager in enumerate(averagers):
        for _ in range(index + 1):
            if reuse_grad_buffers:
                (sum(p.sum() for p in averager.parameters) * (index + 1.0)).backward()
            else:
                set_grads(averager.parameters, index + 1.0)
            averager.accumulate_grads_(batch_size=4)
        assert averager.local_samples_accumulated == 4 * (index + 1)
        assert averager.local_times_accumulated == index + 1
    wait_until(lambda: all(c.stage == AveragingStage.AWAITING_TRIGGER for c in controls), "the group is complete")
    assert get_dht_time() < when, "as soon as everybody expected is there"
    results = in_parallel(*(lambda a=a, c=c: a.step(control=c) for a, c in zip(averagers, controls, strict=True)))
    assert all(len(result) == 3 for result in results)
    expected = (4 * 1 + 8 * 2 + 12 * 3) / 24
    for averager in averagers:
        assert averager.local_samples_accumulated == 0
        before = [parameter.grad for parameter in averager.parameters]
        with averager.use_averaged_gradients():
            for parameter in averager.parameters:
                torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected))
        assert all(p.grad is grad for p, grad in zip(averager.parameters, before, strict=True))


def test_withdrawing_does_not_fail_a_complete_group(make_dhts, closing):
    """Its averages have no memory, because it has not begun the round."""
    averagers = make_averagers(make_dhts, closing, 2)
    controls = [averager.schedule_step(expected_group_size=2) for averager in averagers]
    wait_until(lambda: all(c.stage == AveragingStage.AWAITING_TRIGGER for c in controls), "the group is complete")
    stays, _ = averagers
    set_grads(stays.parameters, 3.0)
    stays.accumulate_grads_(batch_size=4)
    in_parallel(lambda: stays.step(control=controls[0]), lambda: let_go([controls[1]], timeout=30))
    assert not stays.last_round.failed_peers
    assert len(stays.last_round.peers) == 2
    with stays.use_averaged_gradients():
        for parameter in stays.parameters:
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 3.0))


def test_gradients_that_nobody_has_are_missing(make_dhts, closing):
    (averager,) = make_averagers(make_dhts, closing, 1)
    averager.parameters[0].grad = torch.ones(3, 4)
    averager.accumulate_grads_(2)
    averager.load_accumulators_into_averager_()
    with averager.use_averaged_gradients():
        assert averager.parameters[0].grad is not None
        assert averager.parameters[1].grad is None
    assert averager.parameters[1].grad is None


def test_a_failed_round_leaves_the_local_mean(make_dhts, closing):
    (averager,) = make_averagers(make_dhts, closing, 1, min_matchmaking_time=0.1, request_timeout=0.05)
    for batch_size, value in [(1, 4.0), (3, 0.0)]:
        set_grads(averager.parameters, value)
        averager.accumulate_grads_(batch_size)
    with pytest.raises(AveragingError, match="group"):
        averager.step(timeout=0.5, reset_accumulators=False)
    assert averager.local_samples_accumulated == 4
    with averager.use_averaged_gradients():
        assert torch.equal(averager.parameters[0].grad, torch.ones(3, 4))


def test_controls_are_used_once(make_dhts, closing):
    (averager,) = make_averagers(make_dhts, closing, 1)
    with pytest.raises(AssertionError, match="weight"):
        averager.schedule_step(weight=1.0)
    control = averager.schedule_step(timeout=5)
    with pytest.raises(RuntimeError, match="allow_retries"):
        averager.step(control=control, allow_retries=False)
    assert averager.step(control=control, wait=False) is control
    with pytest.raises(AssertionError, match="used before"):
        averager.step(control=control)
    control.cancel()


def test_forgotten_results_and_accumulators_are_reported(make_dhts, closing, caplog):
    (averager,) = make_averagers(make_dhts, closing, 1)
    set_grads(averager.parameters, 1.0)
    averager.accumulate_grads_(1)
    with caplog.at_level(logging.WARNING):
        averager.step(wait=False, reset_accumulators=False).cancel()
        assert caplog.text == ""
        averager.accumulate_grads_(1)
        averager.accumulate_grads_(1)
        assert caplog.text.count("reset_accumulated_grads_") == 1
        averager.step(wait=False).cancel()
    assert "not used" in caplog.text


def test_bad_buffers_are_refused(make_dhts):
    (dht,) = make_dhts(1)
    parameters = make_parameters()
    with pytest.raises(ValueError, match="shape"):
        GradientAverager(
            parameters, dht=dht, prefix="p", start=False, averaged_grads=[torch.zeros(3, 4), torch.zeros(4)]
        )
    with pytest.raises(ValueError, match="1 averaged_grads for 2"):
        GradientAverager(parameters, dht=dht, prefix="p", start=False, averaged_grads=[torch.zeros(3, 4)])
    with pytest.raises(ValueError, match="accumulate_grads_on"):
        GradientAverager(
            parameters, dht=dht, prefix="p", start=False, reuse_grad_buffers=True, accumulate_grads_on="cpu"
        )


def test_a_factory_presets_options(make_dhts, closing):
    (dht,) = make_dhts(1)
    factory = GradientAverager.get_factory(warn=False)
    averager = closing(factory(make_parameters(), dht=dht, prefix="p", start=True))
    assert isinstance(averager, GradientAverager)
    assert averager.warn is False


def test_a_round_may_precede_the_one_before(make_dhts, closing):
    """What a peer says when it stops looking must not hide that it looks again."""
    averagers = make_averagers(make_dhts, closing, 2, min_matchmaking_time=0.5)
    for wait in (50.0, 40.0, 20.0):
        when = get_dht_time() + wait
        controls = [averager.schedule_step(when, timeout=60, expected_group_size=2) for averager in averagers]
        in_parallel(*(lambda a=a, c=c: a.step(control=c) for a, c in zip(averagers, controls, strict=True)))
        for averager in averagers:
            averager.notify_used_averaged_gradients()
        assert get_dht_time() < when, "as soon as the two are there"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_averages_of_half_precision_gradients_do_not_underflow(make_dhts, closing, dtype):
    (dht,) = make_dhts(1)
    parameters = make_parameters(dtype)
    averager = closing(GradientAverager(parameters, dht=dht, prefix="run", start=True))
    tiny = 2.0**-24
    set_grads(parameters, tiny)
    averager.accumulate_grads_(1)
    set_grads(parameters, 0.0)
    averager.accumulate_grads_(3)
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as averaged:
        assert all(torch.equal(grad, torch.full(grad.shape, tiny / 4)) for grad in averaged)
    with averager.use_averaged_gradients():
        assert all(parameter.grad.dtype is dtype for parameter in parameters)
