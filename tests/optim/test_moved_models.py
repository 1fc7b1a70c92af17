"""A model that gets another type or device after its optimizer was made."""

from __future__ import annotations

import copy

import pytest
import torch

from shoal.optim import DiLoCo, Optimizer
from tests.device import chosen_device
from tests.optim.conftest import backward, values
from tests.optim.test_equivalence import finish_epoch


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, foreach=False)


def train(opt, model: torch.nn.Module, epochs: int, *, is_shoal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        opt.zero_grad()
        backward(model, torch.randn(8, 6, generator=generator).to(next(model.parameters()).dtype))
        epoch = opt.local_epoch if is_shoal else 0
        opt.step()
        if is_shoal:
            finish_epoch(opt, epoch)


@pytest.fixture
def make_optimizer(make_dhts, closing):
    def make(model, **options):
        (dht,) = make_dhts(1)
        given = {"optimizer": adam(model.parameters())}
        if options.pop("offload", False):
            given = {"optimizer": adam, "params": model.parameters()}
        defaults = {"run_id": "run", "target_batch_size": 8, "batch_size_per_step": 8}
        return closing(Optimizer(dht=dht, **given, **{**defaults, **options}))

    return make


def move(model: torch.nn.Module, dtype: torch.dtype) -> None:
    model.to(chosen_device(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_as_with_a_plain_optimizer(make_optimizer, dtype):
    model = make_model()
    alone = copy.deepcopy(model)
    opt, plain = make_optimizer(model), adam(alone.parameters())
    move(model, dtype)
    move(alone, dtype)
    train(opt, model, 3, is_shoal=True)
    train(plain, alone, 3, is_shoal=False)
    torch.testing.assert_close(values(model), values(alone))
    for parameter, statistics in opt.opt.state.items():
        assert statistics["exp_avg"].dtype == parameter.dtype
        assert statistics["exp_avg"].device == parameter.device


@pytest.mark.parametrize("options", [{"offload": True}, {"reuse_grad_buffers": True}], ids=str)
def test_so_it_does_with_other_options(make_optimizer, options):
    model = make_model()
    opt = make_optimizer(model, **options)
    move(model, torch.bfloat16)
    before = values(model)
    generator = torch.Generator().manual_seed(1)
    for epoch in range(3):
        if not opt.options.reuse_grad_buffers:
            opt.zero_grad()
        backward(model, torch.randn(8, 6, generator=generator).bfloat16())
        opt.step()
        finish_epoch(opt, epoch)
    assert (values(model) != before).float().mean() > 0.5


def test_it_may_move_in_mid_run(make_optimizer):
    model = make_model()
    opt = make_optimizer(model)
    train(opt, model, 2, is_shoal=True)
    move(model, torch.bfloat16)
    train(opt, model, 2, is_shoal=True)
    assert opt.local_epoch == 4


def test_what_peers_exchange_must_not_become_wider(make_optimizer):
    model = make_model()
    opt = make_optimizer(model)
    opt.name_parameters(model)
    model.to(torch.float64)
    expected = (
        r"parameter 0\.weight was of torch\.float32 on cpu when this optimizer was made, and is of torch\.float64 on "
        r"cpu now, but peers exchange it as torch\.float32: call model\.to\(\.\.\.\) before you make the optimizer"
    )
    for _ in range(2):
        backward(model, torch.randn(8, 6).double())
        with pytest.raises(ValueError, match=expected):
            opt.step()


def test_accelerate_prepares_an_optimizer(make_optimizer):
    accelerate = pytest.importorskip("accelerate")
    model = make_model()
    alone = copy.deepcopy(model)
    prepared, opt = accelerate.Accelerator(cpu=True).prepare(model, make_optimizer(model))
    epoch, generator = 0, torch.Generator().manual_seed(1)
    for epoch in range(3):
        opt.zero_grad()
        backward(prepared, torch.randn(8, 6, generator=generator))
        opt.step()
        finish_epoch(opt.optimizer, epoch)
    train(adam(alone.parameters()), alone, 3, is_shoal=False)
    torch.testing.assert_close(values(model), values(alone))


def test_low_communication_training_follows_too(make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model()
    opt = closing(
        DiLoCo(dht=dht, run_id="run", optimizer=adam(model.parameters()), sync_every=2, batch_size_per_step=8)
    )
    move(model, torch.bfloat16)
    before = values(model)
    for _ in range(5):
        train(opt, model, 1, is_shoal=False)
    assert opt.local_epoch == 2
    assert (values(model) != before).float().mean() > 0.5
