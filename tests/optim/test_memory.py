"""What each mode costs in memory, as docs/training.md says: the tensors that are really there."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.averaging.state.download import Download
from shoal.optim import GradScaler
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from shoal.optim.recovery.adopt import StateHolder
from tests.drills import mostly_drills
from tests.optim.conftest import in_parallel, meet, wait_until

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "training.md"
WIDTH, PEERS = 512, 2
TOLERANCE = 0.3
"""Bytes per parameter: vectors of a model, batches of data."""
PLAIN = {"grad_averager": GradientAverager.get_factory(), "delay_state_averaging": False}
OFFLOADED = {**PLAIN, "offload": True}

MODES = {
    "default": PLAIN,
    "`reuse_grad_buffers`": {**PLAIN, "reuse_grad_buffers": True},
    "`reuse_grad_buffers` and `shoal.GradScaler`": {**PLAIN, "reuse_grad_buffers": True, "scaler": True},
    "`delay_state_averaging`": {**PLAIN, "delay_state_averaging": True},
    "`offload_optimizer`": OFFLOADED,
    "`offload_optimizer` and `reuse_grad_buffers`": {**OFFLOADED, "reuse_grad_buffers": True},
    "`offload_optimizer` and `delay_optimizer_step`": {
        **OFFLOADED,
        "delay_optimizer_step": True,
        "delay_state_averaging": True,
    },
    "`offload_optimizer` and `delay_grad_averaging`": {
        **OFFLOADED,
        "delay_grad_averaging": True,
        "delay_state_averaging": True,
    },
    "`use_local_updates`, not delayed": {"use_local_updates": True, "delay_state_averaging": False},
    "`use_local_updates`": {"use_local_updates": True},
    "PowerSGD": {**PLAIN, "grad_averager": PowerSGDGradientAverager.get_factory(averager_rank=4)},
    "PowerEF": {**PLAIN, "grad_averager": PowerEFGradientAverager.get_factory(averager_rank=4)},
    "PowerEF without `use_ext_grad_buffer`": {
        **PLAIN,
        "grad_averager": PowerEFGradientAverager.get_factory(averager_rank=4),
        "use_ext_grad_buffer": False,
    },
    "`average_opt_statistics` of one statistic": {**PLAIN, "average_opt_statistics": ["momentum_buffer"]},
}


def wide_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2))


def storages() -> dict[int, int]:
    """Bytes of every storage of a tensor that is alive, by its address."""
    gc.collect()
    found: dict[int, int] = {}
    for tensor in living_tensors():
        if tensor.layout is not torch.strided:  # left over from another test
            continue
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def living_tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):  # others, of a compiler for example, may have no memory
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def promised() -> dict[str, float]:
    """The table in the guide."""
    rows = re.findall(r"^\| (.+?) \| (\d+) \|", GUIDE.read_text(), re.MULTILINE)
    return {mode: float(number) for mode, number in rows}


def test_the_table_has_all_modes():
    assert promised().keys() == MODES.keys()


@pytest.mark.parametrize("mode", mostly_drills([*list(MODES)[::2], *list(MODES)[1::2]], quick=7))
def test_extra_bytes_per_parameter(make_trainers, monkeypatch, mode):
    """Momentum is the optimizer's own, gradients are the user's: these do not count."""
    monkeypatch.setitem(make_trainers.__globals__, "make_model", wide_model)
    options = dict(MODES[mode])
    scales = options.pop("scaler", False)
    before = storages()
    trainers = make_trainers(PEERS, optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9), **options)
    if scales:
        for trainer in trainers:
            scale_losses(trainer)
    meet(*trainers)
    in_parallel(*(lambda t=trainer: t.train_until(2) for trainer in trainers))
    own = set()
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
        average_something(trainer)
        for parameter in trainer.model.parameters():
            own |= {tensor.untyped_storage().data_ptr() for tensor in (parameter, parameter.grad) if tensor is not None}
        for statistics in trainer.opt.opt.state.values():
            own.add(statistics["momentum_buffer"].untyped_storage().data_ptr())
    after = storages()
    extra = sum(size for address, size in after.items() if address not in own and address not in before)
    parameters = sum(p.numel() for trainer in trainers for p in trainer.model.parameters())
    assert extra / parameters == pytest.approx(promised()[mode], abs=TOLERANCE)


def average_something(trainer) -> None:
    averager = trainer.opt.grad_averager or trainer.opt.state_averager
    assert len(averager.last_round.peers) == PEERS, "what is kept from one round to the next is there"


def scale_losses(trainer) -> None:
    scaler, step = GradScaler(init_scale=8.0, device="cpu"), trainer.opt.step

    def scaled_step(batch_size: int) -> None:
        for parameter in trainer.model.parameters():
            scaler.scale(parameter.grad)
        step(batch_size=batch_size, grad_scaler=scaler)
        scaler.update()

    trainer.opt.step = scaled_step


def test_a_download_takes_at_most_four_copies(make_trainers, monkeypatch):
    """Counted over both peers when a state arrives, when it is taken over, and after rounds."""
    monkeypatch.setitem(make_trainers.__globals__, "make_model", wide_model)
    before = storages()
    trainers = donor, newcomer = make_trainers(PEERS, optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3))
    model = sum(parameter.nbytes for parameter in donor.model.parameters())
    sizes: dict[str, int] = {}

    def extra() -> int:
        return sum(size for address, size in storages().items() if address not in before)

    def watch(owner: type, method: str) -> None:
        """Note the bytes of all new tensors at the end of the first call."""
        original = getattr(owner, method)

        def watched(*args, **kwargs):
            result = original(*args, **kwargs)
            sizes.setdefault(method, extra())
            return result

        monkeypatch.setattr(owner, method, watched)

    watch(Download, "result")
    watch(StateHolder, "take_over")
    donor.step()
    assert newcomer.opt.load_state_from_peers()
    assert sizes.keys() == {"result", "take_over"}
    # Parameters, gradients and the two statistics are those of plain torch.
    assert {name: size for name, size in sizes.items() if size > PEERS * (4 + 4) * model} == {}
    places = donor.opt.state_averager.node.state_sharing.slots
    wait_until(lambda: not places.sharings, "the donor has dropped its snapshot")
    meet(donor, newcomer)
    in_parallel(*(lambda t=trainer: t.train_until(3) for trainer in trainers))
    for trainer in trainers:
        trainer.opt.state_averager.finish_jobs(10)
        trainer.opt.state_averager.restore_own_state()  # on a busy machine it may have fallen behind, and keeps it
    # Sums and a copy of the parameters; a state would be three more.
    wait_until(lambda: extra() < PEERS * (4 + 3) * model, "no state is kept once it is given away or taken over")
