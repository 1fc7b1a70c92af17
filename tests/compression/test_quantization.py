"""Codebooks and levels: each codec's own rule, checked against the slow and obvious way to compute it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import (
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    CompressionInfo,
    Quantile8BitQuantization,
    Uniform8BitQuantization,
)
from shoal.compression.quantization import CODEBOOK_NBYTES
from tests.compression.codecs import BLOCKWISE, CODEBOOK, compressed, name_of, relative_error, restored


def gradient_like(count: int) -> torch.Tensor:
    """Most values tiny, some rows large, heavy tails."""
    torch.manual_seed(0)
    rows = torch.distributions.StudentT(3.0).sample((count // 500, 500))
    return (rows * torch.randn(count // 500, 1).exp() * 1e-4).flatten()


DATA = {
    "normal": lambda: (torch.manual_seed(0), torch.randn(200_000))[1],
    "gradients": lambda: gradient_like(200_000),
    "far from 0": lambda: (torch.manual_seed(0), 1000 + torch.randn(200_000))[1],
    "mostly 0": lambda: (torch.manual_seed(0), torch.randn(200_000) * (torch.rand(200_000) < 0.1))[1],
}
HARD_TO_SUM = {
    "two values": lambda: (torch.manual_seed(0), torch.where(torch.rand(1_200_000) < 0.1, -0.7, 0.1))[1],
    "one far off": lambda: (torch.manual_seed(0), torch.cat([torch.randn(600_000), torch.tensor([1e8])]))[1],
    "float64": lambda: (torch.manual_seed(0), torch.cat([torch.randn(9_000), torch.tensor([1e30])]).double())[1],
}
every_kind = pytest.mark.parametrize("kind", DATA)


def codes_and_codebook(codec, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    payload = torch.frombuffer(bytearray(compressed(codec, tensor)), dtype=torch.uint8)
    return payload[CODEBOOK_NBYTES:].long(), payload[:CODEBOOK_NBYTES].view(torch.float32)


@pytest.mark.parametrize("kind", [*DATA, *HARD_TO_SUM])
@pytest.mark.parametrize("codec", CODEBOOK, ids=name_of)
def test_each_level_is_the_average_of_its_values(codec, kind):
    tensor = (DATA | HARD_TO_SUM)[kind]()
    codes, codebook = codes_and_codebook(codec, tensor)
    counts = torch.bincount(codes, minlength=256)
    averages = torch.bincount(codes, weights=tensor.double(), minlength=256) / counts
    used = counts > 0
    typical = tensor.double().abs().median()  # not the deviation, which one value may make as large as it likes
    assert torch.allclose(codebook[used].double(), averages[used], rtol=1e-6, atol=1e-5 * float(typical))
    assert torch.equal(restored(codec, tensor), codebook[codes])


@every_kind
def test_uniform_bins_cover_six_deviations(kind):
    tensor = DATA[kind]().double()
    codes, _ = codes_and_codebook(Uniform8BitQuantization(), tensor)
    step = 6 * tensor.std(correction=0) / 255
    is_far = kind == "far from 0"
    steps = (tensor - tensor.mean() if is_far else tensor) / step
    first = -128 if is_far else (tensor.mean() / step).round() - 128
    expected = (steps.round() - first).clamp(0, 255)
    near_a_border = (steps - steps.floor() - 0.5).abs() < 1e-3
    assert near_a_border.float().mean() < 0.01
    assert torch.equal(codes[~near_a_border], expected[~near_a_border].long())


@every_kind
def test_quantiles_are_no_worse_than_bins_of_equal_count(kind):
    tensor = DATA[kind]().double()
    ascending = tensor.sort().values
    bins = ascending.view(-1)[: len(ascending) // 256 * 256].view(256, -1)
    squared_error = (bins - bins.mean(1, keepdim=True)).square().mean()
    assert relative_error(Quantile8BitQuantization(), tensor) <= squared_error / tensor.square().mean()


@every_kind
def test_quantile_levels_are_where_the_values_are(kind):
    tensor = DATA[kind]()
    codes, _ = codes_and_codebook(Quantile8BitQuantization(), tensor)
    different = tensor[tensor != 0]
    counts = torch.bincount(codes[tensor != 0], minlength=256)
    assert counts.max() < len(different) * (0.06 if kind == "mostly 0" else 0.02)
    order = tensor.argsort()
    assert (codes[order].diff() >= 0).all(), "codes must ascend with the values"


@given(values=st.lists(st.integers(-128, 127), min_size=1, max_size=300), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_few_different_values_are_restored_exactly_by_quantiles(values, scale):
    few = [values[index % min(len(values), 8)] for index in range(len(values))]
    tensor = torch.tensor(few) * scale
    assert torch.allclose(restored(Quantile8BitQuantization(), tensor), tensor, rtol=1e-5, atol=1e-5 * scale)


# --- blocks -----------------------------------------------------------------------------------------------------------


def levels_of_8_bits() -> torch.Tensor:
    """What the bytes -127 to 127 are restored as in a block of scale 1."""
    numbers = torch.arange(-127, 128, dtype=torch.int8)
    serialized = BlockwiseQuantization().compress(torch.zeros(255), CompressionInfo.from_tensor(torch.zeros(255)))
    payload = torch.tensor([1.0]).numpy().tobytes() + numbers.numpy().tobytes()
    return BlockwiseQuantization().extract(replace(serialized, buffer=payload))


def test_levels_of_8_bits_are_cubes():
    levels = levels_of_8_bits()
    steps = torch.arange(-127, 128, dtype=torch.float64)
    assert torch.allclose(levels.double(), (steps / 127) ** 3, rtol=3e-7, atol=0)
    assert levels[0] == -1
    assert levels[127] == 0
    assert levels[254] == 1


def test_each_level_of_8_bits_takes_its_own_byte():
    levels = levels_of_8_bits()
    payload = compressed(BlockwiseQuantization(), levels.flip(0))  # so that the scale is 1, not -1
    assert torch.equal(torch.frombuffer(bytearray(payload[4:]), dtype=torch.int8).flip(0), torch.arange(-127, 128))
    assert torch.equal(BlockwiseQuantization.table().levels.unique(), levels)


@pytest.mark.parametrize("codec", BLOCKWISE, ids=name_of)
def test_every_number_takes_the_nearest_level(codec):
    table = codec.table()
    levels = table.levels.double()
    borders = (levels.sort().values[1:] + levels.sort().values[:-1]).float() / 2
    around = torch.stack([borders.nextafter(torch.tensor(-2.0)), borders, borders.nextafter(torch.tensor(2.0))])
    torch.manual_seed(0)
    small = torch.randn(30_000) * torch.exp(-20 * torch.rand(30_000))
    numbers = torch.cat([small.clamp(-1, 1), torch.linspace(-1, 1, 30_001), around.flatten(), levels.float()])
    codes = torch.empty(len(numbers), dtype=torch.uint8)
    table.nearest(numbers.clone(), codes)
    distance = (levels[codes.long()] - numbers.double()).abs()
    smallest = torch.stack([(levels - number).abs().min() for number in numbers.double()])
    assert (distance - smallest).max() < 1e-7
    assert torch.equal(levels[codes[-len(levels) :].long()], levels), "levels stand for themselves"


@pytest.mark.parametrize("codec", BLOCKWISE, ids=name_of)
@given(count=st.integers(1, 500), seed=st.integers(0, 2**31))
def test_blocks_do_not_depend_on_each_other(codec, count, seed):
    torch.manual_seed(seed)
    blocks = torch.randn(3, codec.block_size) * torch.tensor([[1e-6], [1.0], [1e6]])
    last = torch.randn(count % codec.block_size)
    together = restored(codec, torch.cat([blocks.flatten(), last]))
    alone = torch.cat([restored(codec, block) for block in [*blocks, last]])
    assert torch.equal(together, alone)


def test_the_extreme_value_of_a_block_is_exact_whatever_its_sign():
    torch.manual_seed(0)
    blocks = torch.randn(50, 4096)
    result = restored(BlockwiseQuantization(), blocks)
    extreme = blocks.abs().argmax(1, keepdim=True)
    assert (blocks.gather(1, extreme) < 0).any()
    assert torch.equal(result.gather(1, extreme), blocks.gather(1, extreme))
    result = restored(Blockwise4BitQuantization(), blocks.view(-1, 64))
    extreme = blocks.view(-1, 64).abs().argmax(1, keepdim=True)
    assert torch.allclose(result.gather(1, extreme), blocks.view(-1, 64).gather(1, extreme), rtol=2**-8)


def test_sizes():
    assert len(compressed(BlockwiseQuantization(), torch.zeros(4097))) == 2 * 4 + 4097
    assert len(compressed(Blockwise4BitQuantization(), torch.zeros(65))) == 2 * 2 + 33
    assert len(compressed(Uniform8BitQuantization(), torch.zeros(65))) == 1024 + 65


def quantized(tensor: torch.Tensor, levels: torch.Tensor, block_size: int) -> torch.Tensor:
    """Each value as the nearest level times its block's largest magnitude."""
    blocks = tensor.view(-1, block_size)
    scales = blocks.abs().amax(1, keepdim=True)
    ascending = levels.sort().values
    borders = (ascending[1:] + ascending[:-1]) / 2
    return (ascending[torch.bucketize(blocks / scales, borders)] * scales).view(-1)


