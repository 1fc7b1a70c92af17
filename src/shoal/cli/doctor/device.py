"""Checks whether peers can train on a graphics card or another device as they do on the CPU.

Two peers in this process train a small model on the CPU, and then on the device with the same data, once for each
feature that could fail only on devices. The weights must equal those from the CPU, up to the precision of the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.cli.doctor.findings import Finding, fail, ok
from shoal.dht import DHT
from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager


@dataclass(frozen=True)
class ShortTraining:
    """The training to try. All numbers are chosen."""

    peers: int = 2
    epochs: int = 4
    batches: int = 3
    """Samples per peer and epoch."""
    samples: int = 16
    """Per batch."""
    inputs: int = 32
    width: int = 1024
    """It makes a middle layer of four megabytes: copying that takes so long that an early read gives wrong weights."""
    outputs: int = 8
    learning_rate: float = 0.05
    momentum: float = 0.9
    relative: float = 1e-2
    """Tolerated difference of weights. An early read, or adding twice, makes a much larger one."""
    absolute: float = 1e-3
    patience: float = 60.0
    """Seconds for each training, which normally takes a few."""


TRIAL = ShortTraining()
NAMES = ("cuda", "xpu", "mtia", "hpu", "npu")
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


@dataclass(frozen=True)
class Way:
    """One way to train on a device."""

    check: str
    meaning: str
    instead: str
    """The workaround if it fails."""
    options: dict[str, Any] = field(default_factory=dict)
    is_offloaded: bool = False
    in_side_stream: bool = False


PLAIN = Way("training", "parameters and optimizer on the device", "train on the CPU")
WAYS = (
    PLAIN,
    Way("offload", "the optimizer on the CPU", "give an optimizer, not a function that makes one", is_offloaded=True),
    Way(
        "CPU sums",
        "accumulate_grads_on='cpu'",
        "leave accumulate_grads_on out",
        options={"grad_averager": GradientAverager.get_factory(accumulate_grads_on="cpu")},
    ),
    Way(
        "side stream",
        "on a stream of its own",
        "train on the default stream",
        # With this option threads with other streams read the parameters while they are trained.
        options={"delay_state_averaging": True},
        in_side_stream=True,
    ),
)


class DeviceError(ValueError):
    """There is no such device."""


def find_device(name: str) -> torch.device:
    """The device of this name, such as ``cuda`` or ``cuda:1``.

    Raises:
        DeviceError: there is no such device; the text lists those that are available.
    """
    available = available_devices()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or str(device) not in available:
        raise DeviceError(f"there is no device {name!r} here: available are {', '.join(available)}")
    return device


def available_devices() -> list[str]:
    """Names that :func:`find_device` accepts, with and without a device number."""
    found = ["cpu"]
    if torch.backends.mps.is_available():
        found.append("mps")
    for name in (*NAMES, torch._C._get_privateuse1_backend_name()):
        module = getattr(torch, name, None)
        if module is not None and hasattr(module, "is_available") and module.is_available():
            found += [name, *(f"{name}:{index}" for index in range(module.device_count()))]
    return found


def look_at_device(device: torch.device) -> Iterator[Finding]:
    """Train in every way, and compare the results with the CPU's."""
    cpu = torch.device("cpu")
    try:
        with _Crew(cpu, PLAIN) as crew:
            crew.train()
            expected = crew.weights()[0]
    except Exception as error:
        yield fail(
            "on the CPU", _describe(error), "this has nothing to do with the device: report it, with this output"
        )
        return
    for way in WAYS:
        if way.in_side_stream and not _has_streams(device):
            yield ok(way.check, f"{device.type} has no streams to choose from")
            continue
        yield from _try(device, way, expected)


def _try(device: torch.device, way: Way, expected: torch.Tensor) -> Iterator[Finding]:
    """Train in one way; after plain training, let a newcomer join."""
    began = time.perf_counter()
    try:
        with _Crew(device, way) as crew:
            crew.train()
            yield _compared(way, expected, crew.weights(), time.perf_counter() - began)
            if way is PLAIN:
                yield _newcomer_has_the_state(crew)
    except Exception as error:  # any error is a result of the check
        yield fail(way.check, f"{way.meaning}: {_describe(error)}", _what_to_do(way.instead))


