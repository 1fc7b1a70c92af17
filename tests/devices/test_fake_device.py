"""The fake device keeps the rules that a real one has; the other tests here rely on it."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch

DELAY = 20
"""Milliseconds after which work is done, where it does not matter whether the host is faster."""


def train(device: str, make_optimizer, steps: int = 5) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model.to(device)
    optimizer = make_optimizer(model.parameters())
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(8, 6, generator=rng).to(device)
        torch.nn.functional.mse_loss(model(batch), batch[:, :2].cos()).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    ],
    ids=["SGD", "AdamW"],
)
def test_training_gives_what_the_cpu_gives(fake, make_optimizer):
    expected = train("cpu", make_optimizer)
    at_once = train("fake", make_optimizer)
    torch.testing.assert_close(at_once, expected)
    with fake.late(5):
        assert torch.equal(train("fake:1", make_optimizer), at_once)


def test_a_late_copy_is_poison_until_it_has_arrived(fake):
    values = torch.arange(5.0).to("fake")
    event = torch.Event("fake")
    with fake.held():
        copy_ = values.to("cpu", non_blocking=True)
        event.record()
        assert copy_.is_pinned()
        assert copy_.isnan().all()
        assert not event.query()
        with pytest.raises(RuntimeError, match="held back"):
            values.sum().item()
    assert event.query()
    assert torch.equal(copy_, torch.arange(5.0))
    assert fake.counts()["late"] == fake.counts()["d2h"] == 1


def test_copies_to_pageable_memory_and_blocking_ones_wait(fake):
    values, target = torch.arange(5.0).to("fake"), torch.empty(5)
    with fake.late(DELAY):
        values.add_(1)
        target.copy_(values, non_blocking=True)
        assert torch.equal(target, torch.arange(5.0) + 1)
        assert torch.equal(values.mul_(2).cpu(), 2 * target)
    assert fake.counts()["late"] == 0


def test_a_copy_from_pinned_memory_reads_it_late(fake):
    source = torch.ones(3).pin_memory()
    with fake.held():
        values = source.to("fake", non_blocking=True)
        source.zero_()  # which a program must not do before the copy is done
    assert torch.equal(values.cpu(), torch.zeros(3))


def test_work_of_one_stream_is_done_in_order(fake):
    values = torch.ones(3, device="fake")
    with fake.late(DELAY):
        before = values.to("cpu", non_blocking=True)
        values.mul_(2)
        after = values.to("cpu", non_blocking=True)
        torch.fake.synchronize()
        assert before.tolist() == [1, 1, 1]
        assert after.tolist() == [2, 2, 2]


def test_streams_are_ordered_by_events_alone(fake):
    stream, values = torch.fake.Stream(), torch.zeros(3, device="fake")
    event = torch.Event("fake")
    with fake.held():
        with torch.fake.stream(stream):
            assert torch.fake.current_stream() == stream
            values.add_(1)
        assert torch.fake.current_stream() == torch.fake.default_stream()
        event.record()
        assert event.query()  # the default stream has nothing to wait for
        torch.fake.current_stream().wait_stream(stream)
        event.record()
        assert not event.query()
        doubled = values * 2
    assert event.query()
    assert doubled.tolist() == [2, 2, 2]


def test_another_thread_begins_on_the_default_stream(fake):
    seen = []
    with torch.fake.stream(torch.fake.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.fake.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.fake.default_stream()]


def test_events_tell_how_long_a_kernel_took(fake):
    first, second = (torch.fake.Event(enable_timing=True) for _ in range(2))
    first.record()
    fake.occupy(50)
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 50


def test_two_devices(fake):
    first, second = torch.ones(3, device="fake:0"), torch.ones(3, device="fake:1")
    assert torch.accelerator.device_count() == torch.fake.device_count() == 2
    with pytest.raises(RuntimeError, match="same device"):
        first + second
    with pytest.raises(RuntimeError, match="same device"):
        first + torch.ones(3)
    with torch.fake.device(1):
        assert torch.ones(1, device="fake").device == torch.device("fake:1")
    assert (first + second.to("fake:0")).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="no device fake:2"):
        torch.fake.set_device(2)


def test_memory_is_poisoned_and_counted(fake):
    before = fake.counts()["live"]
    values = torch.empty(1000, device="fake")
    assert values.isnan().all()
    del values
    assert fake.counts()["live"] == before
    assert before + 4000 <= fake.counts()["peak"] < before + 8000
    assert torch.empty(10, pin_memory=True).isnan().all()


def test_scalar_reads_are_counted(fake):
    values = torch.arange(3.0, device="fake")
    fake.reset()
    assert values.sum().item() == 3
    assert bool(values[0] == 0)
    assert fake.counts()["scalars"] == 2


def test_late_work_that_fails_is_told_to_who_waits(fake):
    with fake.late(DELAY):
        with pytest.raises(RuntimeError, match="must match the size"):  # known at the launch
            torch.ones(3, device="fake").add_(torch.ones(4, device="fake"))
        torch.ones(3, device="fake")[torch.tensor([7], device="fake")]
        with pytest.raises(RuntimeError, match="launched earlier on the fake device has failed"):
            fake.wait()


def test_models_are_copied_saved_and_loaded(fake):
    model = torch.nn.Linear(3, 2).to("fake:1")
    clone = copy.deepcopy(model)
    assert clone.weight.device == torch.device("fake:1")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"], clone.weight)


def test_random_numbers_are_those_of_the_cpu(fake):
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="fake").cpu(), expected)
