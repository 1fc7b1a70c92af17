"""Optimizer steps, averaging of parameters in all modes, and the download of the state."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR, StepLR

from shoal.averaging import DecentralizedAverager
from shoal.averaging.state.download import State, layout_of
from shoal.dht.crypto import tag_of
from shoal.errors import StateRefusedError
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.setup.training_state import latest_epoch
from shoal.optim.state_averager import TrainingStateAverager
from shoal.p2p import PeerID
from tests.optim.conftest import in_parallel, wait_until

pytestmark = pytest.mark.devices

OPTIONS = {"prefix": "state", "min_matchmaking_time": 30.0, "start": True}
MODES = {
    "default": {},
    "reuse": {"reuse_tensors": True},
    "offload": {"offload_optimizer": True},
    "offload without reuse": {"offload_optimizer": True, "reuse_tensors": False},
    "delta rule": {"delta_rule_averaging": True},
    "delta rule, offload": {"delta_rule_averaging": True, "offload_optimizer": True, "reuse_tensors": False},
}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 3).to(dtype)


def adam(groups) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.1)


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def values_of(averager: TrainingStateAverager) -> list[torch.Tensor]:
    return [p.detach().clone() for p in averager.main_parameters]


def take_over(joiner: TrainingStateAverager, metadata: object, tensors: list[torch.Tensor]) -> None:
    """As at the end of a download."""
    joiner.take_over(State(metadata, tensors), accept_older=False, run=joiner.lineage_keeper)


def set_grads(model: torch.nn.Module, value: float) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


@pytest.fixture
def make_averagers(make_dhts, closing):
    def make(models, **options) -> list[TrainingStateAverager]:
        options = {"optimizer": adam, **OPTIONS, **options}
        return [
            closing(TrainingStateAverager(dht=dht, params=model.parameters(), **options))
            for dht, model in zip(make_dhts(len(models)), models, strict=True)
        ]

    return make


@pytest.mark.parametrize("mode", MODES)
def test_step_then_average(make_averagers, mode):
    models = [make_model(seed) for seed in range(2)]
    averagers = make_averagers(models, **MODES[mode])
    references = [make_model(seed) for seed in range(2)]
    for reference, grad in zip(references, (1.0, -2.0), strict=True):
        set_grads(reference, grad)
        adam(reference.parameters()).step()
    set_grads(models[0], 1.0)
    set_grads(models[1], -2.0)
    step = {"increment_epoch": True, "optimizer_step": True, "zero_grad": True, "averaging_round": True}
    in_parallel(*(lambda a=a: a.step(**step, averaging_opts={"expected_group_size": 2}) for a in averagers))
    for index, parameter in enumerate(zip(*(model.parameters() for model in references), strict=True)):
        mean = (parameter[0] + parameter[1]).detach() / 2
        for model in models:
            torch.testing.assert_close(list(model.parameters())[index].detach(), mean)
    assert [averager.local_epoch for averager in averagers] == [1, 1]
    assert all(p.grad is None for model in models for p in model.parameters())
    assert torch.equal(
        torch.cat([v.flatten() for v in values(models[0])]), torch.cat([v.flatten() for v in values(models[1])])
    )


@pytest.mark.parametrize("mode", ["default", "offload", "offload without reuse"])
def test_background_averages_are_applied_later(make_averagers, mode):
    models = [make_model(seed) for seed in range(2)]
    before = [values(model) for model in models]
    averagers = make_averagers(models, **MODES[mode])
    for averager in averagers:
        averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"expected_group_size": 2})
    wait_until(lambda: all(a.last_round is not None for a in averagers), "the round is over")
    for averager in averagers:
        wait_until(lambda a=averager: not a.averaging_in_progress, "the work in the background is done")
    for model, old in zip(models, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values(model), old, strict=True)), "not behind the user's back"
    for averager in averagers:
        averager.step()
    for index, old in enumerate(zip(*before, strict=True)):
        for model in models:
            torch.testing.assert_close(values(model)[index], (old[0] + old[1]) / 2)


def test_local_steps_survive_averaging_with_the_delta_rule(make_averagers):
    models = [make_model(seed) for seed in range(2)]
    averagers = make_averagers(models, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), delta_rule_averaging=True)
    before = [values(model) for model in models]
    controls = [averager.schedule_step(expected_group_size=2) for averager in averagers]
    averagers[0].step(averaging_round=True, delay_averaging=True, averaging_control=controls[0])
    wait_until(lambda: controls[0].triggered, "the tensors of the round are fixed")
    for _ in range(3):  # the other peer is not there yet: these steps happen in the middle of the round
        set_grads(models[0], 1.0)
        averagers[0].step(optimizer_step=True)
    assert averagers[0].averaging_in_progress
    averagers[1].step(averaging_round=True, averaging_control=controls[1])
    averagers[0].finish_jobs()
    for index, old in enumerate(zip(*before, strict=True)):
        mean = (old[0] + old[1]) / 2
        torch.testing.assert_close(values(models[0])[index], mean - 3.0)
        torch.testing.assert_close(values(models[1])[index], mean)


def test_with_the_delta_rule_no_variance_becomes_negative(make_averagers):
    """Second moments of Adam, and running variances of batch norm, shrink during the round, and then by its result."""
    models, variances = [make_model(seed) for seed in range(2)], [torch.tensor([9.0, 9.0]), torch.tensor([0.0, 8.0])]
    options = {"optimizer": lambda p: torch.optim.Adam(p, betas=(0.9, 0.5)), "average_opt_statistics": ["exp_avg_sq"]}
    averagers = [
        make_averagers([model], extra_tensors=[variance], delta_rule_averaging=True, **options)[0]
        for model, variance in zip(models, variances, strict=True)
    ]
    set_grads(models[0], 10.0)
    averagers[0].step(optimizer_step=True)
    controls = [averager.schedule_step(expected_group_size=2) for averager in averagers]
    averagers[0].step(averaging_round=True, delay_averaging=True, averaging_control=controls[0])
    for _ in range(3):
        set_grads(models[0], 0.1)
        averagers[0].step(optimizer_step=True)
    variances[0].copy_(torch.tensor([1.0, 1.0]))
    averagers[1].step(averaging_round=True, averaging_control=controls[1])
    averagers[0].finish_jobs()
    assert variances[0].tolist() == [1.0, 0.5]
    assert all(bool((state["exp_avg_sq"] >= 0).all()) for state in averagers[0].optimizer.state.values())
    set_grads(models[0], 0.1)
    averagers[0].step(optimizer_step=True)
    assert all(bool(value.isfinite().all()) for value in values(models[0]))


def test_local_steps_in_the_background_survive_averaging_too(make_averagers):
    models = [make_model(seed) for seed in range(2)]
    averagers = make_averagers(
        models, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), delta_rule_averaging=True, offload_optimizer=True
    )
    assert not averagers[0].reuse_tensors
    before = [values(model) for model in models]
    controls = [averager.schedule_step(expected_group_size=2) for averager in averagers]
    averagers[0].step(averaging_round=True, delay_averaging=True, averaging_control=controls[0])
    for number in range(4):
        set_grads(models[0], 1.0)
        averagers[0].step(optimizer_step=True, delay_optimizer_step=True)
        set_grads(models[0], 100.0)  # whoever looks too late would see this
        for now, old in zip(values(models[0]), before[0], strict=True):
            torch.testing.assert_close(now, old - number)  # one step behind, and no more
    assert averagers[0].averaging_in_progress
    averagers[1].step(averaging_round=True, averaging_control=controls[1])
    averagers[0].finish_jobs()
    for index, old in enumerate(zip(*before, strict=True)):
        torch.testing.assert_close(values(models[0])[index], (old[0] + old[1]) / 2 - 4.0)


@pytest.mark.parametrize("delay", [False, True], ids=["", "in the background"])
def test_gradients_may_be_filled_by_somebody_else(make_averagers, delay):
    (model,) = models = [make_model(dtype=torch.bfloat16)]
    (averager,) = make_averagers(models, offload_optimizer=True, custom_gradients=True)
    reference = make_model(dtype=torch.bfloat16).float()
    for trained in (reference.parameters(), averager.optimizer_parameters):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    set_grads(model, 1000.0)  # of no importance

    def fill() -> None:
        for parameter in averager.optimizer_parameters:
            parameter.grad.fill_(1.0)

    averager.step(optimizer_step=True, increment_epoch=True, delay_optimizer_step=delay, wait_for_trigger=fill)
    averager.finish_jobs()
    set_grads(reference, 1.0)
    adam(reference.parameters()).step()
    for mine, expected in zip(averager.optimizer_parameters, reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_only_cpu_tensors_are_averaged_in_place(make_dhts):
    (dht,) = make_dhts(1)
    model = torch.nn.Linear(4, 3, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="on the CPU"):
        TrainingStateAverager(dht=dht, optimizer=optimizer, reuse_tensors=True, initialize_optimizer=False, **OPTIONS)


def test_steps_in_the_background(make_averagers):
    (model,) = models = [make_model()]
    (averager,) = make_averagers(models, offload_optimizer=True, scheduler=lambda o: StepLR(o, 1, gamma=0.5))
    before = values(model)
    set_grads(model, 1.0)
    averager.step(increment_epoch=True, optimizer_step=True, zero_grad=False, delay_optimizer_step=True)
    assert averager.local_epoch == 1
    averager.finish_jobs()
    reference = make_model()
    set_grads(reference, 1.0)
    adam(reference.parameters()).step()
    for now, expected, old in zip(values(model), values(reference), before, strict=True):
        torch.testing.assert_close(now, expected)
        assert not torch.equal(now, old)
    assert averager.optimizer.param_groups[0]["lr"] == 0.05


def test_a_trigger_that_fails_stops_everything(make_averagers):
    (model,) = models = [make_model()]
    (averager,) = make_averagers(models, reuse_tensors=True)
    before = values(model)
    control = averager.schedule_step()
    set_grads(model, 1.0)

    def fail() -> None:
        raise RuntimeError("no gradients today")

    with pytest.raises(RuntimeError, match="no gradients today"):
        averager.step(optimizer_step=True, averaging_round=True, averaging_control=control, wait_for_trigger=fail)
    assert control.cancelled()
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


def test_a_cancelled_round_is_not_restarted(make_averagers, monkeypatch, caplog):
    """Everybody has left between the moment when it was scheduled and the step: nobody would come to another one."""
    models = [make_model()]
    (averager,) = make_averagers(models)
    control = averager.schedule_step(timeout=60.0)
    control.cancel()
    monkeypatch.setattr(averager, "schedule_step", lambda **_: pytest.fail("it was begun anew"))
    averager.step(increment_epoch=True, averaging_round=True, averaging_control=control)
    assert averager.local_epoch == 1
    assert "the others have left or continued" in caplog.text


def test_a_failed_round_leaves_local_values(make_averagers, caplog):
    (model,) = models = [make_model()]
    (averager,) = make_averagers(models, min_matchmaking_time=0.1, request_timeout=0.05)
    before = values(model)
    with caplog.at_level(logging.WARNING):
        averager.step(averaging_round=True, averaging_opts={"timeout": 0.5})
    assert "not averaged" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    averager.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


@pytest.mark.parametrize("reuse_tensors", [False, True])
def test_statistics_and_further_tensors_are_averaged(make_averagers, reuse_tensors):
    models = [make_model(seed) for seed in range(2)]
    extras = [torch.full((2,), float(seed)) for seed in range(2)]
    averagers = [
        make_averagers(
            [model], reuse_tensors=reuse_tensors, average_opt_statistics=["exp_avg_sq"], extra_tensors=[extra]
        )[0]
        for model, extra in zip(models, extras, strict=True)
    ]
    for averager, model, grad in zip(averagers, models, (1.0, 3.0), strict=True):
        set_grads(model, grad)
        averager.step(optimizer_step=True)
    squares = [[s["exp_avg_sq"].clone() for s in a.optimizer.state.values()] for a in averagers]
    in_parallel(
        *(lambda a=a: a.step(averaging_round=True, averaging_opts={"expected_group_size": 2}) for a in averagers)
    )
    for averager, extra in zip(averagers, extras, strict=True):
        assert extra.tolist() == [0.5, 0.5]
        for state, a, b in zip(averager.optimizer.state.values(), *squares, strict=True):
            torch.testing.assert_close(state["exp_avg_sq"], (a + b) / 2)


def test_the_largest_epoch_can_be_adopted(make_averagers):
    models = [make_model(seed) for seed in range(2)]
    averagers = make_averagers(models, sync_epoch_when_averaging=True)
    averagers[1].local_epoch = 7
    in_parallel(
        *(lambda a=a: a.step(averaging_round=True, averaging_opts={"expected_group_size": 2}) for a in averagers)
    )
    assert [averager.local_epoch for averager in averagers] == [7, 7]


def test_half_precision_models_are_averaged_in_single_precision(make_averagers):
    models = [make_model(seed, torch.bfloat16) for seed in range(2)]
    expected = [((a.float() + b.float()) / 2).bfloat16() for a, b in zip(*map(values, models), strict=True)]
    averagers = make_averagers(models)
    in_parallel(
        *(lambda a=a: a.step(averaging_round=True, averaging_opts={"expected_group_size": 2}) for a in averagers)
    )
    for model in models:
        assert all(torch.equal(a, b) for a, b in zip(values(model), expected, strict=True))


# --- the state --------------------------------------------------------------------------------------------------------


def wait_for_donor(averager: TrainingStateAverager, donor: TrainingStateAverager) -> None:
    key = f"{averager.prefix}.all_averagers"
    donor_id = tag_of(donor.peer_id)

    def declared() -> bool:
        found = averager.dht.get(key, latest=True)
        return found is not None and donor_id in found.value and found.value[donor_id].value is not None

    wait_until(declared, "the donor has declared itself")


@pytest.mark.parametrize("mode", ["default", "reuse", "offload"])
def test_a_newcomer_gets_everything(make_averagers, mode):
    models = [make_model(seed) for seed in range(2)]
    extras = [torch.full((2,), float(seed)) for seed in range(2)]
    donor, joiner = (
        make_averagers(
            [model],
            scheduler=lambda o: StepLR(o, 1, gamma=0.5),
            extra_tensors=[extra],
            declare_state_period=1,
            **MODES[mode],
        )[0]
        for model, extra in zip(models, extras, strict=True)
    )
    for _ in range(3):
        set_grads(models[0], 1.0)
        donor.step(increment_epoch=True, optimizer_step=True)
    wait_for_donor(joiner, donor)
    assert joiner.load_state_from_peers(timeout=50) is True
    assert joiner.local_epoch == 3
    assert joiner.optimizer.param_groups[0]["lr"] == donor.optimizer.param_groups[0]["lr"] == 0.0125
    assert extras[1].tolist() == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(*map(values, models), strict=True))
    for averager, model in zip((donor, joiner), models, strict=True):
        set_grads(model, 2.0)
        averager.step(increment_epoch=True, optimizer_step=True)
    assert joiner.optimizer.param_groups[0]["lr"] == donor.optimizer.param_groups[0]["lr"] == 0.00625
    assert all(torch.equal(a, b) for a, b in zip(*map(values, models), strict=True)), "statistics are the same, too"


def test_schedules_follow_the_epoch(make_averagers):
    models = [make_model(seed) for seed in range(2)]
    donor, joiner = make_averagers(models, scheduler=lambda o: LambdaLR(o, lambda step: 1 / max(step, 1)))
    donor.local_epoch = 1337
    wait_for_donor(joiner, donor)
    assert joiner.load_state_from_peers(timeout=50)
    assert joiner.local_epoch == 1337
    assert joiner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 1337)


def test_states_that_would_ruin_this_peer_are_refused(make_averagers, caplog):
    """From a donor whose training has failed, and from one that claims an epoch in which nobody can be."""
    models = [make_model(seed) for seed in range(2)]
    donor, joiner = make_averagers(models)
    wait_for_donor(joiner, donor)
    before = values(models[1])
    with torch.no_grad(), donor.get_tensors():
        models[0].weight[0, 0] = torch.nan
    assert joiner.load_state_from_peers(timeout=50) is False
    assert "values of its parameter 0 are NaN or infinite" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(values(models[1]), before, strict=True))
    with torch.no_grad(), joiner.get_tensors():
        models[1].weight[0, 0] = torch.nan
    assert joiner.load_state_from_peers(timeout=50) is True, "its own is no better"
    joiner.lineage_keeper = Mock(global_epoch=7)
    donor.local_epoch = 10**6
    joiner._warn_seldom.told.clear()  # it has warned of this donor less than a minute ago
    assert joiner.load_state_from_peers(timeout=50) is False
    assert "it is of epoch 1000000, where the run, at epoch 7, cannot be yet" in caplog.text
    assert joiner.local_epoch == 0


@pytest.mark.parametrize("spoilt", [1, 2, 4, 7], ids=["parameter", "extra tensor", "statistic", "another statistic"])
def test_a_downloaded_state_must_be_finite(make_averagers, spoilt):
    donor, joiner = (make_averagers([make_model(seed)], extra_tensors=[torch.zeros(2)])[0] for seed in range(2))
    with torch.no_grad(), joiner.get_tensors():
        joiner.main_parameters[0][0, 0] = torch.nan
    metadata, tensors, _ = donor.get_current_state()
    for place in (0, spoilt):
        tensors[place].view(-1)[0] = torch.inf
    with pytest.raises(ValueError, match=rf"values of its (tensor|parameter) {spoilt} are NaN or infinite, and this"):
        take_over(joiner, metadata, tensors)
    tensors[spoilt].view(-1)[0] = 1.0
    take_over(joiner, metadata, tensors)


def test_impossible_epochs_are_not_followed(caplog):
    peers, troubles = [PeerID(b"member %d" % number) for number in range(5)], Counter()

    def latest(epochs, run):
        return latest_epoch(dict(zip(peers, epochs, strict=False)), run, troubles)

    assert latest([3, 5, None, True, "7"], None) == 5
    assert not troubles
    assert latest([3, 10**6, 5], Mock(global_epoch=4)) == 5
    assert latest([3, 10**6, 5], Mock(global_epoch=4)) == 5
    assert latest([10**6], Mock(global_epoch=4)) == 0
    assert troubles == {"epochs that cannot be": 3}
    # One that stays within the limit does not push the others on, nor does it hide behind one beyond the limit.
    assert latest([5, 5, 6], Mock(global_epoch=4)) == 5
    assert latest([5, 6, 6, 5, 5], Mock(global_epoch=4)) == 6, "two are ahead"
    assert latest([5, 6, None], Mock(global_epoch=4)) == 6, "of two peers either may be behind"
    lines = [record.getMessage() for record in caplog.records]
    assert [str(peer) in line for peer, line in zip([peers[1], peers[0]], lines, strict=True)] == [True, True]
    assert "the next epoch is 1000000, and the run cannot be beyond epoch 6" in lines[0]


def test_older_and_foreign_states_are_refused(make_averagers, caplog):
    models = [make_model(seed) for seed in range(2)]
    donor, joiner = make_averagers(models)
    wait_for_donor(joiner, donor)
    before = values(models[1])
    joiner.local_epoch = 5
    with caplog.at_level(logging.WARNING):
        assert joiner.load_state_from_peers(timeout=50) is False
        assert "older" in caplog.text
        donor.local_epoch = 9
        metadata, tensors, _ = donor.get_current_state()
        hostile = [
            (None, tensors),
            ({}, tensors),
            ({**metadata, "epoch": "9"}, tensors),
            ({**metadata, "epoch": True}, tensors),
            ({**metadata, "epoch": -1}, tensors),
            ({**metadata, "epoch": 2**70}, tensors),
            ({**metadata, "optimizer_metadata": None}, tensors),
            ({**metadata, "optimizer_metadata": {**metadata["optimizer_metadata"], "values": [1]}}, tensors),
            (metadata, tensors[:1]),
            (metadata, tensors[::-1]),
            (metadata, [torch.zeros(10**6), *tensors[1:]]),
        ]
        for given_metadata, given_tensors in hostile:
            with pytest.raises(ValueError, match=r"."):
                take_over(joiner, given_metadata, given_tensors)
    assert joiner.local_epoch == 5
    assert all(torch.equal(a, b) for a, b in zip(values(models[1]), before, strict=True))
    take_over(joiner, {**metadata, "scheduler": "nonsense"}, tensors)
    assert joiner.local_epoch == 9


def test_without_a_donor_nothing_changes(make_averagers):
    (averager,) = make_averagers([make_model()])
    assert averager.load_state_from_peers(timeout=50) is False
    assert averager.load_state_from_peers(wait=False, timeout=50).result(50) is False


def test_a_running_download_cannot_be_cancelled(make_averagers, monkeypatch):
    (averager,) = make_averagers([make_model()])
    began, release = threading.Event(), threading.Event()
    crashes: list[object] = []

    def download(*args, **kwargs) -> None:
        began.set()
        assert release.wait(10)

    monkeypatch.setattr(DecentralizedAverager, "load_state_from_peers", download)
    monkeypatch.setattr(threading, "excepthook", crashes.append)
    others = set(threading.enumerate())
    outcome = averager.load_state_from_peers(wait=False)
    assert began.wait(10)
    assert not outcome.cancel()
    release.set()
    assert outcome.result(50) is False
    for thread in set(threading.enumerate()) - others:
        thread.join(10)
    assert not crashes


def test_newcomers_never_get_half_a_step(make_averagers):
    """The epoch that is shipped counts the optimizer's steps in the shipped parameters."""
    (model,) = models = [make_model()]
    (averager,) = make_averagers(models, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), offload_optimizer=True)
    start = values(model)[0]
    set_grads(model, 1.0)
    for _ in range(20):
        averager.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=True)
        metadata, tensors, infos = averager.get_current_state()
        torch.testing.assert_close(tensors[0], start - metadata["epoch"])
        assert len(infos) == len(tensors)
    averager.finish_jobs()
    assert averager.get_current_state()[0]["epoch"] == 20


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reuse_tensors": True, "delta_rule_averaging": True}, "reuse_tensors"),
        ({"optimizer": "adam"}, "optimizer instance"),
        ({"params": None}, "params="),
        ({"params": []}, "empty"),
        ({"custom_gradients": True}, "offload"),
        ({"parameter_names": ["one"]}, "parameter_names"),
        ({"average_opt_statistics": ["nonsense"]}, "nonsense"),
    ],
    ids=str,
)
def test_contradicting_arguments(make_dhts, options, text):
    (dht,) = make_dhts(1)
    arguments = {"params": make_model().parameters(), "optimizer": adam, **OPTIONS, **options}
    with pytest.raises(ValueError, match=text):
        TrainingStateAverager(dht=dht, **arguments)


