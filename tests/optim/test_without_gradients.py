"""Parameters that no batch has gradients of: a layer that was frozen in mid-run, a branch that is not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from shoal.compression import Uniform8BitQuantization
from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.optim.conftest import in_parallel, wait_until
from tests.optim.test_equivalence import contribute, finish_epoch

EPOCHS, PEERS, BATCH = 6, 3, 8
FROZEN_FROM = 3


class Branches(torch.nn.Module):
    """A stem, and three branches. Each batch is worth one branch; nobody ever uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Linear(6, 40)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(3))
        self.head = torch.nn.Linear(40, 2)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(self.branches[branch](self.stem(x).tanh()).tanh())


def loss_of(model: Branches, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
    x, branch = batch
    return (model(x, branch) - x[:, :2].cos()).square().mean()


Data = Sequence[Sequence[tuple[torch.Tensor, int]]]


def make_data() -> Data:
    """For each epoch and peer a batch and its branch. In the last epochs nobody uses the second branch, either."""
    torch.manual_seed(1)
    branch_of = lambda epoch, peer: int(peer == epoch % PEERS and epoch < FROZEN_FROM)  # noqa: E731
    return [[(torch.randn(BATCH, 6), branch_of(epoch, peer)) for peer in range(PEERS)] for epoch in range(EPOCHS)]


def freeze(model: Branches, epoch: int) -> None:
    if epoch == FROZEN_FROM:
        model.stem.requires_grad_(False)
        model.then = [each.detach().clone() for each in (model.stem.weight, model.branches[1].weight)]


def train_alone(make_optimizer: Callable, data: Data) -> Branches:
    model = Branches()
    optimizer = make_optimizer(model.parameters())
    for epoch, batches in enumerate(data):
        freeze(model, epoch)
        optimizer.zero_grad()
        (sum(loss_of(model, batch) for batch in batches) / PEERS).backward()
        optimizer.step()
    return model


def momentum(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def train_together(make_dhts, closing, make_optimizer: Callable, data: Data, **options) -> list[Branches]:
    models = [Branches() for _ in range(PEERS)]
    options = {"run_id": "run", "matchmaking_time": 60.0, "averaging_timeout": 120.0, **options}
    options |= {"target_batch_size": PEERS * BATCH, "delay_state_averaging": False}
    is_offloaded, opts = options.pop("offload", False), []
    for dht, model in zip(make_dhts(PEERS), models, strict=True):
        training = {"optimizer": make_optimizer, "params": model.parameters()}
        if not is_offloaded:
            training = {"optimizer": make_optimizer(model.parameters())}
        opts.append(closing(Optimizer(dht=dht, **training, **options)))

    def run(index: int) -> None:
        opt, model = opts[index], models[index]
        for epoch, batches in enumerate(data):
            freeze(model, epoch)
            x, branch = batches[index]
            contribute(opt, model, [x], lambda model, x, branch=branch: loss_of(model, (x, branch)))
            if epoch == 0:
                wait_until(lambda: opt.tracker.expected_group_size == PEERS, "all peers know each other")
            finish_epoch(opt, epoch)

    in_parallel(*(lambda i=i: run(i) for i in range(PEERS)))
    for opt in opts:
        opt.state_averager.finish_jobs(60)
        assert len(opt.grad_averager.last_round.peers) == PEERS
    return models


@pytest.mark.parametrize(
    ("make_optimizer", "options"),
    [
        (momentum, {}),
        (adamw, {}),
        (adamw, {"offload": True}),
        (momentum, {"reuse_grad_buffers": True}),
        (momentum, {"reuse_grad_buffers": True, "batch_size_per_step": BATCH}),
        (adamw, {"grad_averager": GradientAverager}),
    ],
    ids=["momentum", "adamw", "offload", "in place", "in place, batches of one size", "plain averages"],
)
def test_they_are_left_alone_as_in_training_alone(make_dhts, closing, make_optimizer, options):
    data = make_data()
    expected = train_alone(make_optimizer, data)
    start = Branches()
    assert torch.equal(expected.branches[2].weight, start.branches[2].weight)
    for model in train_together(make_dhts, closing, make_optimizer, data, **options):
        for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "averager",
    [
        PowerSGDGradientAverager.get_factory(averager_rank=2),
        PowerEFGradientAverager.get_factory(averager_rank=2),
        GradientAverager.get_factory(compression=Uniform8BitQuantization()),
    ],
)
def test_whatever_is_lost_on_the_way(make_dhts, closing, averager):
    data, start = make_data(), Branches()
    models = train_together(make_dhts, closing, momentum, data, grad_averager=averager)
    for model in models:
        # Averages of equal parameters may differ from them in the last bit.
        torch.testing.assert_close(model.branches[2].weight, start.branches[2].weight)
        for found, then in zip((model.stem.weight, model.branches[1].weight), model.then, strict=True):
            torch.testing.assert_close(found.detach(), then)
        assert not torch.allclose(model.branches[1].weight, start.branches[1].weight), "some batches have used it"
        for mine, first in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(mine, first)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_peer_alone_leaves_them_alone_too(make_dhts, closing, reuse):
    """Its own gradients are what counts, and when a round has failed."""
    (dht,) = make_dhts(1)
    model, alone = Branches(), Branches()
    options = {"run_id": "run", "target_batch_size": BATCH, "reuse_grad_buffers": reuse}
    opt = closing(Optimizer(dht=dht, optimizer=adamw(model.parameters()), **options))
    optimizer = adamw(alone.parameters())
    for epoch, batches in enumerate(make_data()):
        for each in (model, alone):
            freeze(each, epoch)
        if not reuse:
            opt.zero_grad()
        optimizer.zero_grad()
        for each in (model, alone):
            loss_of(each, batches[0]).backward()
        opt.step(batch_size=BATCH)
        finish_epoch(opt, epoch)
        optimizer.step()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_averaged_gradients_that_nobody_has_are_none(make_dhts, closing):
    models = [Branches() for _ in range(2)]
    averagers = [
        closing(GradientAverager(model.parameters(), dht=dht, prefix="run", start=True, min_matchmaking_time=30.0))
        for dht, model in zip(make_dhts(2), models, strict=True)
    ]
    for number, (averager, model) in enumerate(zip(averagers, models, strict=True)):
        loss_of(model, (torch.ones(4, 6), number)).backward()
        averager.accumulate_grads_(4)
    in_parallel(*(lambda a=a: a.step(timeout=60, expected_group_size=2) for a in averagers))
    for averager, model in zip(averagers, models, strict=True):
        assert len(averager.averaged_grads) == len(list(model.parameters()))
        with averager.use_averaged_gradients():
            has_gradients = [branch.weight.grad is not None for branch in model.branches]
        assert has_gradients == [True, True, False]