def _compared(way: Way, expected: torch.Tensor, found: list[torch.Tensor], seconds: float) -> Finding:
    worst = max(float((weights - expected).abs().max()) for weights in found)
    values = {"largest_difference": worst, "seconds": seconds}
    if not all(torch.allclose(weights, expected, rtol=TRIAL.relative, atol=TRIAL.absolute) for weights in found):
        text = f"{way.meaning}: the weights are not those from the CPU, they differ by up to {worst:.2g}"
        return fail(way.check, text, _what_to_do(way.instead), **values)
    if not all(torch.equal(weights, found[0]) for weights in found):
        text = f"{way.meaning}: the two peers have different weights"
        return fail(way.check, text, _what_to_do(way.instead), **values)
    text = f"{way.meaning}: the weights from the CPU (largest difference {worst:.1g}), in {seconds:.1f} s"
    return ok(way.check, text, **values)


def _newcomer_has_the_state(crew: _Crew) -> Finding:
    weights, momenta = crew.let_somebody_join()
    instead = "let all peers begin together, from the same checkpoint"
    if not torch.equal(weights, crew.weights()[0]):
        return fail("newcomer", "the weights that a newcomer has downloaded are not those of the others", instead)
    if not torch.equal(momenta, crew.momenta(0)):
        return fail("newcomer", "what a newcomer has downloaded for its optimizer is not what others have", instead)
    return ok("newcomer", "has downloaded the weights and the optimizer's state of the others")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _what_to_do(instead: str) -> str:
    return f"{instead} until this is fixed, and report it, with this output"


def _has_streams(device: torch.device) -> bool:
    module = getattr(torch, device.type, None)
    return device.type != "cpu" and hasattr(module, "Stream") and hasattr(module, "stream")


def _make_model(device: torch.device, seed: int) -> torch.nn.Module:
    rng = torch.Generator().manual_seed(seed)
    layers = [torch.nn.Linear(inputs, outputs, device="cpu") for inputs, outputs in _SIZES]
    with torch.no_grad():
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            bound = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.rand(parameter.shape, generator=rng, device="cpu").sub_(0.5).mul_(2 * bound))
    first, middle, last = layers
    return torch.nn.Sequential(first, torch.nn.Tanh(), middle, torch.nn.Tanh(), last).to(device)


_SIZES = ((TRIAL.inputs, TRIAL.width), (TRIAL.width, TRIAL.width), (TRIAL.width, TRIAL.outputs))


def _make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=TRIAL.learning_rate, momentum=TRIAL.momentum)


