"""Codecs work in the host's memory, whatever ``torch.set_default_device`` says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.compression import Blockwise4BitQuantization, BlockwiseQuantization, CompressionBase, quantization
from tests.compression.codecs import EVERY, FLOATING, name_of, restored

TABLES = [
    BlockwiseQuantization.table,
    Blockwise4BitQuantization.table,
    quantization.pairs_of_levels,
    quantization.cell_values,
]


@pytest.mark.parametrize("codec", EVERY, ids=name_of)
def test_the_default_device_is_no_matter(codec: CompressionBase) -> None:
    given = [torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype) for dtype in FLOATING]
    given += [tensor[:0] for tensor in given] + [tensor[0] for tensor in given]
    expected = [restored(codec, tensor) for tensor in given]
    for table in TABLES:
        table.cache_clear()

    def in_a_new_thread() -> list[torch.Tensor]:  # which has no memory for intermediate results yet
        with torch.device("meta"):  # what is made there has no values
            return [restored(codec, tensor) for tensor in given]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(in_a_new_thread).result()
    assert all(map(torch.equal, found, expected))
