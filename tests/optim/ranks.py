"""What each process does in the tests of peers that are several processes: the first two are one peer."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shoal import DHT, GradScaler, Optimizer
from shoal.errors import ProcessGroupError, ReactorError
from shoal.optim.ranks.multi_process import MultiProcessOptimizer
from shoal.optim.ranks.processes import Processes
from tests.optim.conftest import wait_until
from tests.optim.test_equivalence import loss_of, make_model, step_schedule

EPOCHS = 6
SHARES = [[4, 8, 12], [0, 12, 12]]
"""For even and odd epochs the batch size of each process; the first two are one peer."""
SAMPLES = 24
PARTNERS = (0, 1)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@contextmanager
def two_peers(model: torch.nn.Module, group: dist.ProcessGroup, **options: Any) -> Iterator[Any]:
    """The optimizer of this process: of the peer of two processes, or of the other one."""
    rank = dist.get_rank()
    addresses: list[Any] = [None]
    dht = DHT(start=True) if rank == 0 else None
    if dht is not None:
        addresses = [list(map(str, dht.get_visible_maddrs()))]
    dist.broadcast_object_list(addresses)
    options = {
        "optimizer": make_sgd(model.parameters()),
        "run_id": "run",
        "target_batch_size": SAMPLES,
        "matchmaking_time": 10.0,
        "averaging_timeout": 30.0,
        "delay_state_averaging": False,
        **options,
    }
    if rank in PARTNERS:
        opt: Any = MultiProcessOptimizer(dht=dht, process_group=group, **options)
    else:
        dht = DHT(addresses[0], start=True)
        opt = Optimizer(dht=dht, **options)
    yield opt
    dist.barrier()
    opt.shutdown()
    if dht is not None:
        dht.shutdown()


def make_data() -> list[list[torch.Tensor]]:
    """For every epoch and process its batch."""
    generator = torch.Generator().manual_seed(42)
    return [[torch.randn(size, 10, generator=generator) for size in SHARES[epoch % 2]] for epoch in range(EPOCHS)]


def train_alone(schedule: Callable | None = None) -> torch.nn.Module:
    model = make_model()
    optimizer = make_sgd(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    for epoch in make_data():
        optimizer.zero_grad()
        loss_of(model, torch.cat(epoch)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def swarm_of(opt: Any) -> Optimizer:
    return opt.swarm if isinstance(opt, MultiProcessOptimizer) else opt


def train(opt: Any, model: torch.nn.Module, in_place: bool, scaler: GradScaler | None = None) -> None:
    """Contribute this process' share of every epoch, all of it and nothing more."""
    rank, pause = dist.get_rank(), threading.Event()
    for epoch, shares in enumerate(make_data()):
        batch = shares[rank]
        if not in_place:
            opt.zero_grad()
        if len(batch) > 0:
            loss = loss_of(model, batch)
            (loss if scaler is None else scaler.scale(loss)).backward()
        opt.step(batch_size=len(batch), grad_scaler=scaler)
        if epoch == 0 and rank != 1:
            wait_until(lambda: swarm_of(opt).tracker.expected_group_size == 2, "both peers know each other")
        while opt.local_epoch == epoch:
            opt.step(batch_size=0, grad_scaler=scaler)
            pause.wait(0.002)
        if scaler is not None:
            scaler.update()
        if rank != 1:
            last_round = swarm_of(opt).grad_averager.last_round
            assert sorted(last_round.weights) == [12, 12], "all samples of a peer count, and once"


def check_same_everywhere(model: torch.nn.Module) -> None:
    own = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own)
    assert all(torch.equal(own, other) for other in everybody), "processes differ from each other"


def check_agreement(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    check_same_everywhere(model)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-5


def equivalence() -> None:
    group = dist.new_group(PARTNERS)
    for options in (
        {"scheduler": step_schedule},
        {"reuse_grad_buffers": True},
        {"offload_optimizer": True, "scheduler": step_schedule},
        {"scaled": True},
        {"extra_tensors": 1},
    ):
        check_equivalence(group, **options)


def check_equivalence(group: dist.ProcessGroup, **options: Any) -> None:
    model = make_model()
    scaler = GradScaler(init_scale=2.0 ** (4 + dist.get_rank()), device="cpu") if options.pop("scaled", 0) else None
    if "extra_tensors" in options:
        options["extra_tensors"] = [torch.full((3,), float(dist.get_rank()))]
    reference = train_alone(options.get("scheduler"))
    if options.get("offload_optimizer"):
        options |= {"params": list(model.parameters()), "optimizer": make_sgd}
    elif "scheduler" in options:
        options["optimizer"] = make_sgd(model.parameters())
        options["scheduler"] = step_schedule(options["optimizer"])
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).zero_()  # the first process' parameters count
    with two_peers(model, group, **options) as opt:
        train(opt, model, bool(options.get("reuse_grad_buffers")), scaler)
        check_agreement(model, reference)
        if "scheduler" in options:
            assert opt.param_groups[0]["lr"] == pytest.approx(0.05), "all processes know the learning rate"
        if scaler is not None:
            assert scaler.get_scale() == 2.0 ** (4 + dist.get_rank())
        if "extra_tensors" in options:
            check_extra(options["extra_tensors"][0])


