"""What each process does in the tests of peers whose processes share the parameters of a model."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal import DHT, GradScaler, MultiProcessOptimizer, Optimizer
from shoal.errors import ProcessGroupError
from shoal.optim.ranks import processes
from tests.optim.conftest import wait_until

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import fully_shard

GUIDE = Path(__file__).parents[2] / "docs" / "sharded.md"
EPOCHS = 4
SMALL_BUCKET = 512
"""Bytes: large parameters are cut, small ones go together."""


class Net(torch.nn.Module):
    """17 rows and 1 row do not divide by 2; two layers have the same weights, others do not learn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(10, 17)
        self.middle, self.again = torch.nn.Linear(17, 17), torch.nn.Linear(17, 17)
        self.again.weight = self.middle.weight
        self.frozen = torch.nn.Linear(17, 17).requires_grad_(False)
        self.last = torch.nn.Linear(17, 1)
        self.register_buffer("shift", torch.full((1,), 0.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.middle(torch.tanh(self.first(batch))))))
        found: torch.Tensor = self.last(hidden + self.frozen(hidden)) + self.shift
        return found


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True).sin())


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    # With a large eps, gradients that round differently make steps that do so no more.
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)


def halve_after_two(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def make_batches(shares: Iterable[int]) -> list[list[torch.Tensor]]:
    """For every epoch the batch of each process."""
    generator = torch.Generator().manual_seed(42)
    shares = list(shares)
    return [[torch.randn(size, 10, generator=generator) for size in shares] for _ in range(EPOCHS)]


def train_alone(batches: list[list[torch.Tensor]], model: torch.nn.Module | None = None) -> torch.nn.Module:
    model = Net() if model is None else model
    optimizer = make_adamw(model.parameters())
    scheduler = halve_after_two(optimizer)
    for epoch in batches:
        optimizer.zero_grad()
        loss_of(model, torch.cat(epoch)).backward()
        optimizer.step()
        scheduler.step()
    return model


def shard_all(model: Net, mesh: DeviceMesh) -> Net:
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_some(model: Net, mesh: DeviceMesh) -> Net:
    """The rest are plain tensors, of which each process has a copy."""
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_agreement(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        difference = (whole(found.detach()) - expected).abs().max() / expected.abs().max()
        assert difference.item() < 1e-5, name


@contextmanager
def swarm(peers: list[list[int]], model: torch.nn.Module, group: Any = None, /, **options: Any) -> Iterator[Any]:
    """The optimizer of this process.

    Args:
        peers: the ranks of each peer.
        group: the process group of this peer; ``None``: it is this process alone.
    """
    rank = dist.get_rank()
    addresses: list[Any] = [None]
    firsts = [members[0] for members in peers]
    dht = DHT(start=True) if rank == firsts[0] else None
    if dht is not None:
        addresses = [list(map(str, dht.get_visible_maddrs()))]
    dist.broadcast_object_list(addresses, firsts[0])
    if rank in firsts[1:]:
        dht = DHT(addresses[0], start=True)
    options = {
        "optimizer": make_adamw,
        "params": list(model.parameters()),
        "scheduler": halve_after_two,
        "run_id": "run",
        "matchmaking_time": 10.0,
        "averaging_timeout": 60.0,
        "delay_state_averaging": False,
        **options,
    }
    if group is None:
        opt: Any = Optimizer(dht=dht, **options)
    else:
        opt = MultiProcessOptimizer(dht=dht, process_group=group, **options)
    yield opt
    dist.barrier()
    opt.shutdown()
    if dht is not None:
        dht.shutdown()


def swarm_of(opt: Any) -> Any:
    return opt.swarm if isinstance(opt, MultiProcessOptimizer) else opt


def train(
    opt: Any,
    model: torch.nn.Module,
    batches: list[torch.Tensor],
    peers: int = 1,
    scaler: GradScaler | None = None,
    counts: bool = True,
) -> None:
    """Contribute one batch to every epoch.

    Args:
        peers: in the swarm.
        counts: whether this process counts its samples.
    """
    pause = threading.Event()
    for epoch, batch in enumerate(batches):
        opt.zero_grad()
        loss = loss_of(model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        opt.step(batch_size=len(batch) if counts else 0, grad_scaler=scaler)
        if epoch == 0 and swarm_of(opt) is not None:
            wait_until(lambda: swarm_of(opt).tracker.expected_group_size == peers, "all peers know each other")
        with torch.no_grad():
            model(batch)  # from now on FSDP keeps whole parameters for the next batch, but others arrive
        while opt.local_epoch == epoch:
            opt.step(batch_size=0, grad_scaler=scaler)
            pause.wait(0.002)
        if scaler is not None:
            scaler.update()


def run_guide(hybrid: bool = False, over_slow_lines: bool = False) -> None:
    """The program in docs/sharded.md, with all processes as one peer. Its group exists already."""
    program, mesh, diloco, *_ = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    changes = [(r"^mesh = .*?\n", mesh)] if hybrid else [(r"^dht = .*?^\)\n", diloco)] if over_slow_lines else []
    for place, change in changes:
        program, count = re.subn(place, lambda _, change=change: change, program, flags=re.MULTILINE | re.DOTALL)
        assert count == 1
    program, nothing = program.replace("4096", "256").replace("sync_every=50", "sync_every=2"), mock.DEFAULT
    program = (
        program.replace("if dht is not None:\n    dht.shutdown()", "dht.shutdown()") if over_slow_lines else program
    )
    without_group = mock.patch.multiple(dist, init_process_group=nothing, destroy_process_group=nothing)
    with without_group, mock.patch("sys.argv", ["train.py"]):
        exec(compile(program, GUIDE, "exec"), {"__name__": "__main__"})


# --- with four processes ----------------------------------------------------------------------------------------------


def four_processes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    with mock.patch.object(processes, "BUCKET_BYTES", SMALL_BUCKET):
        two_sharded_peers(mesh)
        hybrid_sharding(mesh)
        tensor_parallelism(mesh)
    run_guide(hybrid=True)


def two_sharded_peers(mesh: DeviceMesh) -> None:
    """Two peers of two processes equal one process; some parameters are sharded, or all. No transfer is large."""
    rank, inner = dist.get_rank(), mesh["inner"]
    batches = make_batches([6, 6, 6, 6])
    reference = train_alone(batches)
    for shard, options in ((shard_all, {"offload_optimizer": False}), (shard_some, {})):
        model = shard(Net(), inner)
        parameters = list(model.parameters())
        parts = [p.to_local() for p in parameters if isinstance(p, DTensor)]
        assert any(part.numel() == 0 for part in parts) == (rank % 2 == 1), "one has all of it"
        peers = swarm([[0, 1], [2, 3]], model, inner.get_group(), **options, target_batch_size=24)
        with sizes_of_transfers() as sizes, peers as opt:
            train(opt, model, [epoch[rank] for epoch in batches], 2)
            check_agreement(model, reference)
            assert opt.param_groups[0]["lr"] == pytest.approx(0.0125)
            assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in parameters]
        assert max(sizes) <= SMALL_BUCKET < max(p.nbytes for p in reference.parameters())


@contextmanager
def sizes_of_transfers() -> Iterator[list[int]]:
    """Bytes of each transfer between the processes of a peer; those that FSDP itself makes do not count."""
    sizes: list[int] = []

    def recording(transfer: Any) -> Any:
        def record(peer: Any, flat: torch.Tensor) -> None:
            sizes.append(flat.nbytes)
            transfer(peer, flat)

        return record

    names = ("reduce_to_first", "broadcast_from_first")
    patches = [mock.patch.object(processes.Processes, n, recording(getattr(processes.Processes, n))) for n in names]
    with patches[0], patches[1]:
        yield sizes


def hybrid_sharding(mesh: DeviceMesh) -> None:
    """HSDP: two copies of the model, each sharded over two processes; together one peer."""
    batches = make_batches([4, 4, 4, 4])
    model = shard_all(Net(), mesh)
    with swarm([[0, 1, 2, 3]], model, dist.group.WORLD, target_batch_size=16) as opt:
        train(opt, model, [epoch[dist.get_rank()] for epoch in batches])
        check_agreement(model, train_alone(batches))


def tensor_parallelism(mesh: DeviceMesh) -> None:
    """FSDP2 over tensor parallelism: its processes have the same batch, and one of them counts it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank = dist.get_rank()
    batches = make_batches([8, 8])
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    reference = train_alone(batches, copy.deepcopy(model))
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["outer"])
    with swarm([[0, 1, 2, 3]], model, dist.group.WORLD, target_batch_size=16) as opt:
        train(opt, model, [epoch[rank // 2] for epoch in batches], counts=rank % 2 == 0)
        check_agreement(model, reference)


# --- with three processes ---------------------------------------------------------------------------------------------


def three_processes() -> None:
    """The first two are one sharded peer, the third one is a peer with a whole model."""
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu") if dist.get_rank() < 2 else None
    mixed_swarm(group, mesh)
    mixed_swarm(group, mesh, GradScaler(init_scale=16.0, device="cpu", growth_interval=3))
    download(group, mesh)
    run_guide()
    if mesh is not None:
        overflow(group, mesh)
        compiled(group, mesh)
        wrong_use(group, mesh)


def model_of(mesh: DeviceMesh | None) -> torch.nn.Module:
    return Net() if mesh is None else shard_all(Net(), mesh)


def mixed_swarm(group: Any, mesh: DeviceMesh | None, scaler: GradScaler | None = None) -> None:
    rank, batches = dist.get_rank(), make_batches([4, 4, 12])
    model = model_of(mesh)
    own = None if mesh is None else group
    options = {} if scaler is None else {"model": model}
    with swarm([[0, 1], [2]], model, own, target_batch_size=20, **options) as opt:
        train(opt, model, [epoch[rank] for epoch in batches], 2, scaler)
        check_agreement(model, train_alone(batches))
        if scaler is not None:
            assert scaler.get_scale() == 32
        if options and rank == 0:
            assert "first.weight" in opt.swarm.state_averager.names["parameters"]


def download(group: Any, mesh: DeviceMesh | None) -> None:
    """A sharded peer joins one that has been training; its checkpoint continues."""
    rank, model = dist.get_rank(), model_of(mesh)
    with swarm([[2], [0, 1]], model, None if mesh is None else group, target_batch_size=8) as opt:
        while rank == 2 and opt.local_epoch < 3:
            opt.zero_grad()
            loss_of(model, torch.randn(8, 10)).backward()
            opt.step(batch_size=8)
        dist.barrier()
        if mesh is not None:
            assert opt.load_state_from_peers()
        assert opt.local_epoch == 3
        assert opt.param_groups[0]["lr"] == pytest.approx(0.025)
        trained = torch.cat([whole(p.detach()).reshape(-1) for p in model.parameters()])
        expected = trained.clone()
        dist.broadcast(expected, 2)
        assert torch.equal(trained, expected)
        if mesh is not None:
            resume(opt, model, group)
        dist.barrier()


def resume(opt: Any, model: torch.nn.Module, group: Any) -> None:
    """The user loads the model, then the state of the optimizer."""
    checkpoint = [opt.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(checkpoint, 0, group=group)
    if dist.get_rank() == 0:
        assert all(not isinstance(p, DTensor) for p in checkpoint[0]["shoal"]["parameters"]), "it is whole"
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    opt.load_state_dict(checkpoint[0])
    assert opt.local_epoch == 3
    assert all(torch.equal(p.to_local(), b.to_local()) for p, b in zip(model.parameters(), before, strict=True))


def overflow(group: Any, mesh: DeviceMesh) -> None:
    """A gradient overflows in the part of one process: all drop the batch, and all scales shrink."""
    model = shard_all(Net(), mesh)
    scaler = GradScaler(init_scale=16.0, device="cpu")
    with alone(model, group, target_batch_size=8) as opt:
        for goes_wrong in (True, False):
            opt.zero_grad()
            scaler.scale(loss_of(model, torch.ones(4, 10))).backward()
            if goes_wrong and dist.get_rank() == 1:
                gradient: Any = model.middle.weight.grad
                gradient.to_local()[0, 0] = torch.inf
            scaler.step(opt, batch_size=4)
            scaler.update()
            assert scaler.get_scale() == 8
            assert (opt.swarm is None) or opt.swarm.local_progress.samples_accumulated == 0 or not goes_wrong
        while opt.local_epoch == 0:
            opt.step(batch_size=0)


@contextmanager
def alone(model: torch.nn.Module, group: Any, /, **options: Any) -> Iterator[MultiProcessOptimizer]:
    """A sharded peer without others."""
    dht = DHT(start=True) if dist.get_rank() == 0 else None
    options = {"optimizer": make_adamw, "params": list(model.parameters()), "run_id": "run", **options}
    opt = MultiProcessOptimizer(dht=dht, process_group=group, **options)
    yield opt
    dist.barrier(group)
    opt.shutdown()
    if dht is not None:
        dht.shutdown()


def compiled(group: Any, mesh: DeviceMesh) -> None:
    """The model is compiled, and so is the step of the optimizer, and the step of training around both."""
    batches = make_batches([4, 4])
    model = shard_all(Net(), mesh)
    fast = torch.compile(model, backend="aot_eager")
    with alone(model, group, scheduler=halve_after_two, target_batch_size=8) as opt:
        inner: Any = opt.opt
        inner.step = torch.compile(inner.step, backend="aot_eager")

        @torch.compile(backend="aot_eager")
        def train_step(batch: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(fast, batch)
            loss.backward()
            opt.step(batch_size=len(batch))
            return loss.detach()

        for number, shares in enumerate(batches):
            assert train_step(shares[dist.get_rank()]).isfinite()
            while opt.local_epoch == number:
                opt.step(batch_size=0)
        check_agreement(model, train_alone(batches))


def wrong_use(group: Any, mesh: DeviceMesh) -> None:
    model = shard_all(Net(), mesh)
    common: dict[str, Any] = {"dht": None, "run_id": "run", "target_batch_size": 8, "process_group": group}
    parameters = list(model.parameters())
    options = {"optimizer": make_adamw, "params": parameters, **common}
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    alone_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for wrong, message in (
        ({"optimizer": make_adamw(parameters), "params": None}, "give a function that makes the optimizer"),
        ({"reuse_grad_buffers": True}, "cannot accumulate in place"),
        ({"check_state": lambda: True}, "check_state= is called in the first process alone"),
        ({"extra_tensors": [sharded]}, "extra_tensors=.* is sharded"),
        ({"params": parameters[:1], "model": model}, "model= that the optimizer does not have"),
        ({"process_group": alone_group}, r"hold \d+ of the \d+ values of parameter 0: give process_group="),
    ):
        with pytest.raises(ValueError, match=message):
            MultiProcessOptimizer(**{**options, **wrong})
    with pytest.raises(ValueError if dist.get_rank() == 0 else ProcessGroupError, match="needs a DHT"):
        MultiProcessOptimizer(**options)