def test_instances_and_functions_do_not_mix(make_dhts):
    (dht,) = make_dhts(1)
    model = make_model()
    optimizer = adam(model.parameters())
    with pytest.raises(ValueError, match="function"):
        TrainingStateAverager(dht=dht, optimizer=optimizer, offload_optimizer=True, **OPTIONS)
    with pytest.raises(ValueError, match="scheduler"):
        TrainingStateAverager(
            dht=dht, optimizer=adam, params=model.parameters(), scheduler=StepLR(optimizer, 1), **OPTIONS
        )
    weight = model.weight
    with pytest.raises(AssertionError, match="more than once"):
        TrainingStateAverager(dht=dht, optimizer=adam, params=[{"params": [weight]}, {"params": [weight]}], **OPTIONS)


def test_frozen_models_are_worth_a_warning(make_averagers, caplog):
    model = make_model()
    model.weight.requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        make_averagers([model])
    assert "do not require gradients" in caplog.text


def test_names_come_with_named_parameters(make_dhts, closing):
    (dht,) = make_dhts(1)
    averager = closing(
        TrainingStateAverager(dht=dht, optimizer=adam, params=make_model().named_parameters(), **OPTIONS)
    )
    assert averager.parameter_names == ("weight", "bias")
    assert [info.key for info in averager.tensor_infos] == ["weight", "bias"]


