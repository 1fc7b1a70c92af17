"""Outer parameters come back into a model that has been trained on: known numbers, and what each rule promises."""

from __future__ import annotations

import pytest
import torch

from shoal.optim.diloco.fragments import Fragment, Fragments, MergePolicy, OuterState, default_outer_optimizer, shift
from shoal.optim.diloco.slots import Schedule
from tests.optim.diloco.quadratic import A, B, near, train

HALF = [
    (3, -1.5, 1.995, (0.875, 2.625), (1.435, 2.31)),
    (5, 0.9375, -1.246875, (0.0, -1.9375), (-0.6234375, -1.5921875)),
    (7, 0.0109375, 2.83095313, (1.0271875, 2.956875), (1.92907031, 2.89391406)),
    (9, -0.233398438, -1.46801758, (-0.0389648437, -1.97451172), (-0.753491211, -1.72126465)),
    (11, 0.779516602, 2.55344448, (1.05806689, 2.99336963), (1.80575569, 2.77340706)),
    (13, -0.438345337, -1.23108762, (-0.0470932007, -1.98257904), (-0.639090408, -1.60683333)),
]
"""Of each update of a fragment: when it is applied, mean, outer parameter, and the parameters of A and B before and
after it."""
REBASED = [
    (3, -1.5, 1.995, (0.875, 2.625), (2.12, 2.37)),
    (5, 0.9375, -1.246875, (0.0, -1.9375), (-1.246875, -1.309375)),
    (7, -0.035625, 2.89288125, (1.07, 2.960625), (2.82288125, 2.93225625)),
    (9, -0.212109375, -1.49633203, (-0.0779296875, -1.95683594), (-1.41840234, -1.53949609)),
    (11, 0.783185156, 2.63689437, (1.11393008, 2.99576602), (2.52296429, 2.64112835)),
    (13, -0.436463379, -1.27397597, (-0.0886501465, -1.97121851), (-1.18532583, -1.30275747)),
]


@pytest.mark.parametrize(("alpha", "expected"), [(0.5, HALF), ("rebase", REBASED)])
def test_fragments_applied_one_step_later(alpha, expected):
    """Two fragments of one parameter each, exchanged every four steps."""
    models = [[torch.nn.Parameter(torch.zeros(1)) for _ in range(2)] for _ in range(2)]
    fragments = [Fragments(model, [[each] for each in model]) for model in models]
    states = [OuterState(torch.zeros(1), default_outer_optimizer("pseudo_gradients")) for _ in range(2)]
    schedule, mixing, slot = Schedule(2, sync_every=4), MergePolicy(alpha), 0
    under_way: dict[int, tuple[int, torch.Tensor, list[torch.Tensor]]] = {}
    seen = []
    for step in range(1, 14):
        for model, target in zip(models, (A, B), strict=True):
            for parameter, goal in zip(model, target, strict=True):
                train(parameter, goal, 1)
        if step == schedule.due_at(slot):
            number = schedule.fragment_of(slot)
            sent = [each[number].read() for each in fragments]
            under_way[step + 1] = number, states[number].values - (sent[0] + sent[1]) / 2, sent
            slot += 1
        if step in under_way:
            number, mean, sent = under_way.pop(step)
            before = [model[number].item() for model in models]
            states[number].step(mean.clone())
            for each, own in zip(fragments, sent, strict=True):
                mixing.apply(each[number], states[number].values, own)
            after = [model[number].item() for model in models]
            seen.append((step, mean.item(), states[number].values.item(), before, after))
    assert len(seen) == len(expected)
    for (step, *found), (due, *known) in zip(seen, expected, strict=True):
        assert step == due
        for value, number in zip(found, known, strict=True):
            near(torch.tensor(value), number)


def fragment(*values: float, dtype: torch.dtype = torch.float32) -> Fragment:
    return Fragment.of([torch.nn.Parameter(torch.tensor(values, dtype=dtype))])


def test_rules_that_replace_the_model():
    outer = torch.tensor([0.1, 0.2])
    for mixing in (MergePolicy(0.0), MergePolicy("rebase")):
        own = fragment(5.0, 6.0)
        mixing.apply(own, outer, None)
        assert torch.equal(own.read(), outer)


def test_alpha_1_leaves_the_model_alone():
    own = fragment(5.0, 6.0)
    MergePolicy(1.0).apply(own, torch.ones(2), torch.zeros(2))
    assert own.read().tolist() == [5.0, 6.0]


def test_the_rounding_of_the_model_is_no_progress():
    """What bfloat16 cannot hold of the outer parameters is not part of what the exchange has changed."""
    own = fragment(1.0, 2.0, dtype=torch.bfloat16)
    MergePolicy("rebase").apply(own, torch.tensor([1.001, 2.001]), own.read())
    assert own.read().tolist() == [1.0, 2.0]
    MergePolicy(0.5).apply(own, torch.tensor([1.001, 4.0]), None)
    assert own.read().tolist() == [1.0, 3.0]


def test_a_shift_keeps_the_progress():
    own = fragment(5.0, 6.0)
    shift(own, torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0]))
    assert own.read().tolist() == [6.0, 4.0]


def test_the_default_rule():
    assert MergePolicy.choose(None, 0) == MergePolicy(0.0)
    assert MergePolicy.choose(None, 3) == MergePolicy.choose(None, None) == MergePolicy("rebase")
    assert MergePolicy.choose(0.25, 3) == MergePolicy(0.25)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), "mean", True])
def test_rules_that_are_none(alpha):
    with pytest.raises(ValueError, match="fragment_update_alpha"):
        MergePolicy(alpha)
