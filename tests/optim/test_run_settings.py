"""What peers of a run must have in common: how two peers differ, in words, and what they do not tell strangers."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch
from torch.optim import lr_scheduler

from shoal.optim.progress.run_settings import (
    MAX_VALUE_CHARACTERS,
    TENSORS,
    ParameterSettings,
    RunSettings,
    _cut,
    compare_parameters,
    describe_optimizer,
)
from shoal.optim.setup.schedules import describe_schedule

FROZEN_BASE = "frozen base"


def parameter(name: str, *shape: int, type: str = "float32", trained: bool = True) -> ParameterSettings:
    return ParameterSettings(name, shape, type, trained)


TWO = [parameter("first.weight", 8, 6), parameter("first.bias", 8)]


def settings(**changes: object) -> RunSettings:
    usual = RunSettings(
        "Optimizer", {TENSORS: "1", "grad_compression": "float16"}, {"target_batch_size": "4096"}, parameters=TWO
    )
    return msgspec.structs.replace(usual, **changes)


def test_equal_settings_have_equal_hashes_whatever_their_order():
    turned = settings(needed={"grad_compression": "float16", TENSORS: "1"})
    assert settings().digest == turned.digest
    assert settings().differences(turned) == []
    assert settings().can_average_with(turned)
    assert settings().digest != settings(shared={"target_batch_size": "4097"}).digest


@pytest.mark.parametrize(
    ("change", "told", "can_average", "is_option"),
    [
        ({"kind": "DiLoCo"}, ["this peer trains with Optimizer, and that one with DiLoCo"], False, False),
        (
            {"needed": {TENSORS: "1", "grad_compression": "float32"}},
            ["grad_compression is float16 here and float32 there"],
            False,
            False,
        ),
        ({"shared": {"target_batch_size": "4097"}}, ["target_batch_size is 4096 here and 4097 there"], True, True),
        ({"shared": {}}, [], True, False),
        (
            {"needed": {TENSORS: "2", "grad_compression": "float16"}},
            ["the shapes, types or roles of the averaged tensors differ"],
            False,
            False,
        ),
        ({"needed": {TENSORS: "1"}}, ["grad_compression is float16 here and not set there"], False, False),
    ],
    ids=["kind", "compression", "target", "auxiliary", "tensors", "missing"],
)
def test_differences_name_both_sides(change, told, can_average, is_option):
    other = settings(**change)
    assert settings().differences(other) == told
    assert settings().can_average_with(other) is can_average
    assert settings().differs_in_options(other) is is_option


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (TWO, []),
        (
            [parameter("first.weight", 16, 6), TWO[1]],
            ["parameter 'first.weight' has the shape (8, 6) here and (16, 6) there"],
        ),
        (TWO[:1], ["parameter 'first.bias' of shape (8,) is missing there"]),
        ([*TWO, parameter("head", 2)], ["parameter 'head' of shape (2,) is missing here"]),
        (
            [TWO[0], parameter("first.bias", 8, trained=False)],
            ["parameter 'first.bias' is trained here and frozen there"],
        ),
        (
            TWO[::-1],
            ["the parameters have another order: number 0 is 'first.weight' here and 'first.bias' there"],
        ),
        ([parameter("a", 8, 6), parameter("b", 8)], []),
        (
            [parameter("", 16, 6), parameter("", 8)],
            ["parameter 'first.weight' has the shape (8, 6) here and (16, 6) there"],
        ),
        (
            [parameter("", 8, 6)],
            ["the optimizer has 2 parameters here and 1 there"],
        ),
        (
            [*TWO, TWO[0]],
            ["the optimizer has 2 parameters here and 3 there"],
        ),
    ],
    ids=[
        "same",
        "shape",
        "missing",
        "extra",
        "frozen",
        "order",
        "renamed",
        "without names",
        "fewer without names",
        "one name twice",
    ],
)
def test_parameters_are_compared_by_name(other, told):
    assert compare_parameters(TWO, other) == told


def test_parameters_of_equal_shape_in_another_order_differ():
    """Their averages would be of different things, and nothing else shows it."""
    same = [parameter("a", 4, 4), parameter("b", 4, 4)]
    assert compare_parameters(same, same[::-1]) == [
        "the parameters have another order: number 0 is 'a' here and 'b' there"
    ]


def test_types_are_told_where_nothing_else_differs():
    half = [parameter("first.weight", 8, 6, type="float16"), TWO[1]]
    other = settings(needed={TENSORS: "2", "grad_compression": "float16"}, parameters=half)
    assert settings().differences(other) == [
        "parameter 'first.weight' has values of type float32 here and float16 there"
    ]
    assert settings().differences(settings(parameters=half)) == [], "both accumulate in single precision"


def test_a_model_that_differs_everywhere_is_told_in_a_few_words():
    mine, other = ([parameter(f"p{n}", n + wide) for n in range(1000)] for wide in (1, 2))
    told = compare_parameters(mine, other)
    assert len(told) == 5
    assert told[-1] == "996 more parameters differ"


def test_texts_of_others_are_shown_on_one_line_and_cut():
    hostile = "\x1b[31m\n" + "x" * MAX_VALUE_CHARACTERS
    [told] = settings().differences(settings(shared={"target_batch_size": hostile[:MAX_VALUE_CHARACTERS]}))
    assert told.isprintable()
    assert len(told) < 200


def test_what_users_declare_is_shown_only_to_those_that_name_it_too():
    mine = settings(declared={FROZEN_BASE: "secret path", "data": "poems"})
    shown = mine.shown_to(settings(declared={"data": "prose"}))
    assert (shown.declared, shown.hidden) == ({"data": "poems"}, 1)
    [told, hidden] = settings(declared={"data": "prose"}).differences(shown)
    assert told == "data is prose here and poems there"
    assert hidden == "1 setting of agreement= or frozen_base= there, and not here"
    assert not settings(declared={"data": "poems"}).can_average_with(shown)
    [base] = mine.differences(settings(declared={FROZEN_BASE: "another", "data": "poems"}))
    assert base.startswith("frozen base is secret path here and another there (load the same checkpoint")


def test_long_texts_stay_different():
    one, other = _cut("x" * 5000 + "1"), _cut("x" * 5000 + "2")
    assert len(one) == len(other) <= MAX_VALUE_CHARACTERS
    assert one != other


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)


def decay(epoch: int, factor: float) -> float:
    return factor**epoch


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), lambda o: lr_scheduler.CosineAnnealingLR(o, 200)),
        (lambda o: lr_scheduler.MultiStepLR(o, [3, 5]), lambda o: lr_scheduler.MultiStepLR(o, [3, 6])),
        (
            lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 5)], [10]),
            lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 5)], [20]),
        ),
        (
            lambda o: lr_scheduler.LambdaLR(o, functools.partial(decay, factor=0.9)),
            lambda o: lr_scheduler.LambdaLR(o, functools.partial(decay, factor=0.8)),
        ),
        (
            lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
            lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.8**epoch),
        ),
        (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: [1.0, 0.5][epoch]), lambda o: None),
    ],
    ids=["cosine", "steps", "sequence", "partial", "function", "short function"],
)
def test_schedules_are_told_apart_wherever_they_stand(make, other):
    one = make(optimizer())
    told = describe_schedule(one)
    assert told == describe_schedule(make(optimizer()))
    assert told != describe_schedule(other(optimizer()))
    one.optimizer.step()
    one.step()
    assert describe_schedule(one) == told, "it has moved"


def test_optimizers_are_described_by_what_changes_their_steps():
    assert describe_optimizer(optimizer()) == ("SGD(lr=0.1, momentum=0.9, dampening=0, nesterov=False, weight_decay=0)")
