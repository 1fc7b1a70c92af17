"""What an optimizer keeps survives every codec: counters exactly, second moments with a small error of each value."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import (
    BFloat16Compression,
    CompressionBase,
    CompressionInfo,
    NoCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    TensorRole,
    deserialize_torch_tensor,
)
from shoal.compression.statistics import NonNegative16BitCompression, codec_for_average, codec_for_download
from shoal.optim.setup.optimizer_state import initialize_optimizer_state_
from tests.compression.codecs import ALL, FLOATING, LOSSY, name_of, restored

CODEC = NonNegative16BitCompression()
ADAPTIVE = [RoleAdaptiveCompression(optimizer=LOSSY[0]), SizeAdaptiveCompression(4, LOSSY[0], LOSSY[3])]


def downloaded(codec: CompressionBase, tensor: torch.Tensor, role: TensorRole = TensorRole.OPTIMIZER) -> torch.Tensor:
    info = CompressionInfo.from_tensor(tensor, key=0, role=role)
    return deserialize_torch_tensor(codec_for_download(codec, tensor, info).compress(tensor, info))


# --- the codec of second moments --------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 2.0**127, width=32), max_size=20))
def test_each_square_root_has_a_small_relative_error(values):
    tensor = torch.tensor(values)
    found = restored(CODEC, tensor)
    assert ((found > 0) == (tensor > 0)).all()
    normal = tensor >= torch.finfo(torch.float32).smallest_normal
    ratio = (found.double() / tensor.double()).sqrt()[normal]
    assert ((ratio - 1).abs() <= 1 / 1024).all()


@pytest.mark.parametrize("dtype", FLOATING)
def test_values_that_are_no_second_moments_have_a_meaning_too(dtype):
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([math.inf, math.nan, -1.0, -0.0, 0.0, torch.finfo(dtype).tiny, largest], dtype=dtype)
    found = restored(CODEC, tensor)
    assert found.dtype == dtype
    assert found[1:5].tolist() == [0, 0, 0, 0]
    assert found[5] > 0
    assert found[0] == found[6]
    assert found[6].isfinite()
    assert found[6].double() >= min(largest, torch.finfo(torch.float32).max) * (1 - 1 / 256)


# --- statistics of optimizers -----------------------------------------------------------------------------------------


def of_torch() -> list[type[torch.optim.Optimizer]]:
    """All optimizers of torch that step without a closure and with dense gradients."""
    kinds = [kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass)]
    left_out = torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam
    return [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind not in left_out]


OPTIONS = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "RMSprop": {"centered": True, "momentum": 0.5}}


def trained(kind: type[torch.optim.Optimizer], scales: list[float]) -> torch.optim.Optimizer:
    """An optimizer after some steps with gradients of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(40, 3, generator=generator)) for _ in scales]
    optimizer = kind(parameters, lr=1e-3, **OPTIONS.get(kind.__name__, {}))
    initialize_optimizer_state_(optimizer)
    for _ in range(3):
        for parameter, scale in zip(parameters, scales, strict=True):
            sizes = torch.logspace(-6, 0, 40)[:, None]
            parameter.grad = torch.randn(40, 3, generator=generator) * sizes * scale
        optimizer.step()
    for statistics in optimizer.state.values():
        if "step" in statistics:
            statistics["step"] += 100_001 - 3
    return optimizer


@pytest.mark.parametrize("kind", of_torch(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("codec", [*ALL, *ADAPTIVE], ids=name_of)
@settings(max_examples=8)  # of twenty, with each optimizer and each codec
@given(st.lists(st.sampled_from([1e-6, 1e-3, 1.0, 1e3]), min_size=1, max_size=2))
def test_the_first_steps_after_a_download_are_of_the_right_size(kind, codec, scales):
    donor = trained(kind, scales)
    newcomer = copy.deepcopy(donor)
    for statistics, of_donor in zip(newcomer.state.values(), donor.state.values(), strict=True):
        for name, value in of_donor.items():
            if isinstance(value, torch.Tensor):
                statistics[name] = found = downloaded(codec, value).clone()
                assert found.dtype == value.dtype
                if bool((value >= 0).all()):
                    assert (found >= 0).all()
                    assert ((found > 0) == (value > 0)).all()
            if name == "step":
                assert float(statistics[name]) == 100_001
    for number in range(3):
        steps = []
        for optimizer in (donor, newcomer):
            before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
            for parameter, scale in zip(optimizer.param_groups[0]["params"], scales, strict=True):
                sizes = torch.logspace(-6, 0, 40)[:, None]
                parameter.grad = torch.sin(torch.arange(120.0) + number).view(40, 3) * sizes * scale
            optimizer.step()
            after = optimizer.param_groups[0]["params"]
            steps.append([(p - b).abs() for p, b in zip(after, before, strict=True)])
        for expected, found in zip(*steps, strict=True):
            limit = 4 * expected + 4 * expected.mean() + 1e-7
            assert found.isfinite().all()
            assert (found <= limit).all(), f"steps are up to {(found / limit).max():.3g} times too large"


@pytest.mark.parametrize("codec", LOSSY, ids=name_of)
def test_integers_and_counters_are_never_rounded(codec):
    counters = [
        torch.tensor(100_002.0),
        torch.tensor([100_002.0]),
        torch.tensor([100_001.0, 2.0, 0.0, 7.0]),
        torch.tensor(0.1234567),
        torch.arange(256, dtype=torch.uint8),
        torch.arange(-5, 5),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ]
    for counter in counters:
        assert torch.equal(downloaded(codec, counter), counter)
    for tensor in counters[4:]:
        assert torch.equal(downloaded(codec, tensor, TensorRole.PARAMETER), tensor)


def chosen(choose, codec: CompressionBase, tensor: torch.Tensor, role: TensorRole) -> type[CompressionBase]:
    info = CompressionInfo.from_tensor(tensor, key=0, role=role)
    return type(choose(codec, tensor, info) if choose is codec_for_download else choose(codec, info))


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_each_role_has_the_codec_that_the_documents_say(codec):
    weights, moments = torch.tensor([0.5, -1.5]), torch.tensor([0.5, 0.0])
    own, is_lossy = type(codec), codec.lossy
    for role in (TensorRole.PARAMETER, TensorRole.GRADIENT, TensorRole.UNSPECIFIED):
        assert chosen(codec_for_download, codec, weights, role) is own
        assert chosen(codec_for_average, codec, weights, role) is own
        assert chosen(codec_for_average, codec, weights.int(), role) is NoCompression
    of_second = NonNegative16BitCompression if is_lossy else own
    assert chosen(codec_for_download, codec, moments, TensorRole.OPTIMIZER) is of_second
    of_first = own if codec.keeps_small_values else BFloat16Compression
    assert chosen(codec_for_download, codec, weights, TensorRole.OPTIMIZER) is of_first
    assert chosen(codec_for_average, codec, weights, TensorRole.OPTIMIZER) is NoCompression
    assert chosen(codec_for_average, codec, weights, TensorRole.COUNTER) is NoCompression


@pytest.mark.parametrize("codec", [codec for codec in ALL if codec.keeps_small_values], ids=name_of)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70))
def test_codecs_that_keep_small_values_change_none_by_more_than_itself(codec, values):
    tensor = torch.tensor(values)
    error = (restored(codec, tensor).double() - tensor.double()).abs()
    assert (error <= tensor.double().abs()).all()
