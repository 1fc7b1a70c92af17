"""Training on a device whose work is late: nothing is read before it is there, nor counted before it is done."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.optim import DiLoCo
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.gradient_accumulator import BATCHES_READ, GradientAccumulator
from shoal.optim.setup.devices import BATCHES_AHEAD, copies_beside_training, copy_all, copy_to_host
from shoal.optim.setup.optimizer_state import initialize_optimizer_state_
from shoal.optim.state_averager import TrainingStateAverager
from shoal.optim.training_averager import TrainingAverager
from tests.optim.conftest import backward, make_model, sgd

LATE_MS = 20
OCCUPIED_MS = 4000
"""Longer than a hundred small copies take."""


def mean_of(accumulator: GradientAccumulator) -> torch.Tensor:
    targets = [torch.full(p.shape, torch.nan) for p in accumulator.parameters]
    accumulator.write_mean(targets)
    return torch.cat([target.flatten() for target in targets])


def accumulated(accumulator: GradientAccumulator, model: torch.nn.Module) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    for size in (4, 8):
        model.zero_grad()
        backward(model, torch.randn(size, 6, generator=rng).to(device))
        accumulator.add(size)
    return mean_of(accumulator)


@pytest.fixture
def expected() -> torch.Tensor:
    model = make_model()
    return accumulated(GradientAccumulator(list(model.parameters())), model)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_sums_are_made_of_copies_that_have_arrived(fake, expected, device):
    model = make_model().to("fake")
    with fake.late(LATE_MS):
        sums = GradientAccumulator(list(model.parameters()), device=device)
        torch.testing.assert_close(accumulated(sums, model), expected)


def test_a_model_may_move_once_its_optimizer_has_been_made(fake, expected):
    model = make_model()
    accumulator = GradientAccumulator(list(model.parameters()))
    torch.__future__.set_swap_module_params_on_conversion(True)  # as on other devices, it keeps its parameters
    try:
        model.to("fake")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert accumulator.parameters[0].device.type == "fake"
    with fake.late(LATE_MS):
        torch.testing.assert_close(accumulated(accumulator, model), expected)


def test_averaged_gradients_can_be_used_on_the_device(fake, make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model().to("fake")
    averager = closing(GradientAverager(model.parameters(), dht=dht, prefix="run", start=True))
    backward(model, torch.ones(4, 6).to("fake"))
    own = [p.grad for p in model.parameters()]
    averager.accumulate_grads_(4)
    averager.load_accumulators_into_averager_()
    with averager.use_averaged_gradients():
        for parameter, grad in zip(model.parameters(), own, strict=True):
            assert parameter.grad.device == parameter.device
            torch.testing.assert_close(parameter.grad, grad)
        sgd(model.parameters()).step()
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), own, strict=True))


def test_samples_count_when_they_are_nearly_done(fake, make_trainers):
    (trainer,) = make_trainers(1, target=10**6)
    launched = []
    with fake.late(LATE_MS):
        for batches in range(1, 9):
            launch_batch(trainer)
            done = sum(event.query() for event in launched)
            assert batches - done <= BATCHES_AHEAD + 1
            launched.append(torch.accelerator.current_stream().record_event())


def test_inner_steps_count_when_they_are_nearly_done(fake, make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model().to("fake")
    opt = closing(
        DiLoCo(dht=dht, run_id="run", optimizer=sgd(model.parameters()), sync_every=20, batch_size_per_step=1)
    )
    launched, is_idle = [], []
    declare = opt.tracker.declare_epoch_over

    def declare_when_idle(*arguments) -> None:
        is_idle.append(torch.accelerator.current_stream().query())
        declare(*arguments)

    opt.tracker.declare_epoch_over = declare_when_idle
    with fake.late(LATE_MS):
        while opt.local_epoch == 0:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            opt.step()
            done = sum(event.query() for event in launched)
            assert opt.inner_steps - done <= BATCHES_AHEAD + 1
            launched.append(torch.accelerator.current_stream().record_event())
    assert is_idle == [True]


def launch_batch(trainer) -> None:
    """Without anything that waits for the device."""
    for parameter in trainer.model.parameters():
        assert parameter.device.type == "fake"
        parameter.grad = torch.ones_like(parameter)
    trainer.opt.step(batch_size=trainer.batch_size)


def test_an_epoch_is_not_over_before_its_batches_are_done(fake, make_trainers):
    (trainer,) = make_trainers(1, target=16)
    is_idle = []
    declare = trainer.opt.tracker.declare_epoch_over

    def declare_when_idle(*arguments) -> None:
        is_idle.append(torch.accelerator.current_stream().query())
        declare(*arguments)

    trainer.opt.tracker.declare_epoch_over = declare_when_idle
    with fake.late(LATE_MS):
        while trainer.opt.local_epoch == 0:
            launch_batch(trainer)
    assert is_idle == [True]


def test_newcomers_get_no_half_step_of_another_stream(fake, make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model().to("fake")
    averager = closing(TrainingStateAverager(dht=dht, prefix="run", optimizer=sgd(model.parameters()), start=True))
    before = [p.detach().cpu() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    states = []
    with fake.late(LATE_MS), torch.fake.stream(torch.fake.Stream()):
        averager.step(optimizer_step=True, increment_epoch=True)
        reading = threading.Thread(target=lambda: states.append(averager.get_current_state()))
        reading.start()
        reading.join()
    tensors = [torch.as_tensor(tensor) for tensor in states[0].tensors[: len(before)]]
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor.cpu(), old - 0.1)


def test_a_state_is_copied_beside_what_training_has_launched(fake, monkeypatch):
    """In pieces, of which two are on their way at a time."""
    monkeypatch.setattr("shoal.optim.setup.devices.STAGING_BYTES", 64)
    tensors = [
        torch.arange(1000.0, device="fake:0"),
        torch.arange(30, device="fake:1").to(torch.bfloat16).view(5, 6),
        torch.tensor(7, device="fake:0"),
        torch.arange(6.0, device="fake:0").view(2, 3).t(),
        torch.empty(0, device="fake:0"),
        torch.arange(10.0),
    ]
    expected = [tensor.cpu() for tensor in tensors]
    fake.occupy(OCCUPIED_MS)
    busy = torch.fake.Event()
    busy.record(torch.fake.current_stream())
    copies = copies_beside_training(tensors)
    assert not busy.query(), "what training does on its stream is not waited for"
    for copy, value in zip(copies, expected, strict=True):
        assert copy.device.type == "cpu"
        assert copy.is_contiguous()
        assert torch.equal(copy, value)
    busy.synchronize()


def test_copies_that_come_late_are_waited_for(fake, monkeypatch):
    monkeypatch.setattr("shoal.optim.setup.devices.STAGING_BYTES", 64)
    tensor = torch.arange(100.0, device="fake")
    fake.wait()
    with fake.late(LATE_MS):
        (copy,) = copies_beside_training([tensor])
        assert torch.equal(copy, torch.arange(100.0))


def test_parameters_of_another_stream_are_averaged_as_they_are_after_the_step(fake, make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model().to("fake")
    averager = closing(TrainingStateAverager(dht=dht, prefix="run", optimizer=sgd(model.parameters()), start=True))
    expected = [p.detach().cpu() - 0.1 for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loaded = threading.Event()
    seen: list[torch.Tensor] = []
    contents = averager._contents
    load = contents.load_into_averaged

    def load_and_keep(**options) -> None:
        load(**options)
        seen.extend(tensor.clone() for tensor in contents.averaged)
        loaded.set()

    contents.load_into_averaged = load_and_keep
    with fake.late(LATE_MS), torch.fake.stream(torch.fake.Stream()):
        averager.step(optimizer_step=True, averaging_round=True, delay_averaging=True, averaging_opts={"timeout": 0.1})
        assert loaded.wait(20)
    averager.finish_jobs(20)
    for tensor, value in zip(seen, expected, strict=True):
        torch.testing.assert_close(tensor, value)


def test_statistics_take_little_memory_beside_themselves(fake, monkeypatch):
    monkeypatch.setattr("shoal.optim.setup.optimizer_state.PART_BYTES", 2**16)
    parameters = [torch.nn.Parameter(torch.zeros(2**14, device="fake")) for _ in range(16)]
    optimizer = torch.optim.Adam(parameters, foreach=False)
    size = sum(p.nbytes for p in parameters)
    fake.reset()
    before = fake.counts()["live"]
    initialize_optimizer_state_(optimizer)
    peak = fake.counts()["peak"] - before
    assert peak < 2.6 * size, "two statistics, and a few parameters at a time"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_type_is_made_on_the_host(fake, dtype):
    source = torch.arange(1000).to(dtype).to("fake")
    target = torch.empty(1000)
    fake.wait()
    fake.reset()
    live = fake.counts()["live"]
    copy_all([target], [source])
    assert torch.equal(copy_to_host(source, torch.float32), target)
    assert fake.counts()["peak"] == live
    assert torch.equal(target, torch.arange(1000).to(dtype).float())


def test_a_step_reads_one_number_at_most(fake, make_trainers):
    (trainer,) = make_trainers(1, target=10**6)
    for _ in range(BATCHES_READ):  # in these it looks for gradients that are zero
        launch_batch(trainer)
    fake.reset()
    launch_batch(trainer)
    assert fake.counts()["scalars"] == 0
    trainer.opt.tracker.target_batch_size = 8
    trainer.opt.global_step.run()
    assert fake.counts()["scalars"] <= 1


def test_an_averager_in_the_background_and_a_stream_that_trains(fake, make_dhts, closing, monkeypatch):
    (dht,) = make_dhts(1)
    parameters = list(make_model().to("fake").parameters())
    options = {"average_parameters": True, "average_gradients": False, "dht": dht, "prefix": "run", "start": True}
    averager = closing(TrainingAverager(sgd(parameters), **options))
    read = []

    def run_round(_):
        with averager.get_tensors() as averaged:
            for tensor in averaged:
                read.append(tensor.clone())
                tensor.fill_(3)
        return {}

    monkeypatch.setattr(averager, "_run_round", run_round)
    with torch.fake.stream(torch.fake.Stream()), fake.late(LATE_MS), torch.no_grad():
        for parameter in parameters:
            parameter.fill_(2)
        averager.step(wait=False).result(30)
        written = [parameter.to("cpu") for parameter in parameters]
        for parameter in parameters:
            parameter.fill_(4)
        state = averager.get_current_state()
    assert {value for tensor in read for value in tensor.flatten().tolist()} == {2}
    assert {value for tensor in written for value in tensor.flatten().tolist()} == {3}
    assert all((tensor == 4).all() for tensor in state.tensors[: len(parameters)])
