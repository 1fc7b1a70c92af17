"""Rounds with every codec: parts of all types and sizes arrive, and averages are as good as the codec."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from shoal.averaging.control import AveragingMode
from shoal.averaging.round.parts import part_length
from shoal.compression import (
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)
from shoal.compression.adaptive import AdaptiveCompressionBase
from tests.averaging.swarm import Swarm, make_control
from tests.compression.codecs import ALL, LOSSY, name_of
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = pytest.mark.devices

SHAPES = [(100, 260), (7,), (), (0, 5), (5, 1)]
TOLERANCE = {"BFloat16Compression": 0.01, "BlockwiseQuantization": 0.05, "Blockwise4BitQuantization": 0.3}
"""Root of the mean squared error; peers' values have a variance of 1."""


async def average(tensors, **settings):
    swarm = Swarm()
    for each in tensors:
        await swarm.add(each, **settings)
    controls = [make_control(node, expected_group_size=len(tensors)) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    assert all(len(control.result()) == len(tensors) for control in controls)
    await swarm.close()


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@alone_in_virtual_time
async def test_every_codec_averages(codec, dtype):
    torch.manual_seed(0)
    tensors = [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(3)]
    means = [sum(each.double() for each in column) / 3 for column in zip(*tensors, strict=True)]
    await average(tensors, compression=codec, part_size_bytes=10_000)
    limit = TOLERANCE.get(name_of(codec), 0.03 if codec in LOSSY else 1e-6)
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    for each in tensors:
        for tensor, mean in zip(each, means, strict=True):
            error = (tensor.double() - mean).square().mean().sqrt() if tensor.numel() else torch.tensor(0.0)
            assert error <= limit + 2 * rounding, tensor.shape
            assert tensor.dtype == dtype


async def with_a_client(codecs):
    """What two members have after a round in which the second one reduces everything: their tensors, by member."""
    torch.manual_seed(0)
    alike, unlike = torch.linspace(0, 22, 1000), torch.randn(2, 1000)
    tensors = [[alike.clone(), unlike[0].clone()], [alike + 5, unlike[1].clone()]]
    swarm = Swarm()
    for each, mode in zip(tensors, (AveragingMode.CLIENT, AveragingMode.NODE), strict=True):
        await swarm.add(each, mode=mode, compression=PerTensorCompression(codecs))
    controls = [make_control(node, expected_group_size=2) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    await swarm.close()
    return tensors


@alone_in_virtual_time
async def test_the_average_of_a_tensor_does_not_depend_on_the_codec_of_the_one_beside_it():
    """Two tensors with one codec are cut as one. Members have nearly the same first one, and nothing in common else."""
    half, eighth = Float16Compression(), Uniform8BitQuantization()
    results = {codecs: await with_a_client(codecs) for codecs in itertools.product((half, eighth), repeat=2)}
    for codec in (half, eighth):
        for member in range(2):
            for index, pairs in enumerate((((codec, half), (codec, eighth)), ((half, codec), (eighth, codec)))):
                one, other = (results[codecs][member][index] for codecs in pairs)
                assert torch.equal(one, other)


@pytest.mark.parametrize("members", [2, 3, 4, 5])
@pytest.mark.parametrize("spread", [0.01, 10.0], ids=["alike", "unlike"])
@alone_in_virtual_time
async def test_float16_costs_each_member_its_rounding_and_no_more(members, spread):
    """Members do not get the same bits: each gets the difference to what it has sent, rounded to float16."""
    torch.manual_seed(members)
    common = torch.randn(30_000)
    tensors = [[common + spread * torch.randn(30_000)] for _ in range(members)]
    before = torch.stack([tensor.double() for [tensor] in tensors])
    mean = before.mean(0)
    await average(tensors, compression=Float16Compression(), part_size_bytes=10_000)
    half_a_step = 2.0**-11
    rounding = half_a_step * (before.abs().mean(0) + before.abs() + (mean - before).abs())
    for index, [result] in enumerate(tensors):
        assert ((result.double() - mean).abs() <= 1.01 * rounding[index] + 1e-6).all()


@pytest.mark.parametrize("codec", LOSSY, ids=name_of)
@alone_in_virtual_time
async def test_members_that_agree_stay_where_they_are(codec):
    """Whatever a codec does to values far out: it does so to all members' values, and that cancels out."""
    torch.manual_seed(0)
    common = [torch.randn(shape) ** 5 for shape in SHAPES]
    tensors = [[tensor.clone() for tensor in common] for _ in range(3)]
    await average(tensors, compression=codec, part_size_bytes=10_000)
    for each in tensors:
        torch.testing.assert_close(each, common, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@alone_in_virtual_time
async def test_exact_tensors_of_any_type_beside_lossy_ones(dtype, alpha):
    codec = PerTensorCompression([Uniform8BitQuantization(), NoCompression()])
    tensors = [[torch.full((1000,), 1.0 + i), torch.full((1000,), 10 + 8 * i).to(dtype)] for i in range(2)]
    await average(tensors, compression=codec, averaging_alpha=alpha)
    for i, (_, exact) in enumerate(tensors):
        before = 10 + 8 * i
        assert torch.equal(exact, torch.full((1000,), before + alpha * (14 - before)).to(dtype))


class Recorder(Uniform8BitQuantization):
    """Notes the size of each part and what the codec was told of it."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int | None]] = []

    def compress(self, tensor, info, allow_inplace=False):
        self.parts.append((tensor.numel(), info.part_size))
        return super().compress(tensor, info, allow_inplace)


@pytest.mark.parametrize("kind", ["by size", "by key"])
@alone_in_virtual_time
async def test_the_codec_of_each_tensor_gets_parts_of_the_size_that_was_asked_for(kind):
    torch.manual_seed(0)
    recorder = Recorder()
    exact = NoCompression()
    codec = {
        "by size": SizeAdaptiveCompression(10_000, exact, recorder),
        "by key": PerTensorCompression([exact, exact, recorder]),
    }[kind]
    tensors = [[torch.randn(100), torch.randn(9_999), torch.randn(20_000)] for _ in range(2)]
    means = [sum(column) / 2 for column in zip(*tensors, strict=True)]
    await average(tensors, compression=codec, part_size_bytes=5_000)
    for each in tensors:
        assert torch.allclose(each[0], means[0], atol=1e-6)
        assert torch.allclose(each[1], means[1], atol=1e-6)
        assert 0 < (each[2] - means[2]).abs().max() < 2
    length = part_length(CompressionInfo.from_tensor(tensors[0][2]), recorder, 5_000)
    rest = 20_000 % length
    assert 20_000 // length >= 4
    # each part is sent by one of the two, and its difference comes back from the other
    assert sorted(recorder.parts) == sorted(2 * [*[(length, length)] * (20_000 // length), (rest, length)])


class Clipped(AdaptiveCompressionBase):
    """A choice of one's own that changes the values before the chosen codec gets them."""

    def __init__(self) -> None:
        self.parts: list[int] = []

    def choose_compression(self, info):
        return NoCompression() if info.descriptor.numel() < 1_000 else Float16Compression()

    def compress(self, tensor, info, allow_inplace=False):
        self.parts.append(tensor.numel())
        return super().compress(tensor.clamp(-1, 1), info, allow_inplace)


@alone_in_virtual_time
async def test_an_adaptive_codec_with_its_own_compress_is_asked_for_every_part():
    codec = Clipped()
    tensors = [[torch.full((100,), value), torch.full((5_000,), value)] for value in (0.5, 3.0)]
    await average(tensors, compression=codec, part_size_bytes=5_000)
    assert sum(codec.parts) >= 2 * 5_100, "all values are sent, and all averages come back"
    assert max(tensor.max() for tensor in tensors[0]) <= 1.51, "no 3 and no difference of more than 1 has arrived"
