"""Cutting tensors into parts."""

from __future__ import annotations

import random

import pytest
import torch

from shoal.averaging.load_balancing import load_balance_peers
from shoal.averaging.partition import split_into_parts
from shoal.compression import CompressionInfo, Float16Compression, NoCompression

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
    seen = [(part.tensor_index, value) for part in parts for value in range(part.start, part.stop)]
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