def test_contradicting_steps(make_averagers):
    (averager,) = make_averagers([make_model()])
    bad_steps = [
        {"optimizer_step": True, "delay_optimizer_step": True},
        {"optimizer_step": True, "delay_optimizer_step": True, "delay_averaging": False},
        {"averaging_control": averager.schedule_step()},
        {"wait_for_trigger": lambda: None},
        {"wait_for_trigger": lambda: None, "optimizer_step": True},
        {"averaging_round": True, "wait_for_delayed_updates": False},
        {"averaging_round": True, "apply_delayed_updates": False},
        {"optimizer_step": True, "wait_for_delayed_updates": False},
    ]
    for arguments in bad_steps:
        with pytest.raises(ValueError, match=r"."):
            averager.step(**arguments)
    scaler = GradScaler(device="cpu")
    with pytest.raises(RuntimeError, match="unscaled"):
        averager.step(optimizer_step=True, grad_scaler=scaler)


def test_capturable_optimizers_can_be_offloaded(make_averagers, caplog):
    model = make_model()
    (averager,) = make_averagers(
        [model], optimizer=lambda groups: torch.optim.Adam(groups, capturable=True), offload_optimizer=True
    )
    assert "capturable=True is ignored" in caplog.text
    set_grads(model, 1.0)
    before = values(model)
    averager.step(optimizer_step=True)
    assert not any(torch.equal(now, old) for now, old in zip(values(model), before, strict=True))


