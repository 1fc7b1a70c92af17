"""Remote experts learn from the losses of their callers: in a row, in a mixture, and balanced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shoal import DHT, RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from shoal.moe.backend import ModuleBackend
from shoal.moe.declare import get_experts
from shoal.moe.layers import name_to_block
from tests.moe.servers import Row, expert, serving
from tests.moe.swarms import swarm

WIDTH = 16


def learner(module: nn.Module, width: int = WIDTH) -> ModuleBackend:
    return expert(module, Row(width), optimizer=torch.optim.SGD(module.parameters(), lr=0.05), max_batch_size=512)


def two_rings() -> tuple[torch.Tensor, torch.Tensor]:
    """Points around the origin: the inner ones belong to one class, the outer ones to the other."""
    angles, labels = torch.rand(200) * 6.28, torch.arange(200) % 2
    radius = 1.0 + labels + 0.1 * torch.randn(200)
    return torch.stack([angles.cos() * radius, angles.sin() * radius], 1), labels


def two_clouds() -> tuple[torch.Tensor, torch.Tensor]:
    """Points around two others, one for each class."""
    labels = torch.arange(200) % 2
    return 0.7 * torch.randn(200, 2) + labels[:, None] * torch.tensor([2.0, -2.0]), labels


def train(
    model: Callable[[torch.Tensor], Any],
    parameters: Iterator[nn.Parameter],
    steps: int,
    points: Callable[[], tuple[torch.Tensor, torch.Tensor]] = two_rings,
) -> float:
    """The accuracy after some steps; with rings, once it is 90 %."""
    inputs, labels = points()
    optimizer = torch.optim.SGD([*parameters], lr=0.05)
    accuracy = 0.0
    for _ in range(steps):
        result = model(inputs)
        logits, extra = result if isinstance(result, tuple) else (result, 0.0)
        accuracy = (logits.argmax(1) == labels).float().mean().item()
        if accuracy >= 0.9 and points is two_rings:
            break
        optimizer.zero_grad()
        (nn.functional.cross_entropy(logits, labels) + extra).backward()
        optimizer.step()
    return accuracy


@pytest.fixture
def two() -> Iterator[tuple[DHT, DHT]]:
    torch.manual_seed(0)
    with swarm(2) as [server, client]:
        yield server, client


def test_experts_in_a_row_learn(two: tuple[DHT, DHT]) -> None:
    server, client = two
    # All that learns is at the server.
    first, last = nn.Sequential(nn.Linear(2, 32), nn.ReLU()), nn.Linear(32, 2)
    with serving(server, {"first.0": learner(first, 2), "last.0": learner(last, 32)}):
        found: Any = get_experts(client, ["first.0", "last.0"])
        model, nothing = nn.Sequential(*found), nn.Linear(1, 1)
        assert train(lambda x: model(x), nothing.parameters(), 1) < 0.8
        assert train(lambda x: model(x), nothing.parameters(), 300) >= 0.9


def test_mixture_learns(two: tuple[DHT, DHT]) -> None:
    server, client = two
    with serving(server, {f"e.{n}.0": learner(name_to_block["ffn"](WIDTH)) for n in range(2)}):
        moe = RemoteMixtureOfExperts(in_features=WIDTH, grid_size=(2, 2), dht=client, uid_prefix="e.", k_best=2)
        model = nn.Sequential(nn.Linear(2, WIDTH), moe, nn.Linear(WIDTH, 2))
        assert train(model, model.parameters(), 150) >= 0.9


def test_switch_learns_and_uses_all_experts(two: tuple[DHT, DHT]) -> None:
    server, client = two
    blocks = [name_to_block["ffn"](WIDTH) for _ in range(5)]
    with serving(server, {f"e.{n}": learner(each) for n, each in enumerate(blocks)}):
        moe = RemoteSwitchMixtureOfExperts(
            in_features=WIDTH, grid_size=(5,), dht=client, uid_prefix="e.", k_min=1, jitter_eps=0.0
        )
        before, after = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)
        started = [[each.clone() for each in block.parameters()] for block in blocks]

        def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mixed, loss = moe(before(x))
            return after(mixed), 0.01 * loss

        learning = nn.ModuleList([before, moe, after]).parameters()
        assert train(model, learning, 30, two_clouds) >= 0.9
        assert moe.grid_utilization.sum().item() == pytest.approx(1.0)
        used = moe.grid_utilization > 0.2 * 0.9**30 * 1.001
        for is_used, block, parameters in zip(used.tolist(), blocks, started, strict=True):
            assert is_used != all(map(torch.equal, block.parameters(), parameters)), "those that were used have learned"


def test_seeds_in_the_inputs_make_dropout_repeatable(two: tuple[DHT, DHT]) -> None:
    server, client = two
    module = name_to_block["det_dropout"](WIDTH)
    mask = Row(WIDTH, dtype=torch.int64)
    with serving(server, {"e.0": expert(module, Row(WIDTH), mask)}):
        remote: Any = get_experts(client, ["e.0"])[0]  # type: ignore[index]
        inputs, kept = torch.randn(4, WIDTH, requires_grad=True), torch.randint(0, 2, (4, WIDTH))
        outputs = [remote(inputs, kept) for _ in range(2)]
        grads = [torch.autograd.grad(each.sum(), inputs)[0] for each in outputs]
        assert torch.allclose(*outputs, rtol=0, atol=1e-5)
        assert torch.allclose(*grads, rtol=0, atol=1e-5)
        assert not grads[0][kept == 0].any()
