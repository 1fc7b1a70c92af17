"""What each process does in the tests of DiLoCo with peers whose processes share the parameters of a model."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shoal import DHT, GradScaler, MultiProcessDiLoCo
from shoal.compression import NoCompression
from shoal.errors import ProcessGroupError, SettingsMismatch
from shoal.optim.ranks.sharded_diloco import FollowingDiLoCo, LeadingDiLoCo
from tests.optim.conftest import backward, make_model, values, wait_until
from tests.optim.diloco.test_same_as_simulated import PATIENT, batch_of, simulate

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import fully_shard

SIZE = 8
"""Of the batch of a peer; each of its processes has half of it."""
EVERY, ROUNDS = 2, 4
adam = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
decay = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def own_peer() -> int:
    return dist.get_rank() // 2


def own_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("peer", "rank"))["rank"]


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole_values(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().reshape(-1) for p in model.parameters()])


def introduce(start: bool = True) -> DHT:
    """A DHT of this process, which knows those of all others."""
    addresses: list[Any] = [None]
    dht = DHT(start=True) if dist.get_rank() == 0 else None
    if dht is not None:
        addresses = [list(map(str, dht.get_visible_maddrs()))]
    dist.broadcast_object_list(addresses)
    return dht or DHT(addresses[0], start=True)


@contextmanager
def peer(model: torch.nn.Module, mesh: DeviceMesh, dht: DHT | None = None, /, **options: Any) -> Iterator[Any]:
    dht = introduce() if dht is None else dht
    defaults = {"run_id": "run", "sync_every": EVERY, "compression": NoCompression(), "optimizer": adam, **PATIENT}
    options = {"params": model.named_parameters(), **defaults, **options}
    opt = MultiProcessDiLoCo(dht=dht, process_group=mesh.get_group(), **options)
    try:
        yield opt
        dist.barrier()
    finally:
        opt.shutdown()
        dht.shutdown()


def own_batch(step: int, whose: int | None = None) -> torch.Tensor:
    """This process' half of its peer's batch."""
    return batch_of(own_peer() if whose is None else whose, step, SIZE).split(SIZE // 2)[dist.get_rank() % 2]


def make_step(opt: Any, model: torch.nn.Module, step: int, scaler: GradScaler | None = None) -> None:
    batch = own_batch(step)
    opt.zero_grad()
    if scaler is None:
        backward(model, batch)
    else:
        scaler.scale((model(batch) - batch[:, :2].cos()).square().mean()).backward()
    opt.step(batch_size=len(batch), grad_scaler=scaler)
    if scaler is not None:
        scaler.update()


def meet(opt: Any, peers: int = 2) -> None:
    if opt.swarm is not None:
        wait_until(lambda: opt.swarm.tracker.expected_group_size == peers, "all peers know each other")
    dist.barrier()


def check_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = (found - expected).abs().max() / expected.abs().max()
    assert difference < 1e-5, f"{what}: {difference}"


# --- four processes ---------------------------------------------------------------------------------------------------


@contextmanager
def no_whole_model(parameters: list[torch.Tensor]) -> Iterator[None]:
    """Inside this context, no process puts a sharded tensor together, but in the passes of FSDP itself; and shoal
    allocates no vector that is longer than its part."""
    limit = sum(p.to_local().numel() for p in parameters)
    longest = [0]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a whole parameter was put together")

    def recording(make: Any) -> Any:
        def record(*args: Any, **options: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **options)
            longest[0] = max(longest[0], made.numel())
            return made

        return record

    names = ("zeros", "zeros_like", "empty_like", "cat", "frombuffer")
    patches = [mock.patch.object(torch, name, recording(getattr(torch, name))) for name in names]
    with mock.patch.object(DTensor, "full_tensor", refuse), mock.patch.object(DTensor, "redistribute", refuse):
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
    assert 0 < longest[0] <= limit, f"{longest[0]} values at once, and its part has {limit}"


def equivalence() -> None:
    """Two sharded peers make what two whole ones make; with fragments, and with lossy codecs all ends are equal."""
    mesh = own_mesh()
    expected = simulate([SIZE, SIZE], ROUNDS * EVERY, EVERY, adam, outer, decay)
    model = shard(make_model(), mesh)
    parameters = list(model.parameters())
    with no_whole_model(parameters), peer(model, mesh, scheduler=decay) as opt:
        assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in parameters]
        local = []
        for step in range(ROUNDS * EVERY):
            make_step(opt, model, step)
            if step == 0:
                meet(opt)
            if (step + 1) % EVERY == 0:
                assert opt.local_epoch == (step + 1) // EVERY
                local.append([p.to_local().clone() for p in model.parameters()])
                if opt.swarm is not None:
                    assert sorted(opt.swarm.last_round.weights) == [float(SIZE)] * 2, "samples of all processes, once"
        lr = opt.param_groups[0]["lr"]
        versions = [each.journal.entries for each in opt._part._fragments]
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, versions)
        assert all(each == versions for each in told), "all parts have the same journal"
    assert lr == pytest.approx(0.01 * 0.5**ROUNDS)
    for number, parts in enumerate(local):
        for parameter, part in zip(model.parameters(), parts, strict=True):
            with torch.no_grad():
                parameter.to_local().copy_(part)
        found = whole_values(model)
        check_close(found, expected[number], f"round {number} is not that of whole models")
    check_equal(model)


def check_equal(model: torch.nn.Module) -> None:
    own = whole_values(model)
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first), "all peers have the same bits"
