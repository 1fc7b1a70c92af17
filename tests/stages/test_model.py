"""A model in stages as users train it: real modules, real peers, and the result of a single process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.stages.compute import seeded
from tests.device import chosen_device
from tests.stages.test_compute import ADAMW, MAX_NORM, SAMPLES, SGD, WORDS, Block, Embedding, Head, difference

STEPS, MICROBATCHES, SEED = 5, 4, 1000


def stage_factories() -> tuple[list[nn.Module], list[Callable[[], nn.Module]]]:
    torch.manual_seed(0)
    modules = [module.to(chosen_device()) for module in (Embedding(), Block(), Block(), Head())]
    return modules, [functools.partial(lambda each: each, module) for module in modules]


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, WORDS, (2, SAMPLES), generator=generator)) for _ in range(count)]


def train_alone(make: Any, clips: bool) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """Train with the same random numbers, in the plainest way."""
    modules, found = stage_factories()[0], []
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = make(parameters)
    for number, (words, labels) in enumerate(data(STEPS * MICROBATCHES)):
        x: Any = (words.to(chosen_device()),)
        for stage, module in enumerate(modules):
            with seeded(SEED + number + 1, stage, torch.device(chosen_device())):
                x = module(*x) if stage < 3 else module(*x, labels.to(chosen_device()))
        found.append(x.detach().cpu())
        (x.mean() / MICROBATCHES).backward()
        if number % MICROBATCHES == MICROBATCHES - 1:
            if clips:
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return modules, found


@pytest.fixture
def make_peer(closing: Any) -> Callable[..., shoal.StagedModel]:
    def make(dht: Any, stage: Any, factories: Any, **options: Any) -> shoal.StagedModel:
        defaults = {"optimizer": SGD, "target_batch_size": MICROBATCHES * SAMPLES, "seed": SEED}
        return closing(
            shoal.StagedModel(
                dht=dht,
                run_id="run",
                stages=factories,
                stage=stage,
                **{**defaults, **options},  # type: ignore[arg-type]
            )
        )

    return make


@pytest.mark.parametrize(("make", "clips"), [(SGD, True), (ADAMW, False)], ids=["SGD-clipped", "AdamW"])
def test_result_is_that_of_one_process(make_dhts, make_peer, make, clips):
    expected, losses = train_alone(make, clips)
    modules, factories = stage_factories()
    dhts = make_dhts(5)
    options = {"optimizer": make, "clip_grad_norm": MAX_NORM if clips else None}
    peers = [make_peer(dht, stage, factories, **options) for dht, stage in zip(dhts, [0, 1, 2, 3, None], strict=True)]
    found = list(peers[-1].train(data(STEPS * MICROBATCHES)))
    torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-5, atol=1e-6)
    wait_for_epoch(peers, STEPS)
    # Running means depend on the order in which microbatches pass, which is not fixed.
    assert difference(modules, expected, buffers=False) <= 1e-6


def wait_for_epoch(peers: list[shoal.StagedModel], epoch: int) -> None:
    pause = threading.Event()
    while min(peer.local_epoch for peer in peers) < epoch:
        pause.wait(0.01)
