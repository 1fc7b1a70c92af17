"""One expert: what its module gets and returns, how it learns, and how it is kept on the disk."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.compression import CompressionType
from shoal.compression.serialization import BatchTensorDescriptor
from shoal.moe.backend import ModuleBackend
from shoal.moe.checkpoints import KEPT, LAST, CheckpointSaver, is_directory, load_experts, store_experts
from shoal.moe.expert_server import make_backend
from shoal.moe.layers import (
    ClippingWrapper,
    add_custom_models_from_file,
    get_linear_schedule_with_warmup,
    name_to_block,
    name_to_input,
    register_expert_class,
)

pytestmark = pytest.mark.oldest
ROW = BatchTensorDescriptor(2)
SGD = partial(torch.optim.SGD, lr=1.0)


class Sum(nn.Module):
    """Has nested and keyword inputs, and an integer among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, b: torch.Tensor, a: torch.Tensor) -> Any:
        return {"sum": (pair[0] + 2 * pair[1] + 3 * a) * self.scale, "number": b + 1}


def backend_of_sum() -> ModuleBackend:
    kwargs_schema = {"b": BatchTensorDescriptor(dtype=torch.int64), "a": ROW}
    return ModuleBackend("e.0", Sum(), args_schema=((ROW, ROW),), kwargs_schema=kwargs_schema, max_batch_size=4)


def linear(**kwargs: Any) -> ModuleBackend:
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    return ModuleBackend("e.0", module, args_schema=(ROW,), max_batch_size=4, **kwargs)


def test_inputs_are_flat_in_order_of_the_schema() -> None:
    backend = backend_of_sum()
    ones, number = torch.ones(1, 2), torch.tensor([5])
    outputs = backend.forward(ones, 10 * ones, 100 * ones, number)  # the keywords by name: a, b
    assert [each.tolist() for each in outputs] == [[6], [[321, 321]]]
    assert not outputs[1].requires_grad
    info = backend.get_info()
    assert [*info] == ["forward_schema", "outputs_schema", "keyword_names", "max_batch_size"]
    assert info["keyword_names"] == ("b", "a")
    assert info["outputs_schema"]["sum"].size == (None, 2)
    assert info["outputs_schema"]["number"].dtype == torch.int64
    with pytest.raises(RuntimeError, match="without rows"):
        backend.forward(*[each[:0] for each in (ones, ones, ones, number)])


def test_each_input_gets_a_gradient() -> None:
    backend = backend_of_sum()
    ones, number = torch.ones(2, 2), torch.tensor([5, 6])
    grads = backend.backward(ones, ones, ones, number, torch.zeros(2), ones.double())
    assert [each.tolist() for each in grads[:3]] == [(factor * ones).tolist() for factor in (1, 2, 3)]
    assert grads[3].equal(torch.zeros_like(number))
    assert backend.module.scale.grad is not None