# --- a state is tried -------------------------------------------------------------------------------------------------


def everything(averager: TrainingStateAverager, extra: torch.Tensor) -> list[object]:
    """All that a download changes."""
    state = averager.optimizer.state_dict()
    statistics = [value.clone() for each in state["state"].values() for value in each.values()]
    tensors = [*(p.detach().clone() for p in averager.main_parameters), *statistics, extra.clone()]
    with averager.get_tensors() as averaged:
        assert all(float(tensor.abs().max()) < 1e5 for tensor in averaged)
    lr, scheduler = state["param_groups"][0]["lr"], averager.scheduler
    return [[tensor.tolist() for tensor in tensors], averager.local_epoch, lr, scheduler.last_epoch, scheduler._last_lr]


@pytest.fixture
def make_three(make_averagers):
    """A liar, which newcomers ask first, an honest donor, and a peer that has trained a bit."""

    def make(check_state, mode="default"):
        models = [make_model(seed) for seed in range(3)]
        extras = [torch.full((2,), float(seed)) for seed in range(3)]
        averagers = []
        options = {"scheduler": lambda o: StepLR(o, 1, gamma=0.5), "declare_state_period": 1, **MODES[mode]}
        for index, (model, extra) in enumerate(zip(models, extras, strict=True)):
            hook = {"check_state": check_state, "allow_state_sharing": False} if index == 2 else {}
            averagers += make_averagers([model], extra_tensors=[extra], **options, **hook)
        liar, donor, joiner = averagers
        for averager, model, steps in zip(averagers, models, (5, 5, 2), strict=True):
            for _ in range(steps):
                set_grads(model, 1.0)
                averager.step(increment_epoch=True, optimizer_step=True)
        with torch.no_grad(), liar.get_tensors(), liar._state_access():
            for parameter in liar.optimizer_parameters:
                parameter.fill_(1e6)
        liar.state_sharing_priority = 10
        wait_for_donor(joiner, liar)
        wait_for_donor(joiner, donor)
        return liar, donor, joiner, extras[2]

    return make


