"""Loops that call step(), backward() and zero_grad() in the wrong order are told so, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from shoal import DHT, DiLoCo, Optimizer
from shoal.optim.gradient_accumulator import BATCHES_READ, GradientAccumulator
from tests.optim.conftest import backward, make_model

KINDS = ["gradients", "local updates", "DiLoCo"]


@pytest.fixture(scope="module")
def dht() -> Iterator[DHT]:
    with DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as dht:
        yield dht


@pytest.fixture(params=KINDS)
def training(request, dht, closing) -> tuple[torch.nn.Module, Optimizer | DiLoCo]:
    model = make_model()
    options = {"dht": dht, "run_id": "run", "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    if request.param == "DiLoCo":
        return model, closing(DiLoCo(sync_every=1000, **options))
    use_local_updates = request.param == "local updates"
    return model, closing(Optimizer(target_batch_size=10**6, use_local_updates=use_local_updates, **options))


def batch(model: torch.nn.Module) -> None:
    backward(model, torch.randn(8, 6))


def step_first(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(batch_size=8)
    batch(model)
    optimizer.zero_grad()


def zero_between(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch(model)
    optimizer.zero_grad()
    optimizer.step(batch_size=8)


def zeros_between(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch(model)
    model.zero_grad(set_to_none=False)
    optimizer.step(batch_size=8)


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (step_first, "no parameter has a gradient"),
        (zero_between, "no parameter has a gradient"),
        (zeros_between, "all of its gradients are zero"),
    ],
)
def test_a_wrong_order_is_told_once(training, loop: Callable[..., None], told, caplog):
    for _ in range(5):
        loop(*training)
    [line] = [line for line in caplog.messages if "backward()" in line]
    assert told in line
    assert line.endswith("The order is loss.backward(), opt.step(), opt.zero_grad()")


def samples_of(optimizer: Optimizer | DiLoCo) -> int:
    return optimizer.tracker.local_progress.samples_accumulated


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_batch_without_any_gradient_does_not_count(training, with_closure):
    model, optimizer = training
    for _ in range(3):
        optimizer.step(*([lambda: model(torch.randn(8, 6)).mean()] if with_closure else []), batch_size=8)
    assert samples_of(optimizer) == 0
    if isinstance(optimizer, DiLoCo):
        assert optimizer.inner_steps == 0
    batch(model)
    optimizer.step(batch_size=8)
    assert samples_of(optimizer) == 8 or (isinstance(optimizer, DiLoCo) and optimizer.inner_steps == 1)


def test_unused_layers_need_no_gradients(training, caplog):
    model, optimizer = training
    first, *_ = model.parameters()
    for _ in range(3):
        optimizer.zero_grad()
        batch(model)
        first.grad = None
        optimizer.step(batch_size=8)
    assert not [line for line in caplog.messages if "gradient" in line]
    assert samples_of(optimizer) == 24 or (isinstance(optimizer, DiLoCo) and optimizer.inner_steps == 3)


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
def test_an_early_step_leaves_the_model_alone(make_dhts, closing, kind, caplog):
    """Otherwise backward() fails with torch's error about an operation in place."""
    first, second = make_dhts(2)

    def make(dht: DHT, seed: int) -> tuple[torch.nn.Module, Optimizer | DiLoCo]:
        model = make_model(seed)
        options = {"target_batch_size": 8} if kind is Optimizer else {"sync_every": 1}
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, closing(kind(dht=dht, run_id="run", optimizer=inner, **options))

    model, optimizer = make(first, 0)
    while optimizer.local_epoch < 3:
        optimizer.zero_grad()
        batch(model)
        optimizer.step(batch_size=8)
    model, optimizer = make(second, 1)
    optimizer.tracker.fetched_global_progress_this_epoch.wait(10)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(torch.randn(8, 6)).square().mean()
    optimizer.step(batch_size=8)
    loss.backward()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert any(line.startswith("step() skips batches: no parameter has a gradient") for line in caplog.messages)


def test_a_right_order_is_not_told(training, caplog):
    model, optimizer = training
    for _ in range(BATCHES_READ + 2):
        optimizer.zero_grad()
        batch(model)
        optimizer.step(batch_size=8)
    optimizer.step(lambda: batch(model), batch_size=8)
    optimizer.zero_grad()
    optimizer.step(batch_size=0)  # only takes part
    assert not [line for line in caplog.messages if "backward()" in line]


def test_zeroed_accumulating_gradients_are_told(caplog):
    model = make_model()
    accumulator = GradientAccumulator(list(model.parameters()), reuse_grad_buffers=True)
    batch(model)
    accumulator.add(8)
    model.zero_grad()
    accumulator.add(8)
    accumulator.close()
    [line] = caplog.messages
    assert line.startswith("the gradients of 8 samples are gone. With reuse_grad_buffers=True")


def test_only_the_first_batches_are_searched_for_zeros(caplog):
    """Later they may be right, and to look means to wait for the device."""
    model = make_model()
    accumulator = GradientAccumulator(list(model.parameters()))
    for _ in range(BATCHES_READ):
        batch(model)
        accumulator.add(8)
    model.zero_grad(set_to_none=False)
    accumulator.add(8)
    assert caplog.messages == []
