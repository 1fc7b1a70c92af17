"""Four peers together make the very steps that one process makes on the same samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from shoal.compression import BlockwiseQuantization, NoCompression, Uniform8BitQuantization
from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager
from tests.device import chosen_device
from tests.drills import mostly_drills
from tests.optim.conftest import in_parallel, over_sockets, wait_until

pytestmark = pytest.mark.timeout(300)  # so long only on a machine that has other things to do

EPOCHS = 7
PEERS = 4
EQUAL, UNEQUAL = [[8]] * PEERS, [[2], [1, 5], [10], [4, 4, 6]]
"""For each peer the sizes of its batches in every epoch; 32 samples together."""

OPTIMIZERS: dict[str, Callable] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def clipped(make_optimizer: Callable) -> Callable:
    """Let an optimizer clip its gradients, those of all samples, right before it steps with them."""

    def clip(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())

    def make(parameters: object) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters)
        optimizer.register_step_pre_hook(clip)
        return optimizer

    norms: list[float] = []
    make.norms = norms
    return make


MAX_NORM = 0.6


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(chosen_device())


def make_data(shares: Sequence[Sequence[int]]) -> list[list[list[torch.Tensor]]]:
    """For every epoch and peer its batches."""
    torch.manual_seed(42)
    return [[[torch.randn(size, 10) for size in sizes] for sizes in shares] for _ in range(EPOCHS)]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.to(chosen_device())
    return torch.nn.functional.mse_loss(model(batch), batch[:, :3].sin())


def train_alone(
    make_optimizer: Callable,
    schedule: Callable | None,
    data,
    make_model: Callable = make_model,
    loss_of: Callable = loss_of,
) -> torch.nn.Module:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    for epoch in data:
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch for peer in epoch for batch in peer])).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def contribute(opt: Optimizer, model: torch.nn.Module, batches: Sequence[torch.Tensor], loss_of: Callable) -> None:
    """Give this peer's share of an epoch, all of it and nothing more, however fast or slow the others are."""
    for number, batch in enumerate(batches):
        if not opt.options.reuse_grad_buffers:
            opt.zero_grad()
        loss_of(model, batch).backward()
        if number < len(batches) - 1:
            opt.grad_averager.accumulate_grads_(len(batch))  # step() might go to the next epoch before the rest
        else:
            opt.step(batch_size=len(batch))


def finish_epoch(opt: Optimizer, epoch: int) -> None:
    """Take part in the global step without new samples."""
    pause = threading.Event()
    while opt.local_epoch == epoch:
        opt.step(batch_size=0)
        pause.wait(0.002)


def train_together(
    make_dhts,
    closing,
    data,
    clients: int = 0,
    make_model: Callable = make_model,
    loss_of: Callable = loss_of,
    **options,
) -> list[torch.nn.Module]:
    target = sum(len(batch) for peer in data[0] for batch in peer)
    models = [make_model() for _ in range(PEERS)]
    options = {"run_id": "run", "matchmaking_time": 60.0, "averaging_timeout": 120.0, **options}
    options |= {"target_batch_size": target, "delay_state_averaging": options.get("delay_state_averaging", False)}
    factory, is_offloaded = options.pop("optimizer"), options.pop("offload", False)
    opts = []
    for dht, model in zip(make_dhts(PEERS, clients=clients), models, strict=True):
        training = {"optimizer": factory, "params": model.parameters()}
        if not is_offloaded:
            training = {"optimizer": factory(model.parameters())}
        opts.append(closing(Optimizer(dht=dht, **training, **options)))

    def run(index: int) -> None:
        opt, model = opts[index], models[index]
        for epoch, shares in enumerate(data):
            contribute(opt, model, shares[index], loss_of)
            if epoch == 0:
                wait_until(lambda: opt.tracker.expected_group_size == PEERS, "all peers know each other")
            finish_epoch(opt, epoch)

    in_parallel(*(lambda i=i: run(i) for i in range(PEERS)))
    for opt in opts:
        opt.state_averager.finish_jobs(60)
        assert opt.local_epoch == len(data)
        assert len(opt.grad_averager.last_round.peers) == PEERS
        assert opt.grad_averager.last_round.failed_peers == ()
    return models


def check_agreement(models: Sequence[torch.nn.Module], reference: torch.nn.Module) -> None:
    for model in models:
        for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            difference = (found - expected).abs().max() / expected.abs().max()
            assert difference <= 1e-6, f"{name} differs by {difference:.2g}"
    for model in models[1:]:
        for found, first in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(found, first), "peers differ from each other"


def step_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)