@pytest.mark.parametrize("mode", ["default", "reuse", "offload"])
def test_a_refused_state_is_undone(make_three, mode, caplog):
    seen = []

    def check_state() -> bool:
        largest = max(float(p.detach().abs().max()) for p in joiner.main_parameters)
        seen.append((largest > 1e5, joiner.local_epoch, extra.tolist(), threading.current_thread()))
        return largest < 1e5

    liar, donor, joiner, extra = make_three(check_state, mode)
    everything_before = everything(joiner, extra)
    assert joiner.load_state_from_peers(timeout=50) is True
    this = threading.current_thread()
    assert seen == [(True, 5, [0.0, 0.0], this), (False, 5, [1.0, 1.0], this)]
    assert caplog.text.count(f"the state of peer {liar.peer_id} is refused: check_state returned False") == 1
    for mine, theirs in zip(joiner.main_parameters, donor.main_parameters, strict=True):
        assert torch.equal(mine, theirs)
    assert joiner.dht.p2p.metrics.states_refused == 1
    # Until it has trained for an epoch.
    assert joiner.restore_own_state() is True
    assert everything(joiner, extra) == everything_before
    assert joiner.restore_own_state() is False
    assert joiner.load_state_from_peers(timeout=50) is False, "both donors are left out"
    assert everything(joiner, extra) == everything_before