class Fails(nn.Module):
    """Two factors; between them, the backward pass fails for negative inputs, and has no number for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * self.first

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            assert (x >= 0).all(), "negative"
            return grad.masked_fill(x > 100, math.nan)

        if hidden.requires_grad:
            hidden.register_hook(spoil)
        return hidden * self.second


@pytest.mark.parametrize(("value", "error"), [(-1.0, "negative"), (101.0, "not finite")])
def test_failed_backward_changes_nothing(value: float, error: str) -> None:
    module = Fails()
    backend = ModuleBackend("e.0", module, args_schema=(ROW,), max_batch_size=4, optimizer=SGD(module.parameters()))
    module.first.grad = torch.full((2,), 3.0)  # of passes that are to be averaged with later ones
    with pytest.raises((AssertionError, ValueError), match=error):
        backend.backward(torch.full((1, 2), value), torch.ones(1, 2))
    assert module.first.tolist() == [1, 1]
    assert module.first.grad.tolist() == [3, 3]
    assert module.second.grad is None


def test_complex_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="view_as_real"):
        ModuleBackend("e.0", nn.Identity(), args_schema=(BatchTensorDescriptor(dtype=torch.cfloat),), max_batch_size=4)


def test_sparse_gradients() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    numbers = BatchTensorDescriptor(dtype=torch.int64)
    backend = ModuleBackend("e.0", module, args_schema=(numbers,), max_batch_size=4, optimizer=SGD(module.parameters()))
    before = module.weight.detach().clone()
    backend.backward(torch.tensor([1, 1]), torch.ones(2, 2))
    assert (before - module.weight)[1].tolist() == pytest.approx([2, 2])


def test_only_keyword_inputs() -> None:
    class Double(nn.Module):
        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    backend = ModuleBackend("e.0", Double(), kwargs_schema={"x": ROW}, max_batch_size=4)
    assert backend.forward(torch.ones(1, 2))[0].tolist() == [[2, 2]]
    assert backend.backward(torch.ones(1, 2), torch.ones(1, 2))[0].tolist() == [[2, 2]]


def test_gradients_may_have_codecs_of_their_own() -> None:
    backend = linear(outputs_compression=CompressionType.FLOAT16, grad_compression=CompressionType.BLOCKWISE_8BIT)
    assert backend.outputs_schema.compression == CompressionType.FLOAT16
    assert backend.get_info()["grad_outputs_schema"].compression == CompressionType.BLOCKWISE_8BIT
    assert backend.get_info()["grad_inputs_schema"][0][0].compression == CompressionType.BLOCKWISE_8BIT
    assert backend.forward_schema[0][0].compression == CompressionType.NONE


def test_optimizer_can_be_replaced_and_learning_overridden() -> None:
    """As programs do that give each expert an optimizer of a swarm."""
    calls = []

    class Own(ModuleBackend):
        def backward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().backward(*inputs)

        def on_backward(self, batch_size: int) -> None:
            calls.append(batch_size)
            super().on_backward(batch_size)

    backend = Own("e.0", nn.Linear(2, 1), args_schema=(ROW,), max_batch_size=4)
    backend.optimizer = SGD(backend.module.parameters())
    before = backend.module.weight.detach().clone()
    backend.backward(torch.ones(3, 2), torch.ones(3, 1))
    assert calls == [3]
    assert backend.module.weight.equal(before - 3)
    assert backend.module.weight.grad is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optim_cls": None, "clip_grad_norm": 1.0}, "without an optimizer"),
        ({"optim_cls": None, "scheduler": "linear"}, "without an optimizer"),
        ({"scheduler": "linear"}, "needs num_warmup_steps"),
        ({"scheduler": "cosine"}, "no scheduler 'cosine': linear, none"),
        ({"expert_cls": "fnn"}, "no expert class 'fnn': ffn"),
        ({"uid": "expert.01"}, "is not a uid"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, AssertionError), match=error):
        make_backend(**{"uid": "expert.0", "hidden_dim": 4, **options})


def test_rate_rises_and_falls_and_continues_from_a_checkpoint(tmp_path: Path) -> None:
    def scheduled() -> ModuleBackend:
        return make_backend(
            "e.0", "nop", 2, optim_cls=SGD, scheduler="linear", num_warmup_steps=2, num_training_steps=4,
            clip_grad_norm=1.0,
        )  # fmt: skip

    backend, x = scheduled(), torch.ones(1, 2)
    rates = []
    for step in range(5):
        rates.append(backend.optimizer.param_groups[0]["lr"])
        if step == 2:
            store_experts({"e.0": backend}, tmp_path)
        backend.backward(x, x)
    assert rates == [0, 0.5, 1, 0.5, 0]
    load_experts({"e.0": backend}, str(tmp_path))
    assert backend.optimizer.param_groups[0]["lr"] == 1
    backend.backward(x, x)
    assert backend.scheduler._step_count == 4  # two before, one now, one when it was made


def test_gradients_of_an_expert_are_clipped() -> None:
    module = nn.Linear(2, 1, bias=False)
    before = module.weight.detach().clone()
    optimizer = ClippingWrapper(SGD(module.parameters()), 0.5)
    assert get_linear_schedule_with_warmup(optimizer, 0, 4).get_last_lr() == [1.0]
    module(torch.full((1, 2), 100.0)).backward()
    optimizer.step()
    assert (module.weight - before).norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["ffn", "transformer", "nop", "det_dropout"])
def test_built_in_classes_keep_the_shape_of_their_input(name: str) -> None:
    module = name_to_block[name](32)
    sample = name_to_input[name](3, 32)
    x, *others = sample if isinstance(sample, tuple) else (sample,)
    x = torch.randn(x.shape, requires_grad=True)
    output = module(x, *others)
    assert output.shape == x.shape
    assert output.data_ptr() != x.data_ptr()
    output.square().sum().backward()
    assert x.grad is not None
    assert x.grad.norm() > 0
    if name == "det_dropout":
        assert torch.equal(module(x, *others), output)
        dropped = module(x, torch.zeros_like(others[0]))
        assert dropped.equal(module(torch.zeros_like(x), *others))


def test_custom_classes(tmp_path: Path) -> None:
    file = tmp_path / "custom.py"
    file.write_text(
        "import torch\nimport shoal\n"
        "@shoal.register_expert_class('perceptron', lambda rows, width: torch.empty(rows, width))\n"
        "class Perceptron(torch.nn.Linear):\n"
        "    def __init__(self, hid_dim, outputs=7):\n        super().__init__(hid_dim, outputs)\n"
    )
    try:
        add_custom_models_from_file(file)
        backend = make_backend("e.0", "perceptron", 5, expert_kwargs={"outputs": 3})
        assert backend.forward(torch.ones(4, 5))[0].shape == (4, 3)
        again = register_expert_class("perceptron", torch.empty)
        with pytest.raises(RuntimeError, match="registered already"):
            again(nn.Identity)
    finally:
        for names in (name_to_block, name_to_input):
            names.pop("perceptron", None)  # type: ignore[attr-defined]


def test_three_checkpoints_make_four_files(tmp_path: Path) -> None:
    backend = linear(optimizer=None)
    for value in range(3):
        nn.init.constant_(backend.module.weight, value)
        store_experts({"e.0": backend}, tmp_path)
    assert len([*(tmp_path / "e.0").iterdir()]) == 4
    nn.init.zeros_(backend.module.weight)
    load_experts({"e.0": backend}, tmp_path)
    assert backend.module.weight.tolist() == [[2, 2]]


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    backend = linear()
    for _ in range(KEPT + 2):
        store_experts({"e.0": backend}, tmp_path)
    assert len([*(tmp_path / "e.0").iterdir()]) == KEPT + 1


def test_saver_writes_at_its_start_and_end(tmp_path: Path) -> None:
    backend = linear()
    saver = CheckpointSaver({"e.0": backend}, str(tmp_path), update_period=1000)
    saver.start()
    assert (tmp_path / "e.0" / LAST).exists()
    nn.init.constant_(backend.module.weight, 5)
    saver.shutdown()
    saver.shutdown()
    assert not saver.is_alive()
    state = torch.load(tmp_path / "e.0" / LAST, weights_only=True)
    assert state["module"]["weight"].tolist() == [[5, 5]]
    assert len([*(tmp_path / "e.0").iterdir()]) == 3


def test_what_a_checkpoint_lacks_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store_experts({"e.0": linear()}, tmp_path)
    learning = linear()
    learning.optimizer = SGD(learning.module.parameters())
    with caplog.at_level(logging.WARNING):
        load_experts({"e.0": learning, "e.1": linear()}, tmp_path)
    assert "the state of expert e.0 has no optimizer" in caplog.text
    assert "there is no checkpoint of expert e.1" in caplog.text
    with pytest.raises(AssertionError, match="existing folder"):
        is_directory(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"cut off"])
def test_unreadable_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    store_experts({"e.0": linear()}, tmp_path)
    (tmp_path / "e.0" / LAST).write_bytes(content)
    with pytest.raises(RuntimeError, match=rf"cannot load .*{LAST}.*an older checkpoint"):
        load_experts({"e.0": linear()}, tmp_path)
