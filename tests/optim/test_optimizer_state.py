"""Optimizer state: made to exist without side effects, sent, and put into another peer's."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from shoal.base.serializer import MSGPackSerializer
from shoal.optim.setup.optimizer_state import (
    dump_optimizer_state,
    has_statistics,
    initialize_optimizer_state_,
    keep_mode,
    load_optimizer_state,
    noting_state,
    state_names,
    without_hyperparameters,
)
from shoal.optim.setup.schedules import scheduled_hyperparameters

pytestmark = pytest.mark.devices

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
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.1, t0=2),
    "schedule-free": lambda p: schedule_free("AdamWScheduleFree", p, warmup_steps=2),
    "schedule-free sgd": lambda p: schedule_free("SGDScheduleFree", p, weight_decay=0.1),
    "schedule-free radam": lambda p: schedule_free("RAdamScheduleFree", p),
    "prodigy": lambda p: pytest.importorskip("prodigyopt").Prodigy(p, d_coef=3.0, slice_p=2),
    "counting": lambda p: CountingSGD(p, lr=0.1),
}


def schedule_free(name: str, parameters: list[torch.nn.Parameter], **options) -> torch.optim.Optimizer:
    optimizer = getattr(pytest.importorskip("schedulefree"), name)(parameters, lr=0.1, **options)
    optimizer.train()
    return optimizer


class CountingSGD(torch.optim.SGD):
    """Counts steps in an entry that its first step makes, and keeps a tensor of several values in its groups."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.5)
        for group in self.param_groups:
            group["recent"] = torch.zeros(3)
        self.defaults["recent"] = None

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["recent"] = torch.cat([group["recent"][1:], torch.tensor([group["step"] * 1.0])])
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.add_(group["recent"].sum() / 100)


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
    assert str(optimizer.state_dict()["param_groups"]) == str(groups_before)
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


def test_states_that_do_not_fit_change_nothing():
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


def test_statistics_are_made_in_parts(monkeypatch):
    monkeypatch.setattr("shoal.optim.setup.optimizer_state.PART_BYTES", 100)
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


# --- numbers in parameter groups --------------------------------------------------------------------------------------


def test_state_in_groups_differs_from_hyperparameters():
    def names_of(name: str) -> set[str]:
        optimizer = OPTIMIZERS[name]([{"params": make_parameters(), "lr_scale": 0.5, "name": "head"}])
        StepLR(optimizer, 5)
        return set(state_names(optimizer))

    assert names_of("schedule-free") == {"k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"}
    assert names_of("prodigy") == {"d", "d_max", "d_numerator", "k"}
    of_torch = set(OPTIMIZERS) - {name for name in OPTIMIZERS if "schedule" in name} - {"prodigy", "counting"}
    assert {name: names_of(name) for name in of_torch} == {name: set() for name in of_torch}


def test_what_steps_add_to_groups_is_state():
    parameters = make_parameters()
    optimizer = OPTIMIZERS["counting"]([{"params": parameters, "lr_scale": 0.5}])
    with noting_state(optimizer):
        train(optimizer, parameters, 1)
    assert state_names(optimizer) == {"recent", "step"}


def test_a_donor_names_unknown_state(caplog):
    donor, newcomer = ([{"params": make_parameters(), "lr_scale": scale}] for scale in (0.5, 0.25))
    donor, newcomer = OPTIMIZERS["counting"](donor), OPTIMIZERS["counting"](newcomer)
    with noting_state(donor):
        train(donor, donor.param_groups[0]["params"], 3)
    initialize_optimizer_state_(newcomer)
    assert "step" not in newcomer.param_groups[0]
    metadata, tensors = dump_optimizer_state(donor)
    load_optimizer_state(newcomer, metadata, tensors)
    assert newcomer.param_groups[0]["step"] == 3
    assert newcomer.param_groups[0]["recent"].tolist() == [1, 2, 3]
    assert newcomer.param_groups[0]["lr_scale"] == 0.25
    assert [record.message for record in caplog.records] == [
        "parameter group 0: the swarm trains with lr_scale = 0.5, this peer keeps its own 0.25"
    ]
    assert state_names(newcomer) == state_names(donor)