@pytest.mark.parametrize(
    "error", [StateRefusedError("loss 80 instead of 3"), ZeroDivisionError("a mistake"), ValueError("a mistake")]
)
def test_a_check_that_raises_changes_nothing(make_three, error, caplog):
    _, _, joiner, extra = make_three(Mock(side_effect=error))
    before = everything(joiner, extra)
    if isinstance(error, StateRefusedError):
        assert joiner.load_state_from_peers(timeout=50) is False
        assert caplog.text.count("is refused: loss 80 instead of 3") == 2
    else:
        with pytest.raises(type(error), match="a mistake"):
            joiner.load_state_from_peers(timeout=50)
    assert everything(joiner, extra) == before
    assert joiner.restore_own_state() is False


@pytest.mark.parametrize("verdict", [None, True, torch.tensor(True), 1])
def test_what_is_not_refused_is_taken(make_three, verdict):
    liar, _, joiner, _ = make_three(lambda: verdict)
    assert joiner.load_state_from_peers(timeout=50) is True
    assert torch.equal(joiner.main_parameters[0], liar.main_parameters[0])


def test_the_previous_state_is_kept_one_epoch(make_three):
    _, _, joiner, extra = make_three(None)
    before = everything(joiner, extra)
    assert joiner.load_state_from_peers(timeout=50) is True
    for p in joiner.main_parameters:
        p.grad = torch.ones_like(p)
    joiner.step(increment_epoch=True, optimizer_step=True)
    assert joiner.restore_own_state() is True
    assert everything(joiner, extra) == before
    assert joiner.load_state_from_peers(timeout=50) is True, "the other donor"
    for _ in range(2):
        joiner.step(increment_epoch=True)
    assert joiner.restore_own_state() is False