def check_extra(extra: torch.Tensor) -> None:
    assert extra.tolist() == [1, 1, 1], "the mean of both peers, in all of their processes"


def under_ddp() -> None:
    """Gradients that DDP has averaged already do no harm, nor does a wrapper that is told not to."""
    group = dist.new_group(PARTNERS)
    for is_synchronized in (True, False):
        inner = make_model()
        with two_peers(inner, group, target_batch_size=16) as opt:
            rank = dist.get_rank()
            model = DistributedDataParallel(inner, process_group=group) if rank in PARTNERS else inner
            batch = torch.randn(16, 10, generator=torch.Generator().manual_seed(0))
            parts = batch.split([4, 4, 8])
            if is_synchronized or rank not in PARTNERS:
                loss_of(model, parts[rank]).backward()
            else:
                with model.no_sync():
                    loss_of(model, parts[rank]).backward()
            opt.step(batch_size=len(parts[rank]))
            if rank != 1:
                wait_until(lambda opt=opt: swarm_of(opt).tracker.expected_group_size == 2, "they know each other")
            while opt.local_epoch == 0:
                opt.step(batch_size=0)
            alone = make_model()
            loss_of(alone, batch).backward()
            make_sgd(alone.parameters()).step()
            check_agreement(inner, alone)


def background() -> None:
    """With everything delayed, the processes of a peer have the same parameters after each step."""
    group = dist.new_group(PARTNERS)
    delays = {"delay_optimizer_step": True, "delay_grad_averaging": True, "delay_state_averaging": True}
    for options in ({**delays, "offload_optimizer": True}, {"use_local_updates": True, "delay_state_averaging": True}):
        model = make_model()
        training = {"optimizer": make_sgd(model.parameters())}
        if "offload_optimizer" in options:
            training = {"optimizer": make_sgd, "params": list(model.parameters())}
        with two_peers(model, group, **options, **training) as opt:
            train_at_will(opt, model, group)


