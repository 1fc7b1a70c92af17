"""Cutting tensors into parts."""

from __future__ import annotations

import random

import pytest
import torch

from shoal.averaging.round.parts import RoundVector, load_balance_peers, split_into_parts
from shoal.compression import (
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)

SHAPES = [
    [()],
    [(0,)],
    [(3,), (0, 4), (), (128, 7), (1,)],
    [(1,)] * 20,
    [(10_000,), (33, 5)],
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("part_size_bytes", [1, 19, 256, 2**19])
@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_every_value_is_in_exactly_one_part(shapes, part_size_bytes, members):
    rng = random.Random(members)
    infos = [CompressionInfo.from_tensor(torch.zeros(shape), key=i) for i, shape in enumerate(shapes)]
    total = sum(info.descriptor.numel() for info in infos)
    shares = load_balance_peers(total, [rng.uniform(0.1, 1) for _ in range(members)])
    parts = split_into_parts(infos, NoCompression(), part_size_bytes, shares)
    seen = [(index, value) for part in parts for index, start, stop in part.segments for value in range(start, stop)]
    assert seen == [(i, value) for i, info in enumerate(infos) for value in range(info.descriptor.numel())]
    assert all(part.length * 4 <= max(4, part_size_bytes) for part in parts)
    assert all(shares[part.reducer] > 0 for part in parts)


def test_parts_go_to_whoever_owns_most_of_them():
    info = CompressionInfo.from_tensor(torch.zeros(100), key=0)
    parts = split_into_parts([info], NoCompression(), 40, (14, 36, 0, 50))
    assert [part.reducer for part in parts] == [0, 1, 1, 1, 1, 3, 3, 3, 3, 3]


def test_parts_of_compressed_tensors_hold_more_values():
    info = CompressionInfo.from_tensor(torch.zeros(100), key=0)
    parts = split_into_parts([info], Float16Compression(), 40, (100,))
    assert [part.length for part in parts] == [20] * 5
    assert [part.info.part_index for part in parts] == list(range(5))
    assert parts[0].info.part_size == 20


class OfMyOwn(NoCompression):
    """May look at the tensor as a whole."""


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (NoCompression(), [[0, 1], [1, 2], [3]]),
        (Float16Compression(), [[0, 1, 2], [3]]),
        (Uniform8BitQuantization(), [[0], [1], [2], [3]]),
        (OfMyOwn(), [[0], [1], [2], [3]]),
        (SizeAdaptiveCompression(2400, NoCompression(), Uniform8BitQuantization()), [[0, 2], [1], [3]]),
        (PerTensorCompression([Float16Compression() for _ in range(4)]), [[0, 1, 2], [3]]),
        (
            PerTensorCompression([Float16Compression(), NoCompression(), *[Float16Compression()] * 2]),
            [[0, 2], [1], [3]],
        ),
    ],
)
def test_tensors_whose_values_are_encoded_one_by_one_are_cut_as_one(codec, expected):
    tensors = [torch.zeros(2000), torch.zeros(50, 50), torch.zeros(300), torch.zeros(3000, dtype=torch.float16)]
    infos = [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
    parts = split_into_parts(infos, codec, 12_000, (7800,))
    assert [[index for index, _, _ in part.segments] for part in parts] == expected
    assert all(part.info.size == (part.length,) for part in parts)


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        (10, {0: [10]}),
        (10_000, {0: [4096], 2: [4096, 1808]}),
        (80_000, {0: [10_000] * 4, 2: [10_000] * 4}),
        (800_000, {0: [100_000] * 4, 2: [100_000] * 4}),
        (2**20, {0: [2**17] * 4, 2: [2**17] * 4}),
        (2**21, {0: [2**17] * 8, 2: [2**17] * 8}),
    ],
)
def test_members_reduce_as_much_as_they_should_also_of_small_vectors(values, lengths):
    info = CompressionInfo.from_tensor(torch.zeros(values), key=0)
    parts = split_into_parts([info], NoCompression(), 2**19, (values // 2, 0, values // 2))
    found = {}
    for part in parts:
        found.setdefault(part.reducer, []).append(part.length)
    assert found == lengths


def test_tensors_of_several_roles_are_not_cut_as_one():
    roles = [TensorRole.PARAMETER, TensorRole.GRADIENT, TensorRole.PARAMETER]
    infos = [CompressionInfo.from_tensor(torch.zeros(2), key=i, role=role) for i, role in enumerate(roles)]
    parts = split_into_parts(infos, Float16Compression(), 2**19, (6,))
    assert [(part.info.role, [index for index, _, _ in part.segments]) for part in parts] == [
        (TensorRole.PARAMETER, [0, 2]),
        (TensorRole.GRADIENT, [1]),
    ]


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_averages_reach_every_tensor(is_delta, alpha):
    tensors = [torch.arange(3.0), torch.tensor(7.0), torch.zeros(0), torch.arange(8.0).view(2, 4)]
    before = [tensor.clone() for tensor in tensors]
    infos = [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
    vector = RoundVector(tensors, infos, NoCompression(), 20, [12], alpha)
    assert [part.length for part in vector.parts[0]] == [5, 5, 2]
    values = [vector.values(part) for part in vector.parts[0]]
    assert torch.cat(values).tolist() == torch.cat([tensor.flatten() for tensor in tensors]).tolist()
    for index, each in enumerate(values):
        vector.take(0, index, torch.ones_like(each) if is_delta else each + 1, is_delta=is_delta)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old + alpha)
    assert vector.share_averaged == 1