def test_a_state_that_fails_changes_nothing(make_averagers):
    """The schedule ends before the epoch of the donor."""
    models = [make_model(seed) for seed in range(2)]
    extra = torch.zeros(1)
    donor, joiner = (
        make_averagers([model], scheduler=lambda o: OneCycleLR(o, max_lr=1.0, total_steps=50), extra_tensors=[extra])[0]
        for model in models
    )
    set_grads(models[1], 1.0)
    joiner.step(increment_epoch=True, optimizer_step=True)
    before = everything(joiner, extra)
    metadata, tensors, _ = donor.get_current_state()
    with pytest.raises(ValueError, match="50"):
        take_over(joiner, {**metadata, "epoch": 10**9}, tensors)
    assert everything(joiner, extra) == before


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_states_of_other_tensors_are_not_downloaded(make_averagers, make_optimizer):
    [averager] = make_averagers(
        [make_model(0)], optimizer=lambda groups: make_optimizer(groups, lr=0.1), extra_tensors=[torch.zeros(2)]
    )
    assert averager._expected_layout() == layout_of(averager.get_current_state()[1])


@pytest.mark.parametrize("own_epoch", [0, 1])
def test_an_impossible_schedule_is_refused(make_averagers, own_epoch):
    [donor] = make_averagers([make_model(0)], scheduler=lambda o: LambdaLR(o, lambda step: 1.0))
    [joiner] = make_averagers([make_model(1)], scheduler=lambda o: LambdaLR(o, lambda step: 1 / (4 - step)))
    joiner.local_epoch = own_epoch
    before, rates = values_of(joiner), joiner.learning_rates()
    donor.local_epoch = 4
    metadata, tensors, _ = donor.get_current_state()
    metadata["scheduler"] |= {"last_epoch": 3}
    with pytest.raises(ValueError, match="it is malformed: ZeroDivisionError"):
        take_over(joiner, metadata, tensors)
    assert joiner.local_epoch == own_epoch
    if own_epoch:
        assert all(torch.equal(a, b) for a, b in zip(values_of(joiner), before, strict=True))
        assert joiner.learning_rates() == rates
    joiner.step(increment_epoch=True)
    assert joiner.learning_rates()[0] == own_epoch + 1, "its own schedule goes on"


