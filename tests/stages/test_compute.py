"""The arithmetic of stages: the same steps as one process makes, whatever is kept, and what must not count."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shoal.serving.runtime import Runtime
from shoal.serving.task_pool import JobPool
from shoal.stages.compute import StageCompute, Task, seeded
from shoal.stages.steps import StageNorms, clip_by_global_norm, make_optimizer
from tests.device import chosen_device
from tests.optim.conftest import wait_until

STEPS, MICROBATCHES, SAMPLES, WIDTH, WORDS = 5, 4, 6, 16, 11
MAX_NORM = 1.1
SGD = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Embedding(nn.Module):
    """From integers to a nested structure."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.dropout(self.words(words)), {"words": words}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        return x + self.layers(self.norm(x)), more


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WORDS))

    def forward(self, x: torch.Tensor, more: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels, reduction="none")


def make_modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [module.to(chosen_device()) for module in (Embedding(), Block(), Block(), Head())]


def make_data(step: int) -> list[tuple[Task, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tasks = [Task(b"driver", MICROBATCHES * step + i, step, 100 * step + i, SAMPLES) for i in range(MICROBATCHES)]
    return [(each, *torch.randint(0, WORDS, (2, SAMPLES), generator=generator)) for each in tasks]


def train_alone(make: Callable[..., torch.optim.Optimizer], clips: bool) -> tuple[list[nn.Module], list[float]]:
    """Train with the same random numbers, in the plainest way."""
    modules, norms = make_modules(), []
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = make(parameters)
    for step in range(STEPS):
        optimizer.zero_grad()
        for task, words, labels in make_data(step):
            x: Any = (words.to(chosen_device()),)
            for number, module in enumerate(modules):
                with seeded(task.seed, number, torch.device(chosen_device())):
                    x = module(*x) if number < 3 else module(*x, labels.to(chosen_device()))
            (x.mean() / MICROBATCHES).backward()
        if clips:
            norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        optimizer.step()
    return modules, norms


def difference(found: Sequence[nn.Module], expected: Sequence[nn.Module], *, buffers: bool = True) -> float:
    """The largest relative difference of all parameters and buffers."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            if not buffers and name in dict(one.named_buffers()):
                continue
            worst = max(worst, float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-9)))
    return worst


class Peers:
    """Makes stages that compute in two threads, and closes them."""

    def __init__(self) -> None:
        self.pools = [JobPool(f"thread {number}") for number in range(2)]
        self.runtimes = [Runtime({}, pools=[pool]) for pool in self.pools]
        self.stages: list[StageCompute] = []

    async def __aenter__(self) -> Peers:
        for runtime in self.runtimes:
            runtime.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(stage.close() for stage in self.stages))
        for runtime in self.runtimes:
            await asyncio.to_thread(runtime.shutdown)

    async def add(
        self, dht: Any, number: int, module: nn.Module, training: dict[str, Any], thread: int = 0, **options: Any
    ) -> StageCompute:
        training = {"target_batch_size": MICROBATCHES * SAMPLES, "matchmaking_time": 60.0, **training}
        optimizer = await asyncio.to_thread(make_optimizer, dht, "run", number, module, **training)
        self.stages.append(StageCompute(number, 4, module, optimizer, self.pools[thread], **options))
        return self.stages[-1]


async def pass_through(stages: Sequence[StageCompute], task: Task, words: torch.Tensor, labels: torch.Tensor) -> Any:
    """Lead a microbatch through all stages and back."""
    x: Any = words
    for stage in stages[:-1]:
        x = await stage.forward(task, x)
    losses, grads = await stages[-1].losses(task, x, labels)
    for stage in reversed(stages[:-1]) if task.trains else ():
        grads = await stage.backward(task, grads)
    return losses


def clip_all(stages: Sequence[StageCompute]) -> None:
    """Let stages clip by the norm of all of them."""

    async def ask(stage: int, step: int) -> float:
        return await norms[stage].own(step)

    norms = [StageNorms(stage.number, len(stages), ask, 30.0) for stage in stages]
    for stage, norm in zip(stages, norms, strict=True):
        clip_by_global_norm(stage.optimizer, MAX_NORM, norm.gather)


@pytest.mark.parametrize(
    ("make", "clips", "keep_graphs"),
    [(SGD, True, 2**20), (ADAMW, True, 0), (ADAMW, False, 2**20), (SGD, False, 40_000)],
    ids=["SGD-clipped", "AdamW-clipped-nothing kept", "AdamW", "SGD-little kept"],
)
async def test_stages_make_the_steps_of_one_process(make_dhts, make, clips, keep_graphs):
    expected, norms = await asyncio.to_thread(train_alone, make, clips)
    if clips:
        assert min(norms) < MAX_NORM < max(norms), "some steps are clipped, some not"
    (dht,), modules = await asyncio.to_thread(make_dhts, 1), make_modules()
    async with Peers() as peers:
        stages = [
            await peers.add(dht, number, module, {"optimizer": make}, number // 2, keep_graphs=keep_graphs)
            for number, module in enumerate(modules)
        ]
        if clips:
            clip_all(stages)
        await asyncio.gather(*(stage.join() for stage in stages))
        for step in range(STEPS):
            await asyncio.gather(*(pass_through(stages, *each) for each in make_data(step)))
            assert {stage.kept_bytes for stage in stages} == {0}
            assert await asyncio.gather(*(stage.make_step() for stage in stages)) == [step + 1] * 4
    assert difference(modules, expected) <= 1e-6


async def test_two_peers_of_a_stage_share_its_microbatches(make_dhts):
    """Only one of them is told that the step is over: the other one learns it from the first."""
    expected, _ = await asyncio.to_thread(train_alone, ADAMW, False)
    dhts, modules, other = await asyncio.to_thread(make_dhts, 2), make_modules(), make_modules()[1]
    async with Peers() as peers:
        for number, module in enumerate(modules):
            await peers.add(dhts[0], number, module, {"optimizer": ADAMW})
        second = await peers.add(dhts[1], 1, other, {"optimizer": ADAMW}, 1)
        await asyncio.gather(*(stage.join() for stage in peers.stages))
        stages, trackers = peers.stages[:4], [each.optimizer.tracker for each in (peers.stages[1], second)]
        await asyncio.to_thread(
            wait_until, lambda: all(each.expected_group_size == 2 for each in trackers), "they know each other"
        )
        for step in range(STEPS):
            routes = [stages, [stages[0], second, *stages[2:]]]
            work = enumerate(make_data(step))
            await asyncio.gather(*(pass_through(routes[number % 2], *each) for number, each in work))
            assert not second.is_over
            steps = [asyncio.ensure_future(stage.make_step()) for stage in stages]
            await second.until_over()
            assert await second.make_step() == step + 1
            await asyncio.gather(*steps)
            assert {len(each.optimizer.grad_averager.last_round.peers) for each in (stages[1], second)} == {2}
    assert difference([*modules, other], [*expected, expected[1]], buffers=False) <= 1e-6
