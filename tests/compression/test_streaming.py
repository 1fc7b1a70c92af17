"""Serialized tensors in pieces, and descriptions of batches."""

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
    TensorDescriptor,
    deserialize_torch_tensor,
    serialize_torch_tensor,
)
from shoal.compression.batch_descriptor import BatchTensorDescriptor
from shoal.compression.streaming import (
    TensorChunk,
    combine_from_streaming,
    deserialize_tensor_stream,
    split_for_streaming,
)
from shoal.serializer import MSGPackSerializer


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


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_described_without_its_length() -> None:
    batch = BatchTensorDescriptor.from_tensor(torch.ones(3, 5, 7, dtype=torch.float16, requires_grad=True))
    assert batch.size == batch.shape == (None, 5, 7)
    assert (batch.dtype, batch.requires_grad, batch.device) == (torch.float16, True, torch.device("cpu"))
    assert isinstance(batch, TensorDescriptor)
    zeros = batch.make_zeros(4)
    assert (zeros.shape, zeros.dtype, zeros.requires_grad) == ((4, 5, 7), torch.float16, True)
    assert batch.make_zeros(2, 3, device="meta").shape == (2, 3, 5, 7)
    with pytest.raises(ValueError, match="length"):
        batch.numel()
    with pytest.raises(AssertionError, match="size of the batch"):
        batch.make_zeros()


@given(
    size=st.lists(st.integers(0, 2**40), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    device=st.sampled_from([None, "cpu", "cuda:3", "meta"]),
    flags=st.tuples(st.booleans(), st.booleans()),
    compression=st.sampled_from(CompressionType),
)
def test_descriptions_of_batches_travel(size: Any, dtype: Any, device: Any, flags: Any, compression: Any) -> None:
    batch = BatchTensorDescriptor(
        *size,
        dtype=dtype,
        device=None if device is None else torch.device(device),
        requires_grad=flags[0],
        pin_memory=flags[1],
        compression=compression,
    )
    packed = MSGPackSerializer.dumps(batch)
    assert packed[1 if packed[0] in range(0xD4, 0xD9) else 2] == 0x51
    assert MSGPackSerializer.loads(packed) == batch
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps([batch, {"x": (batch,)}]))[1]["x"][0] == batch
    assert batch != TensorDescriptor((None, *size))  # type: ignore[arg-type]


def test_what_cannot_travel_is_told() -> None:
    for field in ({"layout": torch.sparse_coo}, {"dtype": torch.quint8}):
        with pytest.raises(ValueError, match="be sent"):
            MSGPackSerializer.dumps(BatchTensorDescriptor(3, **field))


VALID = [[3, 4], "float32", "cpu", False, False, 0]


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("wrong", [None, -1, 99, "os.system", [-1], [2**60], ["3"], [0] * 64, {}, b"cpu", 1.5])
def test_hostile_descriptions_are_refused(position: int, wrong: Any) -> None:
    content = [*VALID[:position], wrong, *VALID[position + 1 :]]
    if (position, wrong) == (2, None):
        assert BatchTensorDescriptor.unpackb(MSGPackSerializer.dumps(content)).device is None
        return
    with pytest.raises(ValueError, match=r"description|device|valid CompressionType"):
        BatchTensorDescriptor.unpackb(MSGPackSerializer.dumps(content))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_with_a_value_error(data: bytes) -> None:
    try:
        BatchTensorDescriptor.unpackb(data)
    except ValueError:
        return
    assert data


def test_serialized_tensors_are_what_is_split() -> None:
    combined = combine_from_streaming(pieces())
    assert isinstance(combined, SerializedTensor)
