"""Nothing from the wire is believed: every decoder refuses bytes and metadata that do not fit."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import CompressionType, SerializedTensor, TensorMetadata, deserialize_torch_tensor
from shoal.compression import serialize_torch_tensor as serialize
from shoal.compression.base import DTYPES, tensor_over
from shoal.compression.serialization import is_sparse

CODES = list(CompressionType)
DENSE = [code for code in CODES if not is_sparse(code)]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("change", [-1, -4, 1, 4000])
def test_truncated_or_oversized_bytes(code, change):
    serialized = serialize(torch.randn(10), code)
    raw = bytes(serialized.buffer)
    raw = raw[:change] if change < 0 else raw + bytes(change)
    with pytest.raises(RuntimeError, match="takes"):
        deserialize_torch_tensor(SerializedTensor(serialized.metadata, raw))


@pytest.mark.parametrize(
    "metadata",
    [
        TensorMetadata(0, "float33", (1,)),
        TensorMetadata(99, "float32", (1,)),
        TensorMetadata(-1, "float32", (1,)),
        TensorMetadata(0, "float32", (-1, -1)),
        TensorMetadata(0, "float32", (2**62, 4)),
        TensorMetadata(0, "float32", (0, 2**62)),
        TensorMetadata(0, "float32", (0, 2**30, 2**30)),
        TensorMetadata(0, "float32", (1,) * 65),
        TensorMetadata(0, "int32", (1,), requires_grad=True),
        *(TensorMetadata(code, "int32", (2,)) for code in range(1, 10)),
    ],
    ids=str,
)
def test_impossible_metadata(metadata):
    with pytest.raises(ValueError):  # noqa: PT011 - each case has its own text
        deserialize_torch_tensor(SerializedTensor(metadata, bytes(4)))


def test_nobody_calculates_with_a_hundred_thousand_dimensions():
    metadata = TensorMetadata(0, "float32", (2**47,) * 100_000)
    with pytest.raises(ValueError, match="has 100000 dimensions, possible are 64"):
        deserialize_torch_tensor(SerializedTensor(metadata, bytes(4)))


@given(
    st.builds(
        TensorMetadata,
        compression=st.integers(-2, 11),
        dtype=st.sampled_from([*DTYPES, "qint8", ""]),
        size=st.lists(st.integers(-1, 6), max_size=4).map(tuple),
        requires_grad=st.booleans(),
    ),
    st.binary(max_size=64),
)
def test_any_metadata_with_any_bytes(metadata, raw):
    try:
        tensor = deserialize_torch_tensor(SerializedTensor(metadata, raw))
    except (ValueError, RuntimeError):
        return
    assert tuple(tensor.shape) == metadata.size
    assert tensor.dtype == DTYPES[metadata.dtype]


@pytest.mark.parametrize("code", DENSE)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    size=st.lists(st.integers(0, 70), max_size=2).map(tuple),
    data=st.data(),
)
def test_any_bytes_of_the_right_number_give_some_tensor(code, dtype, size, data):
    serialized = serialize(torch.zeros(size, dtype=dtype), code)
    raw = data.draw(st.randoms()).randbytes(len(serialized.buffer))
    for memory in (raw, memoryview(b"x" + raw)[1:]):
        tensor = deserialize_torch_tensor(SerializedTensor(serialized.metadata, memory))
        assert (tuple(tensor.shape), tensor.dtype) == (size, dtype)


@pytest.mark.parametrize("code", CODES)
def test_no_memory_is_taken_for_sizes_that_the_bytes_do_not_bear_out(code):
    metadata = TensorMetadata(int(code), "float32", (2**20, 2**25))
    tracemalloc.start()
    try:
        with pytest.raises(RuntimeError, match="takes"):
            deserialize_torch_tensor(SerializedTensor(metadata, bytes(5000)))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("code", CODES)
def test_unaligned_bytes_are_read_alike(code):
    torch.manual_seed(0)
    serialized = serialize(torch.randn(9001), code)
    unaligned = memoryview(bytearray(b"x") + bytes(serialized.buffer))[1:]
    expected = deserialize_torch_tensor(serialized)
    assert torch.equal(deserialize_torch_tensor(SerializedTensor(serialized.metadata, unaligned)), expected)


def test_unaligned_and_read_only_memory_is_copied():
    values = torch.randn(5)
    raw = bytearray(b"x") + bytes(serialize(values).buffer)
    assert torch.equal(tensor_over(memoryview(raw)[1:], torch.float32, (5,)), values)
    read_only = tensor_over(bytes(raw[1:]), torch.float32, (5,))
    read_only.add_(1)
    assert torch.equal(read_only, values + 1)


def test_metadata_travel_in_a_header():
    metadata = serialize(torch.zeros(2, 3)).metadata
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(metadata), type=TensorMetadata) == metadata