@pytest.mark.parametrize(
    ("name", "schedule", "clips", "shares"),
    [
        pytest.param("momentum", None, False, EQUAL, id="momentum"),
        pytest.param("momentum", step_schedule, True, UNEQUAL, id="momentum-scheduled-clipped-unequal"),
        pytest.param("adamw", step_schedule, False, UNEQUAL, id="adamw-scheduled-unequal"),
        pytest.param("adamw", None, True, UNEQUAL, id="adamw-clipped-unequal"),
        pytest.param("adamw", step_schedule, True, EQUAL, id="adamw-scheduled-clipped"),
    ],
)  # every two values together
def test_synchronous_training_equals_training_alone(make_dhts, closing, name, schedule, clips, shares):
    make_optimizer = clipped(OPTIMIZERS[name]) if clips else OPTIMIZERS[name]
    data = make_data(shares)
    reference = train_alone(make_optimizer, schedule, data)
    if clips:
        assert min(make_optimizer.norms) < MAX_NORM < max(make_optimizer.norms), "some steps are clipped, some not"
    models = train_together(make_dhts, closing, data, optimizer=make_optimizer, scheduler=schedule)
    check_agreement(models, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    mostly_drills(
        [
            {"offload": True, "reuse_grad_buffers": True},
            {"average_state_every": 5, "delay_state_averaging": True},
            {"clients": 1},
            {"reuse_grad_buffers": True},
            {"offload": True},
            {"delay_state_averaging": True},
            {"average_state_every": 5},
        ],
        quick=3,
    ),
    ids=lambda options: ",".join(options),
)
def test_so_it_does_with_other_options(make_dhts, closing, options):
    make_optimizer, data = clipped(OPTIMIZERS["adamw"]), make_data(UNEQUAL)
    reference = train_alone(make_optimizer, step_schedule, data)
    models = train_together(make_dhts, closing, data, optimizer=make_optimizer, scheduler=step_schedule, **options)
    check_agreement(models, reference)


# --- with lossy compression -------------------------------------------------------------------------------------------


def make_reader() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def reading_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of pictures of digits, with what they show in the last column."""
    return torch.nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1].long())


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    from sklearn.datasets import load_digits  # takes a second, and only what is slow needs it

    found = load_digits()
    pictures = torch.tensor(found.data, dtype=torch.float32) / 16
    return torch.cat([pictures, torch.tensor(found.target, dtype=torch.float32)[:, None]], dim=1)


@pytest.mark.slow_drill
@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_gradients", "of_parameters"),
    [
        (BlockwiseQuantization, BlockwiseQuantization),
        (Uniform8BitQuantization, NoCompression),
        (NoCompression, Uniform8BitQuantization),
    ],
)
def test_compression_costs_hardly_any_loss(make_dhts, closing, digits, of_gradients, of_parameters):
    """Not even with eight bits, of gradients and of parameters, in every epoch."""
    generator = torch.Generator().manual_seed(3)
    indices = [torch.randperm(len(digits), generator=generator)[: PEERS * 64].view(PEERS, 1, 64) for _ in range(30)]
    data = [[[digits[batch] for batch in peer] for peer in epoch] for epoch in indices]

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.9, momentum=0.9, weight_decay=3e-3)

    def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """To nothing: at a high rate the last loss is that of the last batch, and any noise moves it."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / len(data))

    reference = train_alone(sgd, decay, data, make_reader, reading_loss)
    expected = reading_loss(reference, digits).item()
    assert expected < 0.15, "it has learned something"
    options = {"grad_compression": of_gradients(), "state_averaging_compression": of_parameters()}
    options |= {"optimizer": sgd, "scheduler": decay}
    models = train_together(make_dhts, closing, data, 0, make_reader, reading_loss, **options)
    tolerance = 1e-4 if of_gradients is NoCompression else 0.03  # processors round differently
    for model in models:
        assert reading_loss(model, digits).item() == pytest.approx(expected, rel=tolerance)


@over_sockets
def test_two_peers_step_with_the_exact_mean(make_dhts, closing):
    """And nothing is kept or given to newcomers for another way of averaging."""
    noise = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    opts, weights = [], []
    for dht in make_dhts(2):
        weights.append(torch.nn.Parameter(torch.zeros(256, 256)))
        options = {"matchmaking_time": 60.0, "averaging_timeout": 120.0, "target_batch_size": 4}
        optimizer = torch.optim.SGD([weights[-1]], lr=1.0)
        opts.append(closing(Optimizer(dht=dht, run_id="run", optimizer=optimizer, **options)))

    def run(index: int) -> None:
        opt = opts[index]
        (weights[index] * noise[index]).sum().backward()
        opt.step(batch_size=2)
        wait_until(lambda: opt.tracker.expected_group_size == 2, "both peers know each other")
        finish_epoch(opt, 0)

    in_parallel(*(lambda i=i: run(i) for i in range(2)))
    mean = noise.double().mean(0)
    for opt, weight in zip(opts, weights, strict=True):
        opt.state_averager.finish_jobs(60)
        assert len(opt.grad_averager.last_round.peers) == 2
        error = (weight.double() + mean).norm() / mean.norm()
        assert error < 1e-6, f"the step is {error:.1%} off"
        assert type(opt.grad_averager) is GradientAverager
        assert opt.grad_averager.get_buffers() == []
        _, tensors, _ = opt.state_averager.get_current_state()
        assert [tensor.shape for tensor in tensors if tensor.numel() > 1] == [(256, 256)], "only parameters are given"
    assert torch.equal(*weights)
