"""Codecs restore what they promise, without copies where none is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import (
    CompressionType,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    TensorDescriptor,
    TensorRole,
    TopKCompression,
    base,
    deserialize_torch_tensor,
    serialize_torch_tensor,
)
from shoal.compression.adaptive import AdaptiveCompressionBase
from shoal.compression.base import DTYPES
from shoal.compression.serialization import codec_of
from tests.compression.codecs import info_of

SHAPES = [(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_no_compression_is_exact_for_every_type(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    codec = NoCompression()
    serialized = codec.compress(tensor, info_of(tensor))
    assert len(serialized.buffer) == codec.compressed_nbytes(shape, info_of(tensor))
    restored = deserialize_torch_tensor(serialized)
    assert restored.dtype == dtype
    assert restored.shape == tensor.shape
    assert torch.equal(restored, tensor)


def test_no_compression_copies_nothing():
    tensor = torch.randn(1000)
    serialized = serialize_torch_tensor(tensor)
    restored = deserialize_torch_tensor(serialized)
    assert np.frombuffer(serialized.buffer, dtype=np.uint8).ctypes.data == tensor.data_ptr() == restored.data_ptr()


@pytest.mark.parametrize("legacy", [False, True])
def test_bfloat16_travels_as_float32_or_as_it_is(legacy, monkeypatch):
    monkeypatch.setattr(base, "USE_LEGACY_BFLOAT16", legacy)
    tensor = torch.randn(7, 3).bfloat16()
    codec, info = NoCompression(), info_of(tensor)
    serialized = serialize_torch_tensor(tensor)
    assert len(serialized.buffer) == tensor.numel() * (4 if legacy else 2) == codec.compressed_nbytes((7, 3), info)
    assert codec.estimate_compression_ratio(info) == (2.0 if legacy else 1.0)
    fingerprint = codec.fingerprint
    monkeypatch.setattr(base, "USE_LEGACY_BFLOAT16", not legacy)
    assert codec.fingerprint != fingerprint, "peers that differ must not average together"
    restored = deserialize_torch_tensor(serialized)  # whichever way this peer sends
    assert restored.dtype == torch.bfloat16
    assert torch.equal(restored, tensor)


def test_the_environment_tells_how_bfloat16_travels():
    script = """if True:
        import importlib, os
        from shoal.compression import base

        print(base.USE_LEGACY_BFLOAT16)
        for value in ("", "1", "0", "False"):
            os.environ["USE_LEGACY_BFLOAT16"] = value
            print(importlib.reload(base).USE_LEGACY_BFLOAT16)
    """
    environment = {name: text for name, text in os.environ.items() if name != "USE_LEGACY_BFLOAT16"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False", "True", "False", "False"]


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        (CompressionType.NONE, 0),
        (CompressionType.FLOAT16, 5e-8),
        (CompressionType.MEANSTD_16BIT, 5e-8),
        (CompressionType.BFLOAT16, 4e-6),
        (CompressionType.UNIFORM_8BIT, 8e-4),
        (CompressionType.QUANTILE_8BIT, 8e-4),
        (CompressionType.BLOCKWISE_8BIT, 8e-4),
        (CompressionType.BLOCKWISE_4BIT, 1e-2),
    ],
)
def test_errors_on_normal_values(code, limit):
    torch.manual_seed(0)
    for size in ((128, 128, 64), (16, 768)):
        tensor = torch.randn(size)
        restored = deserialize_torch_tensor(serialize_torch_tensor(tensor, code))
        assert (restored - tensor).square().mean() <= limit
        zeros = deserialize_torch_tensor(serialize_torch_tensor(torch.zeros(size), code))
        assert zeros.isfinite().all()


def test_codes_are_those_of_the_wire():
    assert CompressionType.values() == list(range(11))
    assert CompressionType.Name(5) == "BLOCKWISE_8BIT"
    for code in CompressionType:
        assert codec_of(code).compression_type is code
        assert codec_of(code).fingerprint.startswith(code.name)
    with pytest.raises(ValueError, match="unknown compression code 11"):
        codec_of(11)


def test_strided_and_conjugated_tensors_keep_their_values():
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(deserialize_torch_tensor(serialize_torch_tensor(strided)), strided)
    conjugated = torch.randn(4, dtype=torch.complex64).conj()
    assert torch.equal(deserialize_torch_tensor(serialize_torch_tensor(conjugated)), conjugated)


def test_float16_error_is_small_on_normal_values_and_clamped_at_the_ends():
    torch.manual_seed(0)
    tensor = torch.randn(10_000)
    restored = deserialize_torch_tensor(serialize_torch_tensor(tensor, CompressionType.FLOAT16))
    assert (restored - tensor).square().mean() < 5e-8
    large = torch.tensor([1e30, -torch.inf, 0.0])
    assert deserialize_torch_tensor(serialize_torch_tensor(large, CompressionType.FLOAT16)).tolist() == [
        65504,
        -65504,
        0,
    ]


def test_only_dense_cpu_tensors_of_known_types():
    with pytest.raises(ValueError, match="dense"):
        serialize_torch_tensor(torch.eye(3).to_sparse())
    with pytest.raises(AssertionError, match="CPU"):
        serialize_torch_tensor(torch.zeros(3, device="meta"))


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=50))
def test_round_trip_of_any_values(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(deserialize_torch_tensor(serialize_torch_tensor(tensor)), tensor)
    halved = deserialize_torch_tensor(serialize_torch_tensor(tensor, CompressionType.FLOAT16))
    assert torch.equal(halved, tensor.clamp(-65504, 65504).half().float())


def test_ratio_is_that_of_the_bytes():
    tensor = torch.zeros(8, dtype=torch.float64)
    assert NoCompression().estimate_compression_ratio(info_of(tensor)) == 1.0
    assert Float16Compression().estimate_compression_ratio(info_of(tensor)) == 0.25


def test_choice_by_size_of_the_whole_tensor():
    codec = SizeAdaptiveCompression(10, NoCompression(), Float16Compression())
    whole = torch.zeros(12)
    part = info_of(whole).get_part(3, 4)
    assert codec.compress(whole[:4], part).metadata.compression == CompressionType.FLOAT16
    assert codec.compress(torch.zeros(9), info_of(torch.zeros(9))).metadata.compression == CompressionType.NONE
    assert codec.compressed_nbytes([4], part) == 8
    assert codec.lossy


def test_choice_by_role_and_by_key():
    by_role = RoleAdaptiveCompression(gradient=Float16Compression())
    tensor = torch.zeros(3)
    assert isinstance(by_role.choose_compression(info_of(tensor, role=TensorRole.GRADIENT)), Float16Compression)
    assert isinstance(by_role.choose_compression(info_of(tensor)), NoCompression)
    by_key = PerTensorCompression([NoCompression(), Float16Compression()])
    serialized = by_key.compress(tensor, info_of(tensor, key=1))
    assert serialized.metadata.compression == CompressionType.FLOAT16
    assert torch.equal(by_key.extract(serialized), tensor)


class HalfForMatrices(AdaptiveCompressionBase):
    """As users write one: with nothing but the choice."""

    def choose_compression(self, info):
        return Float16Compression() if len(info.descriptor.size) > 1 else NoCompression()


def test_a_choice_of_ones_own():
    codec = HalfForMatrices()
    matrix, vector = torch.randn(2, 3), torch.randn(3)
    assert codec.compress(matrix, info_of(matrix)).metadata.compression == CompressionType.FLOAT16
    assert codec.compress(vector, info_of(vector)).metadata.compression == CompressionType.NONE
    assert isinstance(codec.for_tensor(info_of(vector)), NoCompression)
    assert codec.lossy, "what is chosen for other tensors is not known"
    assert codec.fingerprint == HalfForMatrices().fingerprint != type("Other", (HalfForMatrices,), {})().fingerprint
    serialized, decoded = codec.compress_and_decode(matrix, info_of(matrix))
    assert torch.equal(codec.extract(serialized), decoded)


def test_fingerprints_tell_codecs_apart():
    plain, half = NoCompression(), Float16Compression()
    codecs = [
        plain,
        half,
        SizeAdaptiveCompression(10, plain, half),
        SizeAdaptiveCompression(11, plain, half),
        RoleAdaptiveCompression(gradient=half),
        RoleAdaptiveCompression(parameter=half),
        PerTensorCompression([plain, half]),
        PerTensorCompression({0: half, 1: plain}),
        TopKCompression(),
        TopKCompression(1 / 32),
        TopKCompression(bits=8),
    ]
    assert len({codec.fingerprint for codec in codecs}) == len(codecs)
    assert PerTensorCompression([plain]).fingerprint == PerTensorCompression({0: NoCompression()}).fingerprint
    assert not PerTensorCompression([plain]).lossy
    assert PerTensorCompression([plain, TopKCompression()]).sparse
    assert not PerTensorCompression([plain, half]).sparse


def test_descriptor_makes_zeros_alike():
    tensor = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    zeros = TensorDescriptor.from_tensor(tensor).make_zeros()
    assert (zeros.shape, zeros.dtype, zeros.requires_grad) == (tensor.shape, tensor.dtype, True)
    assert zeros.abs().sum() == 0


@pytest.mark.parametrize("piece_bytes", [base.COPY_BYTES, 64])
def test_copies_of_a_state_are_its_own(monkeypatch, piece_bytes):
    monkeypatch.setattr(base, "COPY_BYTES", piece_bytes)
    tensors = [torch.randn(1000), torch.randn(30, 20).T, torch.tensor(3), torch.zeros(0), torch.ones(7).double()]
    tensors += [torch.randn(50, requires_grad=True), torch.randn(100)[::2]]
    copies = base.copies_of(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
        assert not copy.requires_grad
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
        assert torch.equal(copy, tensor)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1, "their memory comes and goes as a whole"
    assert base.copies_of([]) == []
