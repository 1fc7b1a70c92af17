"""The arithmetic of stages: the same steps as one process makes, whatever is kept, and what must not count."""

from __future__ import annotations

import asyncio
import functools
import math
import mmap
import platform
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.compression import NoCompression
from shoal.errors import MicrobatchError, ReactorError
from shoal.optim import DiLoCo
from shoal.serving.runtime import Runtime
from shoal.serving.task_pool import JobPool
from shoal.stages import compute
from shoal.stages.compute import StageCompute, StageTask, give_memory_back, seeded
from shoal.stages.steps import StageNorms, clip_by_global_norm, make_optimizer
from tests.device import chosen_device, on_cpu_only
from tests.optim.conftest import wait_until

pytestmark = pytest.mark.oldest
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


def make_data(step: int) -> list[tuple[StageTask, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tasks = [StageTask(b"driver", MICROBATCHES * step + i, step, 100 * step + i, SAMPLES) for i in range(MICROBATCHES)]
    return [(each, *torch.randint(0, WORDS, (2, SAMPLES), generator=generator)) for each in tasks]


def halve(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train_alone(
    make: Callable[..., torch.optim.Optimizer], clips: bool, scheduler: Any = None
) -> tuple[list[nn.Module], list[float]]:
    """Train with the same random numbers, in the plainest way."""
    modules, norms = make_modules(), []
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = make(parameters)
    schedule = None if scheduler is None else scheduler(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for task, words, labels in make_data(step):
            x: Any = (words.to(chosen_device()),)
            for number, module in enumerate(modules):
                with seeded(task.seed, number, chosen_device()):
                    x = module(*x) if number < 3 else module(*x, labels.to(chosen_device()))
            (x.mean() / MICROBATCHES).backward()
        if clips:
            norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return modules, norms


def difference(found: Sequence[nn.Module], expected: Sequence[nn.Module], *, buffers: bool = True) -> float:
    """The largest relative difference of all parameters and buffers but counters."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            if not a.is_floating_point() or (not buffers and name in dict(one.named_buffers())):
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


async def pass_through(
    stages: Sequence[StageCompute], task: StageTask, words: torch.Tensor, labels: torch.Tensor
) -> Any:
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
    ("make", "clips", "keep_graphs", "training"),
    [
        pytest.param(SGD, True, 2**20, {}, id="SGD-clipped"),
        pytest.param(ADAMW, True, 0, {}, id="AdamW-clipped-nothing kept"),
        pytest.param(SGD, False, 40_000, {}, id="SGD-little kept"),
        pytest.param(ADAMW, True, 2**20, {"offload_optimizer": True, "scheduler": halve}, id="AdamW-offloaded"),
    ],
)
async def test_stages_make_the_steps_of_one_process(make_dhts, make, clips, keep_graphs, training):
    expected, norms = await asyncio.to_thread(train_alone, make, clips, training.get("scheduler"))
    if clips:
        assert min(norms) < MAX_NORM < max(norms), "some steps are clipped, some not"
    (dht,), modules = await asyncio.to_thread(make_dhts, 1), make_modules()
    async with Peers() as peers:
        stages = [
            await peers.add(dht, number, module, {"optimizer": make, **training}, number // 2, keep_graphs=keep_graphs)
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


# --- what is kept, and what must not count ----------------------------------------------------------------------------


def microbatch(sequence: int, **changes: Any) -> StageTask:
    return StageTask(b"driver", sequence, 0, sequence, SAMPLES)._replace(**changes)


async def test_kept_graphs_stay_within_their_bound(make_dhts):
    """Whatever does not fit is computed again, without a graph that takes the memory of one in between."""
    (dht,), module = await asyncio.to_thread(make_dhts, 1), make_modules()[1]
    x, calls = torch.randn(SAMPLES, WIDTH, requires_grad=True), []
    module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    async with Peers() as peers:
        stage = await peers.add(dht, 1, module, {"optimizer": SGD}, keep_graphs=2**30)
        await stage.forward(microbatch(0), (x, {}))
        graph = stage.kept_bytes - x.nbytes
        assert 4 * SAMPLES * (WIDTH + 2 * 32) < graph <= 4 * SAMPLES * (WIDTH + 3 * 32) + 8 * WIDTH
        stage.keep_graphs = 3 * (graph + x.nbytes) + x.nbytes
        outputs = [await stage.forward(microbatch(number), (x, {})) for number in range(1, 6)]
        assert stage.kept_bytes == 3 * graph + 6 * x.nbytes
        assert calls == [True] * 3 + [False] * 3
        for number in range(1, 6):
            grads = await stage.backward(microbatch(number), [torch.ones_like(outputs[number - 1][0])])
            assert grads[0].shape == x.shape
        assert calls[6:] == [True] * 3, "those are repeated"
        stage.forget(microbatch(0))
        assert stage.kept_bytes == 0
        with pytest.raises(MicrobatchError, match="microbatch 0 is not known here"):
            await stage.backward(microbatch(0), [None])


@on_cpu_only
async def test_memory_is_given_back_only_where_graphs_had_no_room(make_dhts, monkeypatch):
    (dht,), module = await asyncio.to_thread(make_dhts, 1), make_modules()[1]
    x, given_back, may_go_on = torch.randn(SAMPLES, WIDTH, requires_grad=True), [], threading.Event()
    monkeypatch.setattr(compute, "give_memory_back", lambda: given_back.append(1))
    async with Peers() as peers:
        stage = await peers.add(dht, 1, module, {"optimizer": SGD})
        await stage.forward(microbatch(0), (x, {}))
        peers.pools[0].submit(may_go_on.wait)
        backward = asyncio.ensure_future(stage.backward(microbatch(0), [torch.ones(SAMPLES, WIDTH)]))
        forward = asyncio.ensure_future(stage.forward(microbatch(1), (x, {})))  # has no graph yet
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.gather(backward, forward)
        assert not given_back
        stage.keep_graphs = 0
        await stage.forward(microbatch(2), (x, {}))
        await stage.backward(microbatch(2), [torch.ones(SAMPLES, WIDTH)])
        assert given_back


def resident_bytes() -> int:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives freed memory back by itself")
def test_holes_between_tensors_are_given_back():
    """Those that are freed between others that stay: glibc would keep them."""
    tensors = [torch.ones(2**14) for _ in range(2000)]
    before, freed = resident_bytes(), sum(each.nbytes for each in tensors[::2])
    del tensors[::2]
    give_memory_back()
    assert before - resident_bytes() > freed / 2
    assert len(tensors) == 1000


async def test_what_is_not_finite_does_not_count(make_dhts):
    """A loss, a gradient that comes, or one of the parameters: it is refused, and the step is that of the others."""
    expected, _ = await asyncio.to_thread(train_alone, SGD, False)
    (dht,), modules = await asyncio.to_thread(make_dhts, 1), make_modules()
    async with Peers() as peers:
        stages = [await peers.add(dht, number, module, {"optimizer": SGD}) for number, module in enumerate(modules)]
        await asyncio.gather(*(stage.join() for stage in stages))
        words, labels = make_data(0)[0][1:]
        nan, bad = torch.full((SAMPLES, WIDTH), math.nan), microbatch(99)
        with pytest.raises(MicrobatchError, match="a loss of microbatch 99 is not finite"):
            await stages[3].losses(bad, (nan, {}), labels)
        await stages[0].forward(bad, words)
        with pytest.raises(MicrobatchError, match="a gradient of the outputs of microbatch 99 is not finite"):
            await stages[0].backward(bad, [nan, None])
        await stages[1].forward(bad, (torch.full((SAMPLES, WIDTH), 1e30), {}))
        with pytest.raises(MicrobatchError, match="gradients of microbatch 99 are not finite in stage 1"):
            await stages[1].backward(bad, [torch.full((SAMPLES, WIDTH), 3e38)])
        for grads, why in [
            ([], "0 gradients for 2 outputs"),
            ([torch.ones(3), None], r"shape \(3,\), expected \(6, 16\)"),
        ]:
            await stages[0].forward(bad, words)
            with pytest.raises(MicrobatchError, match=why):
                await stages[0].backward(bad, grads)
        with pytest.raises(ValueError, match=r"one loss for each of the 5 samples, got shape \(6,\)"):
            await stages[3].losses(bad._replace(samples=5), (torch.zeros(SAMPLES, WIDTH), {}), labels)
        modules[1].norm.reset_running_stats()
        for step in range(STEPS):
            for each in make_data(step):
                await pass_through(stages, *each)
            assert all(p.grad is None for module in modules for p in module.parameters())
            await asyncio.gather(*(stage.make_step() for stage in stages))
    assert difference(modules, expected) <= 1e-6


async def test_evaluation_changes_and_keeps_nothing(make_dhts):
    (dht,), modules = await asyncio.to_thread(make_dhts, 1), make_modules()
    modules[2].norm.eval()  # as a user may have frozen it
    before = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    async with Peers() as peers:
        stages = [await peers.add(dht, number, module, {"optimizer": SGD}) for number, module in enumerate(modules)]
        words, labels = make_data(0)[0][1:]
        losses = await pass_through(stages, microbatch(0, trains=False), words, labels)
        assert {stage.kept_bytes for stage in stages} == {0}
    assert [module.training for module in modules] == [True] * 4
    assert not modules[2].norm.training
    assert modules[2].layers.training
    for module, values in zip(modules, before, strict=True):
        assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
        module.eval()
    x: Any = (words.to(chosen_device()),)
    for module in modules[:3]:
        x = module(*x)
    expected = modules[3](*x, labels.to(chosen_device())).detach()
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


async def test_a_forward_pass_that_cannot_be_repeated_is_noticed(make_dhts):
    """Its gradient would be that of other activations than those that went to the next stage."""

    class Disturbed(Block):
        def forward(self, x: torch.Tensor, more: Any) -> Any:
            if disturbs:
                torch.rand(1)  # as another thread may do
            return super().forward(x, more)

    (dht,), disturbs, x = await asyncio.to_thread(make_dhts, 1), False, torch.randn(SAMPLES, WIDTH)
    async with Peers() as peers:
        stage = await peers.add(dht, 1, Disturbed().to(chosen_device()), {"optimizer": SGD}, keep_graphs=0)
        await stage.forward(microbatch(1), (x, {}))
        disturbs = True
        with pytest.raises(MicrobatchError, match=r"other outputs when it is repeated.*keep_graphs"):
            await stage.backward(microbatch(1), [torch.ones(SAMPLES, WIDTH)])
        assert stage.optimizer.grad_averager.local_samples_accumulated == 0


@pytest.mark.parametrize(
    "options", [pytest.param({"fused": True}, marks=on_cpu_only), {"foreach": True}], ids=["fused", "foreach"]
)
async def test_a_graph_of_parameters_before_the_step_is_not_used(make_dhts, options):
    """Fused optimizers change parameters without telling autograd."""
    (dht,), module = await asyncio.to_thread(make_dhts, 1), make_modules()[1]
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    optimizer = functools.partial(torch.optim.SGD, lr=1.0, **options)
    async with Peers() as peers:
        stage = await peers.add(dht, 1, module, {"optimizer": optimizer})
        await stage.join()
        for number in range(2):
            await stage.forward(microbatch(number), (x, {}))
        ones = torch.ones(SAMPLES, WIDTH)
        await stage.backward(microbatch(0), [ones])
        await stage.make_step()
        assert stage.kept_bytes == x.nbytes
        found = (await stage.backward(microbatch(1), [ones]))[0]
    leaf = x.detach().to(chosen_device(), copy=True).requires_grad_()
    with seeded(1, 1, chosen_device()):
        module(leaf, {})[0].backward(ones.to(chosen_device()))
    torch.testing.assert_close(found, leaf.grad, rtol=1e-6, atol=1e-6)


# --- other ways to step -----------------------------------------------------------------------------------------------


async def add_two(peers: Peers, make_dhts: Any, training: dict[str, Any], **options: Any) -> list[StageCompute]:
    """Two peers of one stage that know each other."""
    dhts = await asyncio.to_thread(make_dhts, 2)
    for number, dht in enumerate(dhts):
        await peers.add(dht, 1, make_modules()[1], training, number, **options)
    await asyncio.gather(*(stage.join() for stage in peers.stages))
    trackers = [stage.optimizer.tracker for stage in peers.stages]
    await asyncio.to_thread(wait_until, lambda: all(t.expected_group_size == 2 for t in trackers), "they are two")
    return peers.stages


async def push(stage: StageCompute, number: int) -> None:
    """A microbatch through a stage and back."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(number))
    y, _ = await stage.forward(microbatch(number), (x, {}))
    await stage.backward(microbatch(number), [y / y.numel()])


async def test_asynchronous_stage_computes_while_it_averages(make_dhts):
    async with Peers() as peers:
        first, second = await add_two(peers, make_dhts, {"optimizer": ADAMW, "synchronous": False})
        start = [parameter.detach().clone() for parameter in first.module.parameters()]
        for step in range(3):
            await push(first, 4 * step)
            assert await first.make_step() == step + 1
            # The other one is not there yet. What comes now is of the next step.
            ending = asyncio.ensure_future(first.end_step())
            await push(first, 4 * step + 1)
            await push(second, 4 * step + 2)
            assert not ending.done()
            assert await second.make_step() == step + 1
            await ending
            for stage in peers.stages:
                await asyncio.to_thread(stage.optimizer.state_averager.wait_for_jobs, 60)
                weights = stage.optimizer.grad_averager.last_round.weights
                assert sum(weights) == SAMPLES * (2 if step == 0 else 3)
        for stage in peers.stages:
            await push(stage, 99)  # before it, the step is applied
        assert all(map(torch.equal, *(stage.module.parameters() for stage in peers.stages)))
        assert not any(map(torch.equal, start, first.module.parameters()))


async def test_stage_that_exchanges_only_now_and_then(make_dhts):
    """With DiLoCo, each peer makes inner steps of its own from several microbatches."""
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    training = {"optimizer": sgd, "inner_batch_size": 2 * SAMPLES, "compression": NoCompression()}
    training["outer_optimizer"] = functools.partial(torch.optim.SGD, lr=1.0)
    async with Peers() as peers:
        stages = await add_two(peers, make_dhts, training, inner_batch_size=2 * SAMPLES)
        for index, stage in enumerate(stages):
            for number in range(4):
                await push(stage, 10 * index + number)
            assert stage.optimizer.inner_steps == 2
        assert await asyncio.gather(*(stage.make_step() for stage in stages)) == [1, 1]
    alone = [make_modules()[1] for _ in range(2)]
    for index, module in enumerate(alone):
        optimizer = sgd(module.parameters())
        for number in range(4):
            x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(10 * index + number))
            with seeded(10 * index + number, 1, chosen_device()):
                y = module(x.to(chosen_device()), {})[0]
            (y.square().sum() / y.numel() / 2 / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    for found in stages:
        for parameter, *own in zip(found.module.parameters(), *(m.parameters() for m in alone), strict=True):
            torch.testing.assert_close(parameter, sum(own) / 2, rtol=1e-5, atol=1e-6)


both_optimizers = pytest.mark.parametrize("inner", [{}, {"inner_batch_size": SAMPLES}], ids=["Optimizer", "DiLoCo"])


@both_optimizers
@pytest.mark.parametrize("steps", [0, 3])
async def test_newcomer_takes_over_the_newest_state(make_dhts, steps, inner):
    """Also before the first step: each peer has made parameters of its own, and the first one's are those of all."""
    dhts = await asyncio.to_thread(make_dhts, 2)
    async with Peers() as peers:
        first = await peers.add(dhts[0], 1, make_modules()[1], {"optimizer": ADAMW, **inner}, **inner)
        await first.join()
        for step in range(steps):
            await push(first, step)
            await first.make_step()
        second = await peers.add(dhts[1], 1, Block().to(chosen_device()), {"optimizer": ADAMW, **inner}, 1, **inner)
        await second.join()
        assert second.epoch == steps
    assert difference([second.module], [first.module]) == 0.0


async def test_a_peer_that_a_round_has_left_out_catches_up_in_the_step(make_dhts, monkeypatch):
    """Otherwise it would refuse the microbatches of the next step."""
    inner = {"inner_batch_size": SAMPLES}
    dhts = await asyncio.to_thread(make_dhts, 2)
    async with Peers() as peers:
        for number, dht in enumerate(dhts):
            await peers.add(dht, 1, Block().to(chosen_device()), {"optimizer": SGD, **inner}, number, **inner)
        with monkeypatch.context() as patched:  # both begin with parameters of their own
            patched.setattr(DiLoCo, "load_state_from_peers", lambda self: False)
            for stage in peers.stages:
                await stage.join()
        trackers = [stage.optimizer.tracker for stage in peers.stages]
        await asyncio.to_thread(wait_until, lambda: all(t.expected_group_size == 2 for t in trackers), "they are two")
        for step in range(3):
            for number, stage in enumerate(peers.stages):
                await push(stage, 2 * step + number)
                assert stage.samples == SAMPLES
            await asyncio.gather(*(stage.make_step() for stage in peers.stages))
            assert all(map(torch.equal, *(stage.module.parameters() for stage in peers.stages)))


async def test_a_peer_that_leaves_makes_an_inner_step_with_what_it_has(make_dhts):
    inner = {"inner_batch_size": 4 * SAMPLES}
    (dht,) = await asyncio.to_thread(make_dhts, 1)
    async with Peers() as peers:
        stage = await peers.add(dht, 1, make_modules()[1], {"optimizer": SGD, **inner}, **inner)
        await stage.join()
        await push(stage, 0)
        assert (stage.samples, stage.optimizer.inner_steps) == (SAMPLES, 0)
        await stage.flush()
        assert (stage.samples, stage.optimizer.inner_steps) == (SAMPLES, 1)
        await stage.make_step()
        assert stage.samples == 0


async def test_microbatches_without_gradients_are_refused_and_said(make_dhts):
    (dht,) = await asyncio.to_thread(make_dhts, 1)
    async with Peers() as peers:
        stage = await peers.add(dht, 1, make_modules()[1], {"optimizer": SGD})
        await stage.forward(microbatch(0), (torch.randn(SAMPLES, WIDTH), {}))
        with pytest.raises(MicrobatchError, match="no parameter of stage 1 has a gradient of microbatch 0"):
            await stage.backward(microbatch(0), [None])


@both_optimizers
async def test_a_stage_that_starts_over_takes_the_label_of_the_others(make_dhts, inner):
    """All of its peers have left. The next ones meet at the step of the other stages, and not at each one before it."""
    async with Peers() as peers:
        first, second = await add_two(peers, make_dhts, {"optimizer": SGD, **inner}, **inner)
        for stage in (first, second):
            await stage.go_to(1000)
        trackers = [stage.optimizer.tracker for stage in peers.stages]
        await asyncio.to_thread(wait_until, lambda: all(t.expected_group_size == 2 for t in trackers), "they are two")
        await push(first, 0)
        assert await asyncio.gather(*(stage.make_step() for stage in peers.stages)) == [1001, 1001]
    assert all(map(torch.equal, *(stage.module.parameters() for stage in peers.stages)))


async def test_a_peer_leaves_while_it_waits_for_others(make_dhts):
    async with Peers() as peers:
        first, second = await add_two(peers, make_dhts, {"optimizer": ADAMW})
        await push(first, 0)
        step = asyncio.ensure_future(first.make_step())
        await second.until_over()
        computing = asyncio.ensure_future(push(first, 1))
        await asyncio.sleep(0.01)
        assert not computing.done(), "nothing is computed while a step is made"
        await asyncio.wait_for(first.close(), 30)
        await asyncio.gather(step, computing, return_exceptions=True)
        assert isinstance(computing.exception(), ReactorError)
        assert await second.make_step() == 1


# --- other modules ----------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """With named inputs, one of which is no activation, and an argument that is the same in all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"gate": gate, "x": self.dropout(self.linear(x)) * gate * scale}


class Skipping(nn.Linear):
    """Skips its layer for some microbatches."""

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        return x if skips else super().forward(x)


async def test_microbatches_that_use_no_parameter_count(make_dhts):
    (dht,), module = await asyncio.to_thread(make_dhts, 1), Skipping(WIDTH, WIDTH).to(chosen_device())
    async with Peers() as peers:
        stage = await peers.add(dht, 2, module, {"optimizer": SGD})
        for number, skips in enumerate((True, False)):
            task = microbatch(number)
            await stage.forward(task, torch.ones(SAMPLES, WIDTH).requires_grad_(), {"skips": skips})
            [grad] = await stage.backward(task, [torch.ones(SAMPLES, WIDTH)])
            assert grad is not None
        assert stage.samples == 2 * SAMPLES, "as in a single process, they count in the mean"


class Complex(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.complex(y, 2 * y)


@on_cpu_only
@pytest.mark.parametrize("keep_graphs", [2**20, 0], ids=["kept", "repeated"])
async def test_complex_outputs_have_gradients(make_dhts, keep_graphs):
    (dht,), module = await asyncio.to_thread(make_dhts, 1), Complex(WIDTH, WIDTH)
    async with Peers() as peers:
        stage, task = await peers.add(dht, 2, module, {"optimizer": SGD}, keep_graphs=keep_graphs), microbatch(0)
        x = torch.randn(SAMPLES, WIDTH).requires_grad_()
        outputs = await stage.forward(task, x)
        assert outputs.requires_grad
        grad = torch.randn(SAMPLES, WIDTH, dtype=torch.complex64)
        found = await stage.backward(task, [grad])
    torch.testing.assert_close(found, [*torch.autograd.grad(module(x), x, grad)])


@on_cpu_only  # the fake device has neither the types nor a compiler
@pytest.mark.parametrize("keep_graphs", [2**20, 0], ids=["kept", "repeated"])
@pytest.mark.parametrize(
    "kind", ["plain", "bfloat16", "frozen", pytest.param("compiled", marks=pytest.mark.leaves_something)]
)  # torch's compiler starts a thread that stays
async def test_kinds_of_modules(make_dhts, kind, keep_graphs):
    """Gradients are those of autograd, however inputs come, and whatever the module is."""
    (dht,), module = await asyncio.to_thread(make_dhts, 1), Gated().to(chosen_device())
    module.requires_grad_(kind != "frozen")
    used = torch.compile(module, backend="aot_eager") if kind == "compiled" else module
    autocast = torch.bfloat16 if kind == "bfloat16" else None
    inputs = {"x": torch.randn(SAMPLES, WIDTH).requires_grad_(), "gate": torch.rand(SAMPLES, WIDTH)}
    extras, task, ones = {"scale": torch.tensor(2.0)}, microbatch(7), torch.ones(SAMPLES, WIDTH)
    async with Peers() as peers:
        training = {"optimizer": SGD}
        stage = await peers.add(dht, 2, used, training, keep_graphs=keep_graphs, autocast=autocast)
        outputs = await stage.forward(task, inputs, extras)
        assert outputs["x"].requires_grad
        assert outputs["x"].grad_fn is None
        assert not outputs["gate"].requires_grad or keep_graphs == 0
        found = await stage.backward(task, [None, ones])
        counted = None if stage.optimizer is None else stage.optimizer.grad_averager.accumulator
        sums = [] if counted is None else [each.clone() for each in counted.buffers]
    leaf = inputs["x"].detach().clone().requires_grad_()
    with seeded(7, 2, chosen_device()), torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        expected = module(leaf, inputs["gate"], **extras)["x"]
    expected.backward(ones.to(expected.dtype))
    torch.testing.assert_close(outputs["x"].detach(), expected.detach())
    torch.testing.assert_close(found, [leaf.grad, None])
    for total, parameter in zip(sums, module.parameters(), strict=kind != "frozen"):
        torch.testing.assert_close(total, parameter.grad)
