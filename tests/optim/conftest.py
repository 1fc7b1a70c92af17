"""Small swarms in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shoal.dht import DHT
from shoal.net.memory import MemoryNetwork
from shoal.optim import Optimizer
from shoal.optim.progress.exchange import HOLDERS_READ_AT_START
from tests.device import chosen_device

pytestmark = pytest.mark.oldest

may_use_sequential_schedules = pytest.mark.filterwarnings(
    r"ignore:The epoch parameter in .scheduler\.step\(\). was not necessary:UserWarning:torch\.optim\.lr_scheduler"
)
"""Mark of tests: in older versions of torch, at least 2.5 to 2.7, ``SequentialLR`` makes torch warn of torch itself."""

PATIENCE = 60.0
"""Seconds after which a condition that should have come true makes a test fail."""


over_sockets = pytest.mark.parametrize("network", [None], ids=["sockets"])
"""Mark of tests whose peers reach each other as users' peers do."""


@pytest.fixture
def network() -> MemoryNetwork | None:
    """Peers of a test meet in memory: what encryption and sockets take is most of what a short training takes."""
    return MemoryNetwork()


@pytest.fixture
def make_dhts(network: MemoryNetwork | None) -> Iterator[Callable[..., list[DHT]]]:
    """Make connected DHTs: ``make_dhts(3)``, with a client as the last one: ``make_dhts(3, clients=1)``."""
    made: list[DHT] = []

    def make(count: int, clients: int = 0) -> list[DHT]:
        dhts = []
        for index in range(count):
            initial_peers = made[0].get_visible_maddrs() if made else None
            options = {} if network is None else {"transport": network.transport()}
            dhts.append(DHT(initial_peers, start=True, client_mode=index >= count - clients, **options))
            made.append(dhts[-1])
        return dhts

    yield make
    for dht in reversed(made):
        dht.shutdown()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Shut objects down at the end of a test, the last one first: ``tracker = closing(ProgressTracker(...))``."""
    things: list[Any] = []

    def remember(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield remember
    for thing in reversed(things):
        thing.shutdown()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll for something that happens in the background."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"it never came true that {what}"
        pause.wait(0.01)


def in_parallel(*tasks: Callable[[], Any]) -> list[Any]:
    """Run tasks in a thread each; results in their order, or the first error."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


# --- peers that train a small model on endless data -------------------------------------------------------------------


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(chosen_device())


def sgd(groups) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def values(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def backward(model: torch.nn.Module, batch: torch.Tensor) -> None:
    batch = batch.to(next(model.parameters()).device)
    # Not mse_loss(): torch 2.5 lacks it for bfloat16 on CPUs.
    (model(batch) - batch[:, :2].cos()).square().mean().backward()


class Trainer:
    """A model, its optimizer, and endless data."""

    def __init__(self, opt: Optimizer, model: torch.nn.Module, batch_size: int = 8, seed: int = 1) -> None:
        self.opt, self.model, self.batch_size = opt, model, batch_size
        self.rng = torch.Generator().manual_seed(seed)
        self.samples = 0

    def step(self) -> None:
        if not self.opt.options.reuse_grad_buffers:
            self.opt.zero_grad()
        dtype = next(self.model.parameters()).dtype
        backward(self.model, torch.randn(self.batch_size, 6, generator=self.rng).to(dtype))
        self.opt.step(batch_size=self.batch_size)
        self.samples += self.batch_size

    def train_until(self, epoch: int, pace: float = 0.02) -> None:
        """Train until this epoch has been reached.

        Args:
            pace: seconds from batch to batch. Epochs must take longer than news of them, which on a busy machine are
                tens of milliseconds old when they come: otherwise peers lose each other, and say so.
        """
        pause = threading.Event()
        while self.opt.local_epoch < epoch:
            self.step()
            pause.wait(pace)


@pytest.fixture
def make_trainers(make_dhts, closing) -> Callable[..., list[Trainer]]:
    def make(count: int, clients: int = 0, target: int = 64, **options: Any) -> list[Trainer]:
        trainers = []
        seeds, dtype = options.pop("seeds", [0] * count), options.pop("dtype", torch.float32)
        for dht, seed in zip(make_dhts(count, clients=clients), seeds, strict=True):
            model = make_model(seed).to(dtype)
            factory = options.get("optimizer", sgd)
            training = {"optimizer": factory(model.parameters())}
            if options.get("offload"):
                training = {"optimizer": factory, "params": model.parameters()}
            rest = {name: value for name, value in options.items() if name not in ("optimizer", "offload")}
            defaults = {"run_id": "run", "matchmaking_time": 10.0, "averaging_timeout": 20.0}
            opt = Optimizer(dht=dht, target_batch_size=target, **{**defaults, **training, **rest})
            trainers.append(Trainer(closing(opt), model, seed=len(trainers)))
        return trainers

    return make


def meet(*trainers: Trainer) -> None:
    """Contribute a first batch each, and wait until all know all others, even those at the next epoch."""

    def begin(trainer: Trainer) -> None:
        # Its speed is not measured: by that others, slow to begin, would think that the epoch is over, and wait for it.
        with trainer.opt.tracker.performance_ema.pause():
            trainer.step()

    in_parallel(*(lambda t=t: begin(t) for t in trainers))
    for trainer in trainers:
        wait_until(lambda b=trainer.opt.tracker.board: b.introduced, "its record is in the table")
    for trainer in trainers:
        # Without a speed it would read again after half a minute; a client hears of nobody else by then.
        trainer.opt.dht.portal.call(trainer.opt.tracker.exchange.fetch(HOLDERS_READ_AT_START))
    for trainer in trainers:
        others = trainer.opt.tracker.expected_members
        wait_until(lambda f=others: len(f(until_epoch=10)) == len(trainers) - 1, "all peers know each other")


def check_identical(trainers: list[Trainer]) -> None:
    first, *others = trainers
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
    for other in others:
        assert torch.equal(values(first.model), values(other.model))