@pytest.mark.parametrize(
    ("values", "rate", "text"),
    [
        ({"last_epoch": 10**15}, None, "at step 1e\\+15"),
        ({"base_lrs": [-0.1]}, None, "a learning rate of -0.1"),
        ({"_last_lr": [math.nan]}, None, "a learning rate of nan"),
        ({}, math.nan, "its lr of nan"),
        ({}, -1.0, "its lr of -1"),
        ({}, 1e30, "its lr of 1e\\+30"),
    ],
)
def test_learning_rates_that_cannot_be_are_refused(make_averagers, values, rate, text):
    donor, joiner = make_averagers([make_model(seed) for seed in range(2)], scheduler=lambda o: StepLR(o, 2))
    donor.local_epoch = 4
    metadata, tensors, _ = donor.get_current_state()
    metadata["scheduler"] |= values
    if rate is not None:
        metadata["optimizer_metadata"]["groups"][0]["lr"] = rate
    before, rates = values_of(joiner), joiner.learning_rates()
    with pytest.raises(ValueError, match=text):
        take_over(joiner, metadata, tensors)
    assert joiner.local_epoch == 0
    assert joiner.learning_rates() == rates
    assert all(torch.equal(a, b) for a, b in zip(values_of(joiner), before, strict=True))


def test_learning_rates_of_groups_may_be_far_apart(make_averagers):
    def optimizer_of(groups):
        first, *rest = [parameter for group in groups for parameter in group["params"]]
        return torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": rest, "lr": 1e-6}])

    donor, joiner = make_averagers(
        [make_model(seed) for seed in range(2)],
        optimizer=optimizer_of,
        scheduler=lambda o: SequentialLR(o, [StepLR(o, 2), StepLR(o, 2)], [3]),
    )
    donor.local_epoch = 2
    metadata, tensors, _ = donor.get_current_state()
    take_over(joiner, metadata, tensors)
    assert joiner.learning_rates() == donor.learning_rates()


def test_a_schedule_may_begin_midway(make_averagers):
    def begin_at_ten(optimizer):
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return StepLR(optimizer, 2, last_epoch=10)

    donor, joiner = make_averagers([make_model(seed) for seed in range(2)], scheduler=begin_at_ten)
    donor.local_epoch = 4
    metadata, tensors, _ = donor.get_current_state()
    take_over(joiner, metadata, tensors)
    assert joiner.local_epoch == 4
    assert joiner.learning_rates() == donor.learning_rates()


def test_a_newcomer_keeps_its_schedules_constants(make_averagers, caplog):
    """Otherwise a donor could end the user's training, by a division by zero in a later step."""
    donor, joiner = make_averagers([make_model(seed) for seed in range(2)], scheduler=lambda o: StepLR(o, 2))
    donor.local_epoch = 4
    metadata, tensors, _ = donor.get_current_state()
    metadata["scheduler"] |= {"step_size": 0, "gamma": -1e30}
    take_over(joiner, metadata, tensors)
    for averager in (donor, joiner):
        averager.step(increment_epoch=True)
        averager.step(increment_epoch=True)
    assert joiner.learning_rates() == donor.learning_rates()
    assert "this peer keeps its own {'step_size': 2, 'gamma': 0.1}" in caplog.text


def test_claiming_an_epoch_blocks_no_download(make_averagers):
    models = [make_model(seed) for seed in range(2)]
    donor, joiner = make_averagers(models, scheduler=lambda o: LambdaLR(o, lambda step: 1 / (1 + step)))
    metadata, tensors, _ = donor.get_current_state()
    take_over(joiner, {**metadata, "epoch": 10**9}, tensors)
    assert joiner.local_epoch == joiner.scheduler.last_epoch == 10**9
    assert joiner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1e-9)
