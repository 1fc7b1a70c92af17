"""Outer parameters and their optimizers: known numbers, the same bits as torch where it rounds once, and hand-over."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shoal.optim.diloco.fragments import Fragment, OuterState, SteadySGD, default_outer_optimizer, make_outer_optimizer
from tests.optim.diloco.quadratic import A, B, near, train

PLAIN = partial(torch.optim.SGD, lr=1.0)


def pseudo_gradient(state: OuterState, target: torch.Tensor, steps: int = 2) -> torch.Tensor:
    model = state.values.clone()
    train(model, target, steps)
    return state.values - model


def test_diloco_with_the_default_outer_optimizer():
    state = OuterState(torch.zeros(2), default_outer_optimizer("pseudo_gradients"))
    for delta_a, delta_b, momentum, expected in [
        ((-0.75, 0), (-2.25, 1.5), (-1.5, 0.75), (1.995, -0.9975)),
        ((0.74625, -0.748125), (-0.75375, 0.751875), (-1.35375, 0.676875), (2.8504875, -1.42524375)),
        (
            (1.38786563, -1.06893281),
            (-0.112134375, 0.431067188),
            (-0.580509375, 0.290254688),
            (2.76970247, -1.38485123),
        ),
    ]:
        of_a, of_b = pseudo_gradient(state, A), pseudo_gradient(state, B)
        near(of_a, delta_a)
        near(of_b, delta_b)
        state.step((of_a + of_b) / 2)
        near(state.optimizer.state[state.parameter]["momentum_buffer"], momentum)
        near(state.values, expected)
    assert state.version == 3


def test_rate_1_gives_the_mean_of_peers():
    state = OuterState(torch.zeros(2), PLAIN)
    for expected in [(1.5, -0.75), (1.875, -0.9375), (1.96875, -0.984375)]:
        state.step((pseudo_gradient(state, A) + pseudo_gradient(state, B)) / 2)
        near(state.values, expected)


def test_hooks_clip_the_mean():
    state = OuterState(torch.zeros(2), PLAIN)
    clip = partial(torch.nn.utils.clip_grad_norm_, [state.parameter], 1.0)
    state.optimizer.register_step_pre_hook(lambda *_: clip() and None)
    for expected in [(0.894427191, -0.447213595), (1.7236068, -0.861803399), (1.9309017, -0.96545085)]:
        state.step((pseudo_gradient(state, A) + pseudo_gradient(state, B)) / 2)
        near(state.values, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"weight_decay": 0.1, "momentum": 0.5},
        {"maximize": True},
    ],
    ids=str,
)
def test_its_sgd_makes_the_steps_of_torch(options):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(1001)) for _ in range(2))
    mine = make_outer_optimizer(partial(torch.optim.SGD, lr=0.7, **options), ours)
    reference = torch.optim.SGD([theirs], lr=0.7, **options)
    assert type(mine) is SteadySGD
    for _ in range(5):
        ours.grad = torch.randn(1001)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_its_sgd_rounds_after_each_operation():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = make_outer_optimizer(default_outer_optimizer("pseudo_gradients"), parameter)
    values, momentum = parameter.detach().numpy().copy(), None
    for _ in range(4):
        parameter.grad = torch.randn(1000)
        grad = parameter.grad.numpy().copy()
        optimizer.step()
        rate, factor = grad.dtype.type(0.7), grad.dtype.type(0.9)
        momentum = grad if momentum is None else momentum * factor + grad
        values = values - (grad + momentum * factor) * rate
        assert (parameter.detach().numpy() == values).all()


def test_other_torch_optimizers_are_used_as_is():
    state = OuterState(torch.zeros(2), partial(torch.optim.Adam, lr=0.1))
    assert type(state.optimizer) is torch.optim.Adam
    state.step(torch.tensor([1.0, -1.0]))
    near(state.values, (-0.1, 0.1))


def test_the_gradient_is_there_only_during_the_step():
    state = OuterState(torch.zeros(2), PLAIN)
    state.step(torch.ones(2))
    assert state.parameter.grad is None


def test_learning_rates_may_change():
    state = OuterState(torch.zeros(1), PLAIN)
    schedule = torch.optim.lr_scheduler.ExponentialLR(state.optimizer, 0.5)
    for expected in (-1.0, -1.5, -1.75):
        state.step(torch.ones(1))
        schedule.step()
        near(state.values, [expected])


def test_a_schedule_follows_the_versions():
    halve = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    donor, newcomer = (OuterState(torch.zeros(1), PLAIN, halve) for _ in range(2))
    for expected in (-1.0, -1.5):
        donor.step(torch.ones(1))
        near(donor.values, [expected])
    newcomer.load(*donor.dump())
    for state in (donor, newcomer):
        state.step(torch.ones(1))
        near(state.values, [-1.75])
    with pytest.raises(ValueError, match="ReduceLROnPlateau depends on a metric"):
        OuterState(torch.zeros(1), PLAIN, torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_a_newcomer_continues_as_its_donor():
    donor, newcomer = (OuterState(torch.zeros(2), default_outer_optimizer("pseudo_gradients")) for _ in range(2))
    donor.step(torch.tensor([1.0, 2.0]))
    metadata, tensors = donor.dump()
    newcomer.load(metadata, [tensor.clone() for tensor in tensors])
    assert newcomer.version == 1
    for state in (donor, newcomer):
        state.step(torch.tensor([0.5, -1.0]))
    assert torch.equal(donor.values, newcomer.values)


def test_states_that_do_not_fit_are_refused():
    state, other = (OuterState(torch.zeros(2), default_outer_optimizer("pseudo_gradients")) for _ in range(2))
    other.step(torch.ones(2))
    metadata, tensors = other.dump()
    broken = [torch.tensor([1.0, float("nan")]), *tensors[1:]]
    bad = [
        (None, tensors),
        ({**metadata, "version": -1}, tensors),
        (metadata, []),
        (metadata, [torch.zeros(3), *tensors[1:]]),
        (metadata, tensors[:1]),
        (metadata, broken),
        ({**metadata, "optimizer": {}}, tensors),
    ]
    for wrong in bad:
        with pytest.raises(ValueError, match=r"."):
            state.load(*wrong)
    assert state.version == 0
    assert not state.values.any()


def test_functions_that_make_no_outer_optimizer():
    with pytest.raises(TypeError, match="returned a list"):
        OuterState(torch.zeros(2), list)
    other = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="the parameters that it gets"):
        OuterState(torch.zeros(2), lambda _: torch.optim.SGD([other], lr=1.0))
    with pytest.raises(ValueError, match="LBFGS"):
        OuterState(torch.zeros(2), torch.optim.LBFGS)


@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.7, momentum=0.9),
        partial(torch.optim.Adagrad, lr=0.1),
    ],
)
def test_untrained_parameters_are_left_alone(factory):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, generator=generator)
    apart = [torch.nn.Parameter(part.clone()) for part in start.split([3, 2])]
    reference, state = factory(apart), OuterState(start.clone(), factory)
    fragment = Fragment.of(apart)
    for number in range(6):
        mean = torch.randn(5, generator=generator)
        is_frozen = number >= 3
        if is_frozen:
            mean[:3] = 0
        assert fragment.unchanged(mean) == [slice(0, 3)] * is_frozen
        for parameter, part in zip(apart, mean.split([3, 2]), strict=True):
            parameter.grad = part.clone()
        if is_frozen:
            apart[0].grad = None
        reference.step()
        state.step(mean, fragment.unchanged(mean))
        torch.testing.assert_close(state.values, torch.cat([parameter.detach() for parameter in apart]))