class _Crew(ExitStack):
    """Two peers that train on one device, each in a thread."""

    def __init__(self, device: torch.device, way: Way) -> None:
        super().__init__()
        self._device, self._way = device, way
        self._dhts: list[DHT] = []
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._deadline = 0.0

    def _add_peer(self, seed: int) -> None:
        known = self._dhts[0].get_visible_maddrs() if self._dhts else None
        dht = self.enter_context(DHT(initial_peers=known, host_maddrs=LOOPBACK, start=True, token=""))
        model = _make_model(self._device, seed)
        training: dict[str, Any] = {"optimizer": _make_optimizer, "params": model.parameters()}
        if not self._way.is_offloaded:
            training = {"optimizer": _make_optimizer(model.parameters())}
        optimizer = Optimizer(
            dht=dht,
            run_id="doctor",
            target_batch_size=TRIAL.peers * TRIAL.batches * TRIAL.samples,
            matchmaking_time=TRIAL.patience / 4,
            averaging_timeout=TRIAL.patience / 2,
            **{
                "grad_averager": GradientAverager.get_factory(),
                "delay_state_averaging": False,
                **training,
                **self._way.options,
            },
        )
        self._dhts.append(dht)
        self._models.append(model)
        self._optimizers.append(self.enter_context(optimizer))

    def train(self) -> None:
        """Train for all epochs.

        Raises:
            TimeoutError: it takes longer than :attr:`ShortTraining.patience`.
        """
        for _ in range(TRIAL.peers):
            self._add_peer(seed=0)
        self._synchronize()
        self._deadline = time.monotonic() + TRIAL.patience
        with ThreadPoolExecutor(TRIAL.peers) as pool:
            for future in [pool.submit(self._train_one, index) for index in range(TRIAL.peers)]:
                future.result()
        self._synchronize()

    def _train_one(self, index: int) -> None:
        model, optimizer = self._models[index], self._optimizers[index]
        rng = torch.Generator().manual_seed(1 + index)
        with self._stream():
            for epoch in range(TRIAL.epochs):
                for batch in range(TRIAL.batches):
                    inputs = torch.randn(TRIAL.samples, TRIAL.inputs, generator=rng, device="cpu").to(self._device)
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, : TRIAL.outputs].cos())
                    loss.backward()  # type: ignore[no-untyped-call]
                    if batch < TRIAL.batches - 1:
                        optimizer.grad_averager.accumulate_grads_(TRIAL.samples)  # type: ignore[union-attr]
                    else:
                        # Step only with the last batch: an earlier step might end the epoch without the rest.
                        optimizer.step(batch_size=TRIAL.samples)
                if epoch == 0:
                    self._wait_until(lambda: optimizer.tracker.expected_group_size == TRIAL.peers, "find each other")
                self._wait_until(lambda epoch=epoch: _has_passed(optimizer, epoch), "average")  # type: ignore[misc]
                _check_round(optimizer)
            optimizer.state_averager.finish_jobs(TRIAL.patience)

    def _wait_until(self, condition: Callable[[], bool], purpose: str) -> None:
        pause = threading.Event()
        while not condition():
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"the two peers could not {purpose} within {TRIAL.patience:g} s")
            pause.wait(0.005)

    def _stream(self) -> AbstractContextManager[Any]:
        if not self._way.in_side_stream:
            return nullcontext()
        module = getattr(torch, self._device.type)
        stream: AbstractContextManager[Any] = module.stream(module.Stream(device=self._device))
        return stream

    def _synchronize(self) -> None:
        module = getattr(torch, self._device.type, None)
        if module is not None and hasattr(module, "synchronize"):
            module.synchronize()

    def let_somebody_join(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Let a newcomer with different weights download the state; return its weights and momenta."""
        self._add_peer(seed=2)
        newcomer = self._optimizers[-1]
        self._deadline = time.monotonic() + TRIAL.patience
        self._wait_until(lambda: newcomer.load_state_from_peers(timeout=TRIAL.patience / 2), "hand their state over")
        self._synchronize()
        return self.weights()[-1], self.momenta(-1)

    def weights(self) -> list[torch.Tensor]:
        """All parameters of each peer, on the CPU."""
        return [_together(list(model.parameters())) for model in self._models]

    def momenta(self, index: int) -> torch.Tensor:
        """The momenta in a peer's optimizer, on the CPU."""
        states = self._optimizers[index].opt.state.values()
        return _together([state["momentum_buffer"] for state in states])


def _has_passed(optimizer: Optimizer, epoch: int) -> bool:
    """Whether an epoch is over; until then, call ``step`` without new samples to help it end."""
    if optimizer.local_epoch == epoch:
        optimizer.step(batch_size=0)
    return optimizer.local_epoch > epoch


def _check_round(optimizer: Optimizer) -> None:
    """Check that both peers averaged together; alone, each would get other weights on any device.

    Raises:
        RuntimeError: they did not.
    """
    assert optimizer.grad_averager is not None
    result = optimizer.grad_averager.last_round
    if result is None or len(result.peers) != TRIAL.peers or result.failed_peers:
        raise RuntimeError("the two peers did not average with each other: the machine is too busy, or has no loopback")


def _together(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
