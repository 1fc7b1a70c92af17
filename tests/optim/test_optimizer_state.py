"""Optimizer state: made to exist without side effects, sent, and put into another peer's."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from shoal.optim.optimizer_state import (
    dump_optimizer_state,
    has_statistics,
    initialize_optimizer_state_,
    load_optimizer_state,
)
from shoal.optim.schedules import scheduled_hyperparameters
from shoal.serializer import MSGPackSerializer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def make_parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: int, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_initialization_changes_nothing_that_training_could_see(name):
    plain, initialized = make_parameters(), make_parameters()
    plain_optimizer, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](initialized)
    initialized[0].grad = torch.ones(3, 4)
    groups_before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    initialize_optimizer_state_(optimizer)
    assert optimizer.state_dict()["param_groups"] == groups_before
    assert initialized[0].grad.sum() == 12
    assert initialized[1].grad is None
    assert all(torch.equal(a, b) for a, b in zip(plain, initialized, strict=True))
    assert has_statistics(optimizer) == (name != "sgd")
    train(plain_optimizer, plain, 3)
    train(optimizer, initialized, 3)
    assert all(torch.equal(a, b) for a, b in zip(plain, initialized, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_a_trained_optimizer_continues_elsewhere(name):
    donor, joiner = make_parameters(), make_parameters()
    donor_optimizer, optimizer = OPTIMIZERS[name](donor), OPTIMIZERS[name](joiner)
    initialize_optimizer_state_(optimizer)
    train(donor_optimizer, donor, 4)
    metadata, tensors = dump_optimizer_state(donor_optimizer)
    received = MSGPackSerializer.loads(MSGPackSerializer.dumps(metadata))
    identities = [id(value) for state in optimizer.state.values() for value in state.values()]
    load_optimizer_state(optimizer, received, [tensor.clone() for tensor in tensors])
    with torch.no_grad():
        for mine, theirs in zip(joiner, donor, strict=True):
            mine.copy_(theirs)
    for state in optimizer.state.values():
        kept = [value for value in state.values() if isinstance(value, torch.Tensor)]
        assert all(id(value) in identities for value in kept), "statistics must be loaded in place"
    train(donor_optimizer, donor, 2, seed=5)
    train(optimizer, joiner, 2, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(donor, joiner, strict=True))


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    parameters = make_parameters()
    optimizer = OPTIMIZERS["adam"](parameters)
    initialize_optimizer_state_(optimizer)
    metadata, tensors = dump_optimizer_state(optimizer)
    other_kind = OPTIMIZERS["rmsprop"](make_parameters())
    initialize_optimizer_state_(other_kind)
    hostile = [
        (dump_optimizer_state(other_kind)),
        (metadata, tensors[:-1]),
        (metadata, [torch.zeros(1000), *tensors[1:]]),
        ({}, tensors),
        (None, tensors),
        ({**metadata, "groups": []}, tensors),
        ({**metadata, "groups": 5}, tensors),
    ]
    before = copy.deepcopy(optimizer.state_dict())
    for given, given_tensors in hostile:
        with pytest.raises(ValueError, match=r"."):
            load_optimizer_state(optimizer, given, given_tensors)
    assert str(optimizer.state_dict()) == str(before)


def test_own_hyperparameters_stay_unless_a_schedule_moves_them(caplog):
    donor = torch.optim.SGD(make_parameters(), lr=0.5, momentum=0.8)
    own = torch.optim.SGD(make_parameters(), lr=0.1, momentum=0.9)
    metadata, tensors = dump_optimizer_state(donor)
    with caplog.at_level(logging.WARNING):
        load_optimizer_state(own, metadata, tensors)
    assert own.param_groups[0]["lr"] == 0.1
    assert "lr = 0.5" in caplog.text
    assert "momentum = 0.8" in caplog.text
    load_optimizer_state(own, metadata, tensors, scheduled_hyperparameters(StepLR(own, 5)))
    assert own.param_groups[0]["lr"] == 0.5
    assert own.param_groups[0]["momentum"] == 0.9


def test_statistics_are_made_for_a_few_parameters_at_a_time(monkeypatch):
    monkeypatch.setattr("shoal.optim.optimizer_state.PART_BYTES", 100)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(n)) for n in sizes]} for sizes in ([10, 10, 40, 5], [1])]
    optimizer = torch.optim.Adam(groups)
    before = [group["params"] for group in optimizer.param_groups]
    step, parts = optimizer.step, []

    def step_and_note() -> None:
        parts.append([len(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
        step()

    optimizer.step = step_and_note
    initialize_optimizer_state_(optimizer)
    assert parts == [[10, 10], [40], [5], [1]]
    assert [group["params"] for group in optimizer.param_groups] == before
    assert len(optimizer.state) == 5
