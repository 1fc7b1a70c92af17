"""Serialized tensors in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import (
    CompressionType,
    SerializedTensor,
    deserialize_tensor_stream,
    deserialize_torch_tensor,
    serialize_torch_tensor,
)
from shoal.compression.serialization import TensorChunk, combine_from_streaming, split_for_streaming


@pytest.mark.parametrize(
    ("values", "chunk_size", "count"), [(0, 100, 1), (1, 100, 1), (25, 100, 1), (26, 100, 2), (250, 100, 10)]
)
def test_a_tensor_goes_into_as_many_pieces_as_it_takes(values: int, chunk_size: int, count: int) -> None:
    tensor = torch.arange(values, dtype=torch.float32)
    serialized = serialize_torch_tensor(tensor)
    chunks = list(split_for_streaming(serialized, chunk_size))
    assert [chunk.chunks for chunk in chunks] == [count] + [0] * (count - 1)
    assert [chunk.metadata for chunk in chunks] == [serialized.metadata] + [None] * (count - 1)
    assert all(len(chunk.buffer) == chunk_size for chunk in chunks[:-1])
    assert torch.equal(deserialize_torch_tensor(combine_from_streaming(chunks)), tensor)


def test_pieces_are_no_copies_and_64_kib_by_default() -> None:
    tensor = torch.zeros(2**18)
    first, *others = split_for_streaming(serialize_torch_tensor(tensor))
    assert len(first.buffer) == 2**16
    assert len(others) == 15
    tensor += 1
    assert torch.frombuffer(bytearray(first.buffer), dtype=torch.float32).eq(1).all()


@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.FLOAT16])
@given(size=st.lists(st.integers(0, 7), max_size=3), chunk_size=st.integers(1, 300))
def test_any_tensor_survives(compression: CompressionType, size: list[int], chunk_size: int) -> None:
    tensor = torch.randn(size)
    serialized = serialize_torch_tensor(tensor, compression)
    combined = combine_from_streaming(split_for_streaming(serialized, chunk_size))
    assert bytes(combined.buffer) == bytes(serialized.buffer)
    assert torch.equal(deserialize_torch_tensor(combined), deserialize_torch_tensor(serialized))


def pieces() -> list[TensorChunk]:
    return list(split_for_streaming(serialize_torch_tensor(torch.arange(100.0)), 100))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda chunks: chunks[:-1], "1 of 4 pieces of a tensor are missing"),
        (lambda chunks: chunks[1:], "first piece"),
        (lambda chunks: chunks + chunks[-1:], "first piece"),
        (lambda chunks: [*chunks[:2], chunks[0]], "2 of 4 pieces"),
        (lambda chunks: chunks * 2, "those of 2"),
        (lambda chunks: [], "those of 0"),
        (lambda chunks: [replace(chunks[0], chunks=0), *chunks[1:]], "first piece"),
    ],
)
def test_missing_and_surplus_pieces_are_noticed(damage: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        combine_from_streaming(damage(pieces()))


def test_a_piece_that_was_cut_off_is_noticed_when_the_tensor_is_restored() -> None:
    first, *others = pieces()
    combined = combine_from_streaming([first, *others[:-1], replace(others[-1], buffer=others[-1].buffer[:-4])])
    with pytest.raises(RuntimeError, match="bytes"):
        deserialize_torch_tensor(combined)


def test_the_size_of_pieces_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_size_bytes"):
        list(split_for_streaming(serialize_torch_tensor(torch.zeros(1)), 0))


async def test_several_tensors_in_one_stream() -> None:
    tensors = [torch.arange(100.0), torch.zeros(0), torch.tensor(7), torch.ones(30, 3)]
    chunks = [chunk for tensor in tensors for chunk in split_for_streaming(serialize_torch_tensor(tensor), 64)]

    async def groups(size: int) -> AsyncIterator[Iterable[TensorChunk]]:
        for start in range(0, len(chunks), size):
            yield iter(chunks[start : start + size])

    for size in (1, 3, 1000):
        restored = await deserialize_tensor_stream(groups(size))
        assert all(map(torch.equal, restored, tensors))
        assert len(restored) == len(tensors)
    chunks.pop()
    with pytest.raises(RuntimeError, match="missing"):
        await deserialize_tensor_stream(groups(3))


def test_serialized_tensors_are_what_is_split() -> None:
    combined = combine_from_streaming(pieces())
    assert isinstance(combined, SerializedTensor)
