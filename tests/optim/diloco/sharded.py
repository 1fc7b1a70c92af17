"""What each process does in the tests of DiLoCo with peers whose processes share the parameters of a model."""

from __future__ import annotations

import functools
import os
import re
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
from torch.distributed.tensor import DTensor, Shard

from shoal import DHT, GradScaler, MultiProcessDiLoCo
from shoal.compression import Blockwise4BitQuantization, NoCompression
from shoal.errors import ProcessGroupError
from shoal.optim.ranks.processes import Processes
from shoal.optim.ranks.sharded_diloco import FollowingDiLoCo, LeadingDiLoCo, describe_sharding
from tests.optim.conftest import backward, make_model, wait_until
from tests.optim.diloco.test_same_as_simulated import PATIENT, batch_of, simulate
from tests.optim.sharded import run_guide

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
        versions = [each.journal.entries for each in opt._part._rounds.fragments]
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


def outer_values(opt: Any, model: torch.nn.Module) -> torch.Tensor:
    with opt.use_outer_parameters():
        return whole_values(model)


def train_until(opt: Any, model: torch.nn.Module, slot: int, pace: float = 0.02) -> None:
    """All processes of all peers that still live call it."""
    pause, step = threading.Event(), 100
    while opt.local_epoch < slot:
        make_step(opt, model, step)
        step += 1
        pause.wait(pace)


def versions_of(opt: Any) -> list[int]:
    return [each.state.version for each in opt._part._rounds.fragments]


def latecomer() -> None:
    """A peer joins one that has been training; then an exchange fails in one of its processes, and is made up for."""
    mesh, dht = own_mesh(), introduce()
    torch.manual_seed(own_peer())
    model = shard(torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)), mesh)
    assert any(p.to_local().numel() == 0 for p in model.parameters()) == (dist.get_rank() % 2 == 1), "one has all of it"
    if own_peer() == 0:
        opt = MultiProcessDiLoCo(**options_of(model, mesh, dht))
        train_until(opt, model, 3)
    dist.barrier()
    if own_peer() == 1:
        opt = MultiProcessDiLoCo(**options_of(model, mesh, dht))
        assert opt.load_state_from_peers()
        assert opt.local_epoch == opt.news.epoch == 3
        assert sum(versions_of(opt)) == 3
        assert opt.state, "each process has statistics of its part"
    dist.barrier()
    outer_values(opt, model)
    check_outer(opt, model)
    make_step(opt, model, 0)
    meet(opt)
    made_up = list[int]()
    make_up = FollowingDiLoCo.call_make_up
    if dist.get_rank() == 3:
        fail = fail_afterwards(FollowingDiLoCo.call_average)
        patch = mock.patch.multiple(
            FollowingDiLoCo,
            call_average=fail,
            call_make_up=lambda own, number, count: made_up.append(count) or make_up(own, number, count),
        )
        patch.start()
    train_until(opt, model, 5)
    dist.barrier()
    pause = threading.Event()
    for _ in range(500):
        opt.step(batch_size=0)
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, versions_of(opt))
        if told == [told[0]] * 4 and sum(told[0]) >= 5:
            break
        pause.wait(0.02)
    else:
        raise AssertionError(f"some have not made up for the update that they have missed: {told}")
    if dist.get_rank() == 3:
        assert made_up == [1]
    check_outer(opt, model)
    opt.shutdown()
    dist.barrier()
    dht.shutdown()


def options_of(model: torch.nn.Module, mesh: DeviceMesh, dht: DHT, **options: Any) -> dict[str, Any]:
    shared = {"run_id": "run", "sync_every": 2 * EVERY, "fragments": 2, "optimizer": adam, "check_every": 1}
    shared |= {"compression": Blockwise4BitQuantization(), **PATIENT, **options}
    return {"dht": dht, "process_group": mesh.get_group(), "params": model.named_parameters(), **shared}


def check_outer(opt: Any, model: torch.nn.Module) -> None:
    """All peers have the same outer parameters, and all processes the same journals."""
    own = outer_values(opt, model)
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first)
    versions, told = [each.journal.newest for each in opt._part._rounds.fragments], [None] * 4
    dist.all_gather_object(told, versions)
    assert told == [versions] * 4


def fail_afterwards(average: Any) -> Any:
    """The exchange itself succeeds, so that others have the update."""
    calls = []

    def fail(*args: Any) -> str:
        found: str = average(*args)
        calls.append(found)
        return "lost on purpose" if len(calls) == 1 else found

    return fail


