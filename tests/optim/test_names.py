"""Names of parameters are those of the module that a user has compiled, or wrapped, in all peers and archives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal import load_archive
from shoal.archive.store import Store
from shoal.averaging.state.download import State
from shoal.compression import Float16Compression, NoCompression, PerTensorCompression
from shoal.compression.base import plain_name
from shoal.optim import DiLoCo, Optimizer
from shoal.optim.consistency import OtherTensors
from tests.archive.states import small_state
from tests.optim.conftest import values

NAMES = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2))
        self.register_buffer("scale", torch.ones(1))


def compiled(net: Net) -> torch.nn.Module:
    return torch.compile(net, backend="eager")


def compiled_in_part(net: Net) -> torch.nn.Module:
    net.body[1] = torch.compile(net.body[1], backend="eager")
    return net


def on_devices(net: Net) -> torch.nn.Module:
    return torch.nn.DataParallel(compiled(net))


def as_it_is(net: Net) -> torch.nn.Module:
    return net


WRAPPERS = [as_it_is, compiled, compiled_in_part, on_devices]


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make_optimizer(dht, model, kind: str, source: str):
    given = {"optimizer": sgd(model.parameters())}
    if source == "params":
        given = {"optimizer": sgd, "params": list(model.named_parameters()), "offload_optimizer": False}
    if kind == "DiLoCo":
        given.pop("offload_optimizer", None)
        opt = DiLoCo(dht=dht, run_id="run", sync_every=1, batch_size_per_step=1, **given)
    else:
        options = {"model": model} if source == "model" else {}
        opt = Optimizer(dht=dht, run_id="run", target_batch_size=16, **given, **options)
    if source == "name_parameters" or (kind == "DiLoCo" and source == "model"):
        opt.name_parameters(model)
    return opt


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("kind", ["Optimizer", "DiLoCo"])
@pytest.mark.parametrize("source", ["name_parameters", "params", "model"])
def test_archives_have_the_names_of_the_inner_module(make_dhts, closing, tmp_path: Path, wrap, kind, source):
    if source == "params" and wrap is on_devices:
        pytest.skip("names alone do not tell a wrapper from a part named 'module'")
    (dht,) = make_dhts(1)
    net = Net()
    model = wrap(net)
    opt = closing(make_optimizer(dht, model, kind, source))
    averager = opt.state_averager if kind == "Optimizer" else opt.averager
    state = averager.get_current_state()
    Store(tmp_path).write("run", kind, State(state.metadata, list(state.tensors)))
    extra = ["scale"] if kind == "Optimizer" and source == "model" else []
    assert sorted(Store.open(tmp_path).names) == sorted(NAMES + extra)
    for other in WRAPPERS:
        target = Net()
        load_archive(tmp_path, other(target))
        assert torch.equal(values(target), values(net))


def test_names_of_compiled_modules_fit(tmp_path: Path):
    names = ("_orig_mod.layer.weight", "_orig_mod.layer.bias")
    Store(tmp_path).write("run", "Optimizer", small_state(4, names))
    assert sorted(Store.open(tmp_path).names) == ["layer.bias", "layer.weight"]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_what_is_compared_has_plain_names(wrap):
    net = Net()
    model = wrap(net)
    for given in (model, None):
        remainder = OtherTensors.find(given, [net.body[0].weight], [])
        assert sorted(name for name, _ in remainder.trained) == sorted(NAMES[1:])
        assert [name for name, _ in remainder.buffers] == ["scale"]


def test_codecs_are_chosen_by_plain_names():
    plain, compiled = (
        PerTensorCompression({f"{prefix}body.weight": Float16Compression(), 0: NoCompression()})
        for prefix in ("", "_orig_mod.")
    )
    assert plain.fingerprint == compiled.fingerprint


def test_plain_names():
    assert plain_name("_orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"