def dynamic_levels() -> torch.Tensor:
    """Those of the dynamic 8-bit type (Dettmers et al., arXiv 2110.02861)."""
    decades = [
        10.0**-power * (0.1 + 0.9 * (torch.arange(2 ** (6 - power)) + 0.5) / 2 ** (6 - power)) for power in range(7)
    ]
    positive = torch.cat(decades)
    return torch.cat([-positive, torch.tensor([0.0, 1.0]), positive])


@pytest.mark.parametrize(("kind", "part"), [("normal", 0.6), ("gradients", 0.6), ("mostly 0", 0.9)])
def test_cubes_lose_less_than_the_dynamic_type(kind, part):
    tensor = DATA[kind]()[: 200_000 // 4096 * 4096]
    levels = dynamic_levels()
    assert len(levels.unique()) == 256
    others_error = (quantized(tensor, levels, 4096) - tensor).square().mean() / tensor.square().mean()
    assert relative_error(BlockwiseQuantization(), tensor) < part * others_error


def test_cubes_keep_small_values_like_the_dynamic_type():
    torch.manual_seed(0)
    blocks = 10 ** (-6 * torch.rand(50, 4096))  # any power of ten is as likely
    blocks[:, 0] = 1
    tensor = blocks.flatten()
    restored_by_others = quantized(tensor, dynamic_levels(), 4096)
    relative, others = (
        (tensor - each).abs() / tensor for each in (restored(BlockwiseQuantization(), tensor), restored_by_others)
    )
    for power in range(5):
        inside = (tensor <= 10.0**-power) & (tensor > 10.0 ** (-power - 1))
        assert relative[inside].mean() < others[inside].mean()
        assert relative[inside].amax() < others[inside].amax()


@pytest.mark.parametrize("kind", ["normal", "gradients"])
def test_4_bit_levels_beat_those_at_the_quantiles_of_a_normal_distribution(kind):
    tensor = DATA[kind]()[: 200_000 // 64 * 64]
    normal = torch.distributions.Normal(0.0, 1.0)
    positive, negative = (normal.icdf(torch.linspace(0.5, 0.9677083, count)) for count in (9, 8))
    levels = torch.cat([positive / positive.max(), -negative[1:] / negative.max()])
    assert len(levels) == 16
    others_error = (quantized(tensor, levels, 64) - tensor).square().mean() / tensor.square().mean()
    assert relative_error(Blockwise4BitQuantization(), tensor) < 0.95 * others_error


def test_few_bits_are_few_bytes():
    tensor = torch.randn(1 << 16)
    assert math.isclose(8 * len(compressed(Blockwise4BitQuantization(), tensor)) / len(tensor), 4.25)