def checkpoint() -> None:
    """What two processes have saved, two processes load; not another part, and not of another moment."""
    mesh, rank = own_mesh(), dist.get_rank()
    dht, model = introduce(), shard(make_model(), mesh)
    opt = MultiProcessDiLoCo(**options_of(model, mesh, dht))
    make_step(opt, model, 0)
    early = opt.state_dict()
    meet(opt)
    for step in range(1, 8):
        make_step(opt, model, step)
    saved, parts = opt.state_dict(), [p.to_local().clone() for p in model.parameters()]
    before, slot, versions = outer_values(opt, model), opt.local_epoch, versions_of(opt)
    assert slot > 0
    dist.barrier()
    opt.shutdown()
    model = shard(make_model(5), mesh)
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.to_local().copy_(part)
    opt = MultiProcessDiLoCo(**options_of(model, mesh, dht))
    others: list[Any] = [None, None]
    dist.all_gather_object(others, (early, saved), group=mesh.get_group())
    with pytest.raises(ValueError, match=r"is of process \d of 2 .*, and this is process \d of 2"):
        opt.load_state_dict(others[1 - rank % 2][1])
    with pytest.raises(ValueError, match="are of different moments"):
        opt.load_state_dict(early if rank % 2 else saved)
    with pytest.raises(ValueError, match="of a peer that is not sharded"):
        opt.load_state_dict({**saved, "shoal": {**saved["shoal"], "part": None}})
    opt.load_state_dict(saved)
    assert (opt.local_epoch, versions_of(opt)) == (slot, versions)
    assert torch.equal(outer_values(opt, model), before)
    make_step(opt, model, 8)
    meet(opt)
    train_until(opt, model, slot + 2)
    dist.barrier()
    opt.shutdown()
    dht.shutdown()


# --- what goes wrong; each ends its process in a way of its own -------------------------------------------------------


def leave(opt: Any, dht: DHT) -> None:
    opt.shutdown()
    dht.shutdown()
    sys.stdout.flush()
    os._exit(0)  # torch may abort when it cleans up a group that has lost a member


def a_process_dies() -> None:
    """Of a peer in the middle of an exchange, when the first processes have theirs behind them."""
    die_in(FollowingDiLoCo, "call_average", rank=3)


def a_first_process_dies() -> None:
    """Of a peer in the middle of an exchange, while the first processes have theirs."""
    die_in(LeadingDiLoCo, "_make_inner_step", rank=2)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(kind: type, method: str, rank: int) -> None:
    mesh, dht = own_mesh(), introduce()
    model = shard(make_model(), mesh)
    patience = {"matchmaking_time": 3.0, "averaging_timeout": 20.0, "straggler_patience": 3.0}
    opt = MultiProcessDiLoCo(**options_of(model, mesh, dht, sync_every=EVERY, fragments=1, **patience))
    make_step(opt, model, 0)
    meet(opt)
    make_step(opt, model, 1)
    assert versions_of(opt) == [1]
    dist.barrier()
    if dist.get_rank() == rank:
        mock.patch.object(kind, method, die).start()
    if own_peer() == 1:
        with pytest.raises(ProcessGroupError, match="has ended or does not answer"):
            train_until(opt, model, 100)
        leave(opt, dht)
    pause = threading.Event()
    for step in range(500):
        make_step(opt, model, 10 + step)
        if versions_of(opt) >= [3]:
            break
        pause.wait(0.02)
    else:
        raise AssertionError("the other peer does not go on alone")
    leave(opt, dht)