def test_state_in_groups_travels_without_hyperparameters(caplog):
    donor, newcomer = make_parameters(), make_parameters()
    donor, newcomer = OPTIMIZERS["prodigy"](donor), OPTIMIZERS["prodigy"](newcomer)
    train(donor, donor.param_groups[0]["params"], 5)
    initialize_optimizer_state_(newcomer)
    newcomer.param_groups[0]["lr"] = 0.5
    metadata, tensors = dump_optimizer_state(donor)
    load_optimizer_state(newcomer, without_hyperparameters(metadata), tensors)
    assert newcomer.param_groups[0]["lr"] == 0.5
    for name in ("d", "d_max", "d_numerator", "k"):
        assert newcomer.param_groups[0][name] == donor.param_groups[0][name]
    assert not caplog.records


def test_infinite_numbers_in_groups_are_refused():
    donor, newcomer = OPTIMIZERS["prodigy"](make_parameters()), OPTIMIZERS["prodigy"](make_parameters())
    initialize_optimizer_state_(donor)
    initialize_optimizer_state_(newcomer)
    donor.param_groups[0]["d"] = float("nan")
    metadata, tensors = dump_optimizer_state(donor)
    with pytest.raises(ValueError, match="parameter group 0 has 'd' = nan"):
        load_optimizer_state(newcomer, metadata, tensors)


@pytest.mark.parametrize(("name", "value"), [("d", [1.0, 2.0]), ("recent", 1.0), ("recent", [1.0]), ("step", [1])])
def test_wrong_kinds_of_numbers_are_refused(name, value):
    """Else the next step of a newcomer would fail, or the load itself would in its midst."""
    kind = "prodigy" if name == "d" else "counting"
    donor, newcomer = OPTIMIZERS[kind](make_parameters()), OPTIMIZERS[kind](make_parameters(1))
    for optimizer in (donor, newcomer):
        with noting_state(optimizer):
            train(optimizer, optimizer.param_groups[0]["params"], 2)
    metadata, tensors = dump_optimizer_state(donor)
    metadata["groups"][0][name] = value
    before = copy.deepcopy(newcomer.state_dict())
    with pytest.raises(ValueError, match=f"parameter group 0 has '{name}' = .*of another kind"):
        load_optimizer_state(newcomer, metadata, tensors)
    torch.testing.assert_close(newcomer.state_dict(), before)


def test_a_schedulers_values_are_no_state():
    """Otherwise the next step of the schedule would take any learning rate from it."""
    donor, newcomer = OPTIMIZERS["counting"](make_parameters()), OPTIMIZERS["counting"](make_parameters(1))
    for optimizer in (donor, newcomer):
        initialize_optimizer_state_(optimizer)
        OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    metadata, tensors = dump_optimizer_state(donor)
    metadata["groups"][0]["max_lr"] = 1e30
    metadata["state_names"] = ["max_lr", "recent", "step"]
    load_optimizer_state(newcomer, metadata, tensors)
    assert newcomer.param_groups[0]["max_lr"] == 0.1


def test_a_statistic_may_be_a_single_zero():
    donor, newcomer = make_parameters(), make_parameters()
    with torch.no_grad():
        donor[1].zero_()
    donor_optimizer, optimizer = OPTIMIZERS["prodigy"](donor), OPTIMIZERS["prodigy"](newcomer)
    train(donor_optimizer, donor, 3)
    initialize_optimizer_state_(optimizer)
    metadata, tensors = dump_optimizer_state(donor_optimizer)
    load_optimizer_state(optimizer, metadata, tensors)
    assert optimizer.state[newcomer[1]]["p0"].shape == ()


@pytest.mark.parametrize("donor_trains", [True, False])
def test_a_donors_other_mode_is_converted(donor_trains):
    donor, newcomer = make_parameters(), make_parameters()
    donor_optimizer, optimizer = OPTIMIZERS["schedule-free"](donor), OPTIMIZERS["schedule-free"](newcomer)
    train(donor_optimizer, donor, 4)
    initialize_optimizer_state_(optimizer)
    (optimizer if donor_trains else donor_optimizer).eval()
    metadata, tensors = dump_optimizer_state(donor_optimizer)
    load_optimizer_state(optimizer, metadata, tensors)
    with torch.no_grad():
        for mine, theirs in zip(newcomer, donor, strict=True):
            mine.copy_(theirs)
    keep_mode(optimizer, metadata)
    assert optimizer.param_groups[0]["train_mode"] is not donor_trains
    (donor_optimizer.eval if donor_trains else donor_optimizer.train)()
    for mine, theirs in zip(newcomer, donor, strict=True):
        torch.testing.assert_close(mine, theirs)
