"""The arithmetic of stages: the same steps as one process makes, whatever is kept, and what must not count."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import nn

from shoal.serving.runtime import Runtime
from shoal.serving.task_pool import JobPool
from shoal.stages.compute import StageCompute, Task, seeded
from shoal.stages.steps import StageNorms, clip_by_global_norm, make_optimizer
from tests.device import chosen_device

STEPS, MICROBATCHES, SAMPLES, WIDTH, WORDS = 5, 4, 6, 16, 11
MAX_NORM = 3.1
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
        return x + self.norm(self.layers(x)), more


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


def difference(found: Sequence[nn.Module], expected: Sequence[nn.Module]) -> float:
    """The largest relative difference of all parameters and buffers."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert a.dtype == b.dtype, name
            worst = max(worst, float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-9)))
    return worst


@asynccontextmanager
async def computing(count: int = 1) -> AsyncIterator[list[JobPool]]:
    """Computing threads."""
    pools = [JobPool(f"stage {number}") for number in range(count)]
    runtimes = [Runtime({}, pools=[pool]) for pool in pools]
    for runtime in runtimes:
        runtime.start()
    try:
        yield pools
    finally:
        for runtime in runtimes:
            await asyncio.to_thread(runtime.shutdown)


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
    async with computing(2) as pools:
        stages = []
        for number, module in enumerate(modules):
            options = {"optimizer": make, "target_batch_size": MICROBATCHES * SAMPLES}
            optimizer = await asyncio.to_thread(make_optimizer, dht, "run", number, module, **options)
            stages.append(StageCompute(number, 4, module, optimizer, pools[number // 2], keep_graphs=keep_graphs))
        if clips:
            clip_all(stages)
        await asyncio.gather(*(stage.join() for stage in stages))
        for step in range(STEPS):
            await asyncio.gather(*(pass_through(stages, *each) for each in make_data(step)))
            assert {stage.kept_bytes for stage in stages} == {0}
            assert await asyncio.gather(*(stage.make_step() for stage in stages)) == [step + 1] * 4
        await asyncio.gather(*(stage.close() for stage in stages))
    assert difference(modules, expected) <= 1e-6