def train_at_will(opt: Any, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    rank, pause = dist.get_rank(), threading.Event()
    generator = torch.Generator().manual_seed(rank)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    while opt.local_epoch < 4:
        opt.zero_grad()
        loss_of(model, torch.randn(4, 10, generator=generator)).backward()
        opt.step(batch_size=4)
        if rank in PARTNERS:
            own = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            first = own.clone()
            dist.broadcast(first, 0, group=group)
            assert torch.equal(first, own)
        pause.wait(0.005)
    if rank in PARTNERS:
        opt.finish_background_work()
        own = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        first = own.clone()
        dist.broadcast(first, 0, group=group)
        assert torch.equal(first, own)
    assert not torch.equal(before, torch.nn.utils.parameters_to_vector(model.parameters()))


def download() -> None:
    """A peer of two processes joins one that has been training; both get its state."""
    group = dist.new_group(PARTNERS)
    model = make_model()
    optimizer = make_sgd(model.parameters())
    schedule = step_schedule(optimizer)
    with two_peers(model, group, target_batch_size=8, optimizer=optimizer, scheduler=schedule) as opt:
        rank = dist.get_rank()
        if rank == 2:
            while opt.local_epoch < 5:
                loss_of(model, torch.randn(8, 10)).backward()
                opt.step(batch_size=8)
                opt.zero_grad()
        dist.barrier()
        if rank in PARTNERS:
            assert opt.load_state_from_peers()
            assert opt.local_epoch == opt.news.epoch == 5
            assert opt.param_groups[0]["lr"] == pytest.approx(0.05)
        dist.barrier()
        check_same_everywhere(model)
        if rank in PARTNERS:
            checkpoint = [opt.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(checkpoint, group=group)
            for param_group in opt.param_groups:
                param_group["lr"] = 0.0
            opt.load_state_dict(checkpoint[0])
            assert opt.local_epoch == 5
            assert opt.param_groups[0]["lr"] == pytest.approx(0.05)
        dist.barrier()
        check_same_everywhere(model)


def several_groups() -> None:
    """Two peers of two processes each, in groups where words need connections of their own."""
    rank = dist.get_rank()
    groups = [dist.new_group(members, backend="cpu:gloo") for members in ([0, 1], [2, 3])]
    assert dist.get_backend(groups[rank // 2]) != "gloo", "else they need none"
    processes = Processes(groups[rank // 2], torch.device("cpu"))
    assert processes.share(rank) == ([0, 1] if rank < 2 else [2, 3])
    tensor = torch.full((3,), float(rank))
    processes.copy_from_first([tensor])
    assert tensor.tolist() == [2 * (rank // 2)] * 3


# --- what goes wrong; each ends its process in a way of its own -------------------------------------------------------


def first_of_two(model: torch.nn.Module) -> MultiProcessOptimizer:
    dht = DHT(start=True) if dist.get_rank() == 0 else None
    optimizer = make_sgd(model.parameters())
    return MultiProcessOptimizer(dht=dht, optimizer=optimizer, run_id="run", target_batch_size=10**6)


def leave(opt: MultiProcessOptimizer) -> None:
    opt.shutdown()
    if opt.swarm is not None:
        opt.swarm.dht.shutdown()
    sys.stdout.flush()
    os._exit(0)  # torch may abort when it cleans up a group that has lost a member


def another_process_dies() -> None:
    model = make_model()
    opt = first_of_two(model)
    opt.step(batch_size=0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ProcessGroupError, match="has ended or does not answer"):
        opt.step(batch_size=0)
    leave(opt)


def first_process_dies() -> None:
    opt = first_of_two(make_model())
    opt.step(batch_size=0)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ProcessGroupError, match="has ended or does not answer"):
        opt.step(batch_size=0)
    leave(opt)


def first_process_fails() -> None:
    opt = first_of_two(make_model())
    if opt.swarm is not None:
        opt.swarm.step = lambda **options: 1 / 0
        with pytest.raises(ZeroDivisionError):
            opt.step(batch_size=0)
    else:
        with pytest.raises(ProcessGroupError, match="first process of this peer has failed: ZeroDivisionError: div"):
            opt.step(batch_size=0)
    leave(opt)


def another_process_fails() -> None:
    """Whatever happens inside its step, and also at the very end."""
    model = make_model()
    opt = first_of_two(model)

    def closure() -> None:
        if dist.get_rank() == 1:
            raise ArithmeticError("a bad batch")

    with pytest.raises(
        ArithmeticError if dist.get_rank() == 1 else ProcessGroupError,
        match="^a bad batch"
        if dist.get_rank() == 1
        else "process 1 of 2 of this peer has failed: ArithmeticError: a bad",
    ):
        opt.step(closure, batch_size=1)
    with pytest.raises(
        TypeError if dist.get_rank() == 1 else ProcessGroupError, match=r"half|process 1 of 2 .* has failed: TypeError"
    ):
        opt.step(batch_size="half" if dist.get_rank() == 1 else 1)
    opt.step(batch_size=0)
    opt.shutdown()
    with pytest.raises(ReactorError, match="shut down"):
        opt.step(batch_size=0)
    leave(opt)


def wrong_use() -> None:
    rank = dist.get_rank()
    model = torch.nn.Linear(2 + rank, 1)
    options: dict[str, Any] = {"run_id": "run", "target_batch_size": 8}
    with pytest.raises(ValueError, match="models of different sizes"):
        MultiProcessOptimizer(dht=None, optimizer=make_sgd(model.parameters()), **options)
    with pytest.raises(ValueError, match="auxiliary"):
        MultiProcessOptimizer(dht=None, optimizer=make_sgd(model.parameters()), auxiliary=True, **options)
    with pytest.raises(ValueError if rank == 0 else ProcessGroupError, match=r"needs a DHT|has failed"):
        MultiProcessOptimizer(dht=None, optimizer=make_sgd(make_model().parameters()), **options)
    opt = first_of_two(make_model())
    for arguments in ({}, {"batch_size": -1}, {"batch_size": 1, "grad_scaler": object()}):
        with pytest.raises(ValueError, match=r"batch_size|grad_scaler"):
            opt.step(**arguments)
    leave(opt)
