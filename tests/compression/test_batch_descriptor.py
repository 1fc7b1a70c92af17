"""Descriptions of batches, whose length is still open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.serializer import MSGPackSerializer
from shoal.compression import CompressionType, TensorDescriptor
from shoal.compression.serialization import BatchTensorDescriptor


def test_a_batch_is_described_without_its_length() -> None:
    batch = BatchTensorDescriptor.from_tensor(torch.ones(3, 5, 7, dtype=torch.float16, requires_grad=True))
    assert batch.size == batch.shape == (None, 5, 7)
    assert (batch.dtype, batch.requires_grad, batch.device) == (torch.float16, True, torch.device("cpu"))
    assert isinstance(batch, TensorDescriptor)
    zeros = batch.make_zeros(4)
    assert (zeros.shape, zeros.dtype, zeros.requires_grad) == ((4, 5, 7), torch.float16, True)
    assert batch.make_zeros(2, 3, device="meta").shape == (2, 3, 5, 7)
    assert not batch.make_zeros(2, requires_grad=False).requires_grad
    for size in ([5, 7], (5, 7), torch.Size((5, 7))):
        assert BatchTensorDescriptor(size, dtype=None) == BatchTensorDescriptor(5, 7)
    codes = [
        BatchTensorDescriptor.from_tensor(torch.ones(3, dtype=each), CompressionType.FLOAT16).compression
        for each in (torch.half, torch.int)
    ]
    assert codes == [CompressionType.FLOAT16, CompressionType.NONE]
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
