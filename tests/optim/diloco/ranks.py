"""What each process does in the tests of peers that are several processes: the first two are one peer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal import DHT, DiLoCo, GradScaler, MultiProcessDiLoCo
from shoal.compression import NoCompression
from shoal.errors import ProcessGroupError
from tests.optim.conftest import backward, make_model, values, wait_until
from tests.optim.diloco.test_same_as_simulated import PATIENT, batch_of, simulate
from tests.optim.ranks import PARTNERS, check_same_everywhere

SIZES = [[4, 8], [12]]
"""Of the batches of each process of each peer."""
EVERY, ROUNDS = 2, 3
adam = functools.partial(torch.optim.AdamW, lr=0.01)
decay = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def own_batch(step: int) -> torch.Tensor:
    """This process' part of its peer's batch."""
    rank = dist.get_rank()
    peer, place = (0, rank) if rank in PARTNERS else (1, 0)
    return batch_of(peer, step, sum(SIZES[peer])).split(SIZES[peer])[place]


@contextmanager
def two_peers(model: torch.nn.Module, group: dist.ProcessGroup, **options: Any) -> Iterator[Any]:
    """The optimizer of this process: of the peer of two processes, or of the other one."""
    rank = dist.get_rank()
    addresses: list[Any] = [None]
    dht = DHT(start=True) if rank == 0 else None
    if dht is not None:
        addresses = [list(map(str, dht.get_visible_maddrs()))]
    dist.broadcast_object_list(addresses)
    defaults = {"run_id": "run", "sync_every": EVERY, "compression": NoCompression(), **PATIENT}
    options = {"optimizer": adam(model.parameters()), **defaults, **options}
    if rank in PARTNERS:
        opt: Any = MultiProcessDiLoCo(dht=dht, process_group=group, **options)
    else:
        dht = DHT(addresses[0], start=True)
        opt = DiLoCo(dht=dht, **options)
    yield opt
    dist.barrier()
    opt.shutdown()
    if dht is not None:
        dht.shutdown()


def swarm_of(opt: Any) -> DiLoCo | None:
    return opt.swarm if isinstance(opt, MultiProcessDiLoCo) else opt


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
    if step == 0 and (swarm := swarm_of(opt)) is not None:
        wait_until(lambda: swarm.tracker.expected_group_size == 2, "both peers know each other")
    dist.barrier()


def check_rounds(opt: Any, model: torch.nn.Module, schedule: Any = None, scaler: GradScaler | None = None) -> None:
    sizes, outer = [12, 12], functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    expected = simulate(sizes, ROUNDS * EVERY, EVERY, adam, outer, schedule)
    for step in range(ROUNDS * EVERY):
        make_step(opt, model, step, scaler)
        if (step + 1) % EVERY == 0:
            check_same_everywhere(model)
            difference = (values(model) - expected[step // EVERY]).abs().max() / expected[step // EVERY].abs().max()
            assert difference < 1e-5, f"round {step // EVERY} is not that of single processes: {difference}"
            if (swarm := swarm_of(opt)) is not None:
                assert sorted(swarm.last_round.weights) == [12.0, 12.0], "all samples of a peer count, and once"
            assert opt.local_epoch == (step + 1) // EVERY


def equivalence() -> None:
    """Two processes make what one makes with the batches of both; then the outer parameters, and a checkpoint."""
    group, rank = dist.new_group(PARTNERS), dist.get_rank()
    model, extra = make_model(), torch.full((3,), float(rank))
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).zero_()  # the first process' parameters count
    optimizer = adam(model.parameters())
    options = {"optimizer": optimizer, "scheduler": decay(optimizer), "extra_tensors": [extra]}
    with two_peers(model, group, **options) as opt:
        check_rounds(opt, model, decay)
        assert extra.tolist() == [1, 1, 1], "the mean of both peers, in all of their processes"
        assert opt.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**ROUNDS)
        outer = values(model)
        make_step(opt, model, EVERY * ROUNDS)
        own = values(model)
        assert not torch.equal(own, outer)
        with opt.use_outer_parameters():
            with opt.use_outer_parameters():
                assert torch.equal(values(model), outer)
            assert torch.equal(values(model), outer)
        assert torch.equal(values(model), own)
        if rank in PARTNERS:
            checkpoint = [opt.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(checkpoint, group=group)
            opt.param_groups[0]["lr"] = 7.0
            opt.load_state_dict(checkpoint[0])
            assert opt.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**ROUNDS)
            assert torch.equal(values(model), own)
            assert opt.position == EVERY * ROUNDS + 1


def scaled() -> None:
    """Each process has a scale of its own, and what overflows in one of them is left out."""
    group, rank = dist.new_group(PARTNERS), dist.get_rank()
    model = make_model()
    scaler = GradScaler(init_scale=2.0 ** (4 + rank), device="cpu")
    with two_peers(model, group) as opt:
        check_rounds(opt, model, scaler=scaler)
        assert scaler.get_scale() == 2.0 ** (4 + rank)
        before = 0 if opt.local_epoch == 0 else opt.local_epoch
        if rank in PARTNERS:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float("inf"))
            opt.step(batch_size=4, grad_scaler=scaler)
            scaler.update()
            assert scaler.get_scale() == 2.0 ** (3 + rank)
            assert opt.local_epoch == before
            assert torch.isfinite(values(model)).all()


def a_newcomer() -> None:
    """A peer of two processes joins one that has been training; both of them get its state."""
    group, rank = dist.new_group(PARTNERS), dist.get_rank()
    model = make_model(rank)
    with two_peers(model, group) as opt:
        if rank == 2:
            while opt.local_epoch < 4:
                opt.zero_grad()
                backward(model, own_batch(opt.inner_steps))
                opt.step(batch_size=12)
        dist.barrier()
        if rank in PARTNERS:
            assert opt.load_state_from_peers()
            assert opt.local_epoch == opt.news.epoch == 4
        dist.barrier()
        check_same_everywhere(model)


def wrong_use() -> None:
    rank, model = dist.get_rank(), make_model()
    options: dict[str, Any] = {"run_id": "run", "optimizer": adam(model.parameters())}
    with pytest.raises(ValueError, match="nothing accumulates"):
        MultiProcessDiLoCo(dht=None, reuse_grad_buffers=True, sync_every=2, **options)
    with pytest.raises(ValueError, match="an auxiliary peer has no batches"):
        MultiProcessDiLoCo(dht=None, auxiliary=True, sync_every=2, **options)
    with pytest.raises(ValueError if rank == 0 else ProcessGroupError, match=r"needs a DHT|has failed"):
        MultiProcessDiLoCo(dht=None, sync_every=2, **options)