def wrong_use() -> None:
    """With two processes."""
    mesh = init_device_mesh("cpu", (2,))
    dht, rank, model = introduce(), dist.get_rank(), shard(make_model(), mesh)
    given: dict[str, Any] = {"run_id": "run", "sync_every": 2, "optimizer": adam, "dht": dht}
    given["params"] = list(model.parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": adam(model.parameters())}, "give one function that makes the optimizer"),
        ({"fragment_sync_delay": 1}, "fragment_sync_delay=1: the processes of a sharded peer"),
        ({"average": "parameters"}, "average='parameters' is not for sharded models"),
        ({"guard": "open"}, "guard='open' and aggregation= judge whole messages"),
        ({"check_state": lambda: True}, "check_state= is called in the first process alone"),
        ({"model": model}, "model= is not for sharded models"),
        ({"extra_tensors": [torch.zeros(1)]}, "extra_tensors= is not for sharded models"),
        ({"averager_opts": {"quorum": 2}}, "quorum in averager_opts"),
        ({"auxiliary": True}, "an auxiliary peer has no batches"),
        ({"dht": None if rank else dht}, "give each one a DHT of its own, also process 1"),
        ({"params": [*given["params"], torch.nn.Parameter(torch.zeros(3))]}, "parameter 4, .* is not sharded"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            MultiProcessDiLoCo(**{**given, **options})
    other = make_model()
    fully_shard(other, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    names = [describe_sharding(Processes(None, torch.device("cpu")), list(m.parameters())) for m in (model, other)]
    assert names[0].startswith("Shard(dim=0), parts ")
    assert names[1].startswith("Shard(dim=0), Shard(dim=1), parts ")
    muon = type("Muon", (torch.optim.SGD,), {})
    with pytest.raises((ValueError, ProcessGroupError), match="Muon looks at whole parameters"):
        MultiProcessDiLoCo(**{**given, "optimizer": functools.partial(muon, lr=0.1)})
    with pytest.raises((ValueError, ProcessGroupError), match="5 fragments of 4 parameters"):
        MultiProcessDiLoCo(**{**given, "sync_every": 9, "fragments": 5})
    with pytest.raises((ValueError, ProcessGroupError), match="weighting must be one of"):
        MultiProcessDiLoCo(**{**given, "weighting": "none"} if rank else given)
    opt = MultiProcessDiLoCo(**given)
    alone(opt, model)
    with pytest.raises(ZeroDivisionError if rank else ProcessGroupError, match="division"):
        opt.step(lambda: 1 / (1 - rank), batch_size=1)
    assert opt.is_alive()
    opt.shutdown()
    assert not opt.is_alive()
    with pytest.raises(RuntimeError, match="shut down"):
        opt.step(batch_size=1)
    apart = DHT(start=True)
    with pytest.raises(ValueError if rank else ProcessGroupError, match="finds nothing of the first process"):
        MultiProcessDiLoCo(**{**given, "dht": apart})
    apart.shutdown()
    dist.barrier()
    dht.shutdown()
    run_guide(over_slow_lines=True)


def alone(opt: Any, model: torch.nn.Module) -> None:
    """A peer without others makes updates alone; a batch that overflows in one process is dropped in all."""
    scaler = GradScaler(init_scale=16.0, device="cpu")
    expected = simulate([SIZE], 2, 2, adam, outer)
    steps = iter(range(2))
    for overflows in (False, True, False):
        opt.zero_grad()
        batch = batch_of(0, 7 if overflows else next(steps), SIZE).split(SIZE // 2)[dist.get_rank()]
        scaler.scale((model(batch) - batch[:, :2].cos()).square().mean()).backward()
        if overflows and dist.get_rank() == 1:
            gradient: Any = model[0].weight.grad
            gradient.to_local()[0, 0] = torch.inf
        scaler.step(opt, batch_size=len(batch))
        scaler.update()
        assert scaler.get_scale() == (8.0 if overflows or opt.local_epoch else 16.0)
    assert (opt.local_epoch, versions_of(opt)) == (1, [1])
    check_close(whole_values(model), expected[0], "the lone update")


def other_numbers_of_processes() -> None:
    """A peer of two processes and one of a single process are told in what they differ."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    single = dist.new_group([2])
    group = single if rank == 2 else pair
    dht, model = introduce(), shard(make_model(), DeviceMesh.from_group(group, "cpu"))
    mesh: Any = mock.Mock(get_group=lambda: group)
    opt = MultiProcessDiLoCo(**options_of(model, mesh, dht))
    told: list[Any] = [None] * 3
    dist.all_gather_object(told, None if opt.swarm is None else opt.swarm._describe())
    assert not told[0].can_average_with(told[2])
    number, sharding = told[0].differences(told[2])
    assert number == "processes of a peer is 2 here and 1 there"
    assert re.fullmatch(r"sharding is Shard\(dim=0\), parts \w+ here and Shard\(dim=0\), parts \w+ there", sharding)
    assert [each.shape for each in told[0].parameters] == [tuple(p.shape) for p in model.parameters()]
    dist.barrier()
    opt.shutdown()
    dht.shutdown()
