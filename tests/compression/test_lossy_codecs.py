"""What all lossy codecs promise: shape and type, exact sizes, small errors, defined treatment of what is not finite."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    PerTensorCompression,
    SizeAdaptiveCompression,
    TensorDescriptor,
    deserialize_torch_tensor,
)
from shoal.compression.floating import CHUNK
from tests.compression.codecs import (
    ALL,
    BLOCKWISE,
    CODEBOOK,
    EVERY,
    FLOATING,
    LOSSY,
    SHAPES,
    SHORT,
    SPARSE,
    compressed,
    info_of,
    name_of,
    relative_error,
    restored,
)

ERRORS = {
    "Float16Compression": 1e-7,
    "BFloat16Compression": 4e-6,
    "ScaledFloat16Compression": 1e-7,
    "Uniform8BitQuantization": 5e-4,
    "Quantile8BitQuantization": 7e-4,
    "BlockwiseQuantization": 2.5e-4,
    "Blockwise4BitQuantization": 1e-2,
}
"""Mean squared error on normal values of variance 1, at most."""

every_codec = pytest.mark.parametrize("codec", EVERY, ids=name_of)
every_dense_codec = pytest.mark.parametrize("codec", ALL, ids=name_of)
every_lossy_codec = pytest.mark.parametrize("codec", [*LOSSY, *SPARSE], ids=name_of)
every_dense_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=name_of)
every_quantization = pytest.mark.parametrize("codec", [*CODEBOOK, *BLOCKWISE], ids=name_of)
every_type = pytest.mark.parametrize("dtype", FLOATING, ids=str)


@every_lossy_codec
@every_type
def test_type_shape_and_need_of_gradients_are_restored(codec, dtype):
    for shape, requires_grad in itertools.product(SHAPES, [False, True]):
        tensor = torch.randn(shape).to(dtype).requires_grad_(requires_grad)
        result = restored(codec, tensor)
        assert (result.dtype, result.shape, result.requires_grad) == (dtype, tensor.shape, requires_grad)
        assert result.isfinite().all()


@every_dense_codec
@every_type
def test_sizes_and_ratios_are_exact(codec, dtype):
    for shape in SHAPES:
        tensor = torch.randn(shape).to(dtype)
        info, nbytes = info_of(tensor), len(compressed(codec, tensor))
        assert codec.compressed_nbytes(tensor.shape, info) == nbytes
        before = tensor.numel() * dtype.itemsize
        assert codec.estimate_compression_ratio(info) == (nbytes / before if before else 1.0)


@every_dense_codec
@given(total=st.integers(1, 9000), part_size=st.integers(1, 5000), data=st.data())
def test_sizes_and_ratios_of_parts_are_exact(codec, total, part_size, data):
    tensor = torch.ones(total)
    index = data.draw(st.integers(0, (total - 1) // part_size))
    part = tensor[index * part_size : (index + 1) * part_size]
    info = info_of(tensor).get_part(index, part_size)
    nbytes = len(codec.compress(part, info).buffer)
    assert codec.estimate_compression_ratio(info) == nbytes / (4 * len(part))
    assert codec.compressed_nbytes(part.shape, info) == nbytes


@every_dense_lossy_codec
@every_type
def test_the_error_on_normal_values_is_small(codec, dtype):
    torch.manual_seed(0)
    assert relative_error(codec, torch.randn(100_000).to(dtype)) < ERRORS[name_of(codec)]


@pytest.mark.parametrize("codec", [SHORT[1], *CODEBOOK, *BLOCKWISE], ids=name_of)
@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e-12, 1e-4, 1e4, 1e12, 1e25, 3e37])
def test_the_error_does_not_depend_on_the_scale(codec, scale):
    torch.manual_seed(0)
    tensor = torch.randn(20_000).clamp(-5, 5) * scale
    assert tensor.isfinite().all()
    assert relative_error(codec, tensor) < ERRORS[name_of(codec)]


@every_dense_lossy_codec
@every_type
def test_zeros_stay_zeros_and_equal_values_equal(codec, dtype):
    assert torch.equal(restored(codec, torch.zeros(5000, dtype=dtype)), torch.zeros(5000, dtype=dtype))
    assert torch.equal(restored(codec, torch.full((5000,), -1.5, dtype=dtype)), torch.full((5000,), -1.5, dtype=dtype))


@every_dense_codec
@every_type
@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4099])
def test_tensors_larger_than_what_is_worked_on_at_a_time(codec, dtype, count):
    torch.manual_seed(0)
    tensor = torch.randn(count).to(dtype)
    assert relative_error(codec, tensor) < ERRORS.get(name_of(codec), 1e-30)


@every_codec
def test_a_tensor_that_is_cut_between_blocks_reads_like_the_whole(codec):
    assert (codec.block is None) == (codec in [SHORT[2], *CODEBOOK]), "what depends on the whole tensor"
    if codec.block is None:
        return
    torch.manual_seed(0)
    tensor = torch.randn(CHUNK + 3 * 4096 + 5)
    for length in (codec.block * -(-5000 // codec.block), CHUNK):
        parts = torch.cat([restored(codec, part) for part in tensor.split(length)])
        assert torch.equal(parts, restored(codec, tensor))


@every_codec
def test_memory_order_does_not_matter(codec):
    torch.manual_seed(0)
    tensor = torch.randn(30, 50, 7).transpose(0, 2)
    assert compressed(codec, tensor) == compressed(codec, tensor.contiguous())
    sliced = torch.randn(1000)[::3]
    assert compressed(codec, sliced) == compressed(codec, sliced.clone())
    expanded = torch.randn(3, 1).expand(3, 100)
    assert compressed(codec, expanded) == compressed(codec, expanded.contiguous())


@every_codec
@every_type
def test_the_input_stays_as_it_is(codec, dtype):
    tensor = torch.randn(5000).to(dtype)
    tensor[7], tensor[8] = torch.nan, torch.inf
    before = tensor.clone()
    codec.compress(tensor, info_of(tensor))
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


@every_codec
@every_type
def test_decoded_values_are_those_that_the_receiver_sees(codec, dtype):
    adaptive = SizeAdaptiveCompression(10, codec, codec)
    for shape, each in itertools.product(SHAPES, [codec, adaptive, PerTensorCompression([adaptive])]):
        tensor = torch.randn(shape).to(dtype)
        serialized, decoded = each.compress_and_decode(tensor, info_of(tensor, key=0))
        assert bytes(serialized.buffer) == compressed(codec, tensor)
        assert serialized.metadata == codec.compress(tensor, info_of(tensor)).metadata
        assert torch.equal(decoded, deserialize_torch_tensor(serialized))


@every_dense_lossy_codec
def test_error_feedback_makes_up_for_the_error(codec):
    torch.manual_seed(0)
    wanted, residual, received = torch.randn(5000), torch.zeros(5000), torch.zeros(5000)
    for _ in range(50):
        corrected = wanted + residual
        _, decoded = codec.compress_and_decode(corrected, info_of(corrected))
        residual = corrected - decoded
        received += decoded
    assert (received / 50 - wanted).square().mean() < ERRORS[name_of(codec)] / 10 + 1e-9


# --- what is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", SHORT, ids=name_of)
@every_type
def test_16_bits_keep_nan_and_saturate_infinities(codec, dtype):
    tensor = torch.arange(-4.0, 5.0).to(dtype)
    tensor[[0, 4, 8]] = torch.tensor([-torch.inf, torch.nan, torch.inf], dtype=dtype)
    result = restored(codec, tensor)
    assert result.isnan().tolist() == tensor.isnan().tolist()
    assert torch.allclose(result[1:4], tensor[1:4], rtol=1e-2)
    assert torch.allclose(result[5:8], tensor[5:8], rtol=1e-2)
    assert result[0] < -2.9
    assert result[8] > 2.9
    assert result[[0, 8]].isfinite().all()


def test_16_bits_saturate_at_the_largest_value_of_their_type():
    tensor = torch.tensor([torch.inf, -torch.inf, torch.finfo(torch.float32).max])
    assert restored(SHORT[0], tensor).tolist() == [65504, -65504, 65504]
    largest = torch.finfo(torch.bfloat16).max
    assert restored(SHORT[1], tensor).tolist() == [largest, -largest, largest]


def test_scaled_float16_takes_the_largest_finite_value_of_the_row_for_an_infinity():
    tensor = torch.tensor([[1.0, 2.0, -torch.inf, 3.0], [1e6, 2e6, 3e6, 4e6], [torch.nan, torch.nan, 5.0, 0.0]])
    result = restored(SHORT[2], tensor)
    assert torch.allclose(result[0], torch.tensor([1.0, 2.0, -3.0, 3.0]), rtol=1e-3)
    assert torch.allclose(result[1], tensor[1], rtol=1e-3)
    assert result[2, :2].isnan().all()
    assert torch.allclose(result[2, 2:], tensor[2, 2:], atol=1e-2)


@every_quantization
@pytest.mark.parametrize("count", [10, 5000, CHUNK + 5000])
def test_quantizations_take_0_for_nan_and_the_largest_finite_value_for_infinities(codec, count):
    torch.manual_seed(0)
    values = torch.randn(count, dtype=torch.float64)
    for place in (3, count - 5):
        broken, repaired = values.clone(), values.clone()
        broken[place], repaired[place] = torch.nan, 0.0
        assert compressed(codec, broken) == compressed(codec, repaired)
    start = (count - 1) // 4096 * 4096 if codec in BLOCKWISE and codec.block_size == 4096 else (count - 1) // 64 * 64
    neighbours = repaired[start:] if codec in BLOCKWISE else repaired
    broken[-1], broken[-2] = torch.inf, -torch.inf
    neighbours[-2:] = 0
    largest = neighbours.abs().max().item()
    repaired[-1], repaired[-2] = largest, -largest
    assert compressed(codec, broken) == compressed(codec, repaired)


@every_quantization
@every_type
def test_one_broken_value_does_not_spoil_the_others(codec, dtype):
    torch.manual_seed(0)
    tensor = torch.randn(10_000).to(dtype)
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = tensor.clone()
        broken[5000] = value
        result = restored(codec, broken)
        assert result.isfinite().all()
        result[5000] = tensor[5000]
        assert (result.double() - tensor.double()).square().mean() < ERRORS[name_of(codec)]


@every_quantization
@every_type
def test_tensors_of_broken_values_become_finite(codec, dtype):
    for value in (torch.nan, torch.inf, -torch.inf):
        assert torch.equal(restored(codec, torch.full((100,), value, dtype=dtype)), torch.zeros(100, dtype=dtype))


@every_lossy_codec
@every_type
def test_the_largest_values_stay_finite(codec, dtype):
    largest = torch.finfo(dtype).max
    result = restored(codec, torch.tensor([largest, -largest, 0.0, largest / 2] * 100, dtype=dtype))
    assert result.isfinite().all()


@every_lossy_codec
@every_type
@given(values=st.lists(st.floats(), max_size=200))
@settings(max_examples=min(20, settings().max_examples))  # for each of the codecs and types
def test_any_values(codec, dtype, values):
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    result = restored(codec, tensor)
    if codec in SHORT:
        assert torch.equal(result.isnan(), tensor.isnan())
        assert not result.isinf().any()
    else:
        assert result.isfinite().all()
    serialized, decoded = codec.compress_and_decode(tensor, info_of(tensor))
    assert torch.equal(decoded.nan_to_num(), deserialize_torch_tensor(serialized).nan_to_num())


# --- odds and ends ----------------------------------------------------------------------------------------------------


@every_lossy_codec
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_types_are_refused_with_advice(codec, dtype):
    with pytest.raises(ValueError, match=rf"{name_of(codec)} takes .*float32.* got {dtype}: use NoCompression"):
        compressed(codec, torch.zeros(3).to(dtype))


@every_codec
def test_threads_do_not_get_in_each_others_way(codec):
    torch.manual_seed(0)
    tensors = [torch.randn(100_000 + 7 * index) for index in range(4)]
    expected = [compressed(codec, tensor) for tensor in tensors]
    failures = []
    barrier = threading.Barrier(4)

    def work(index):
        barrier.wait()
        results = [compressed(codec, tensors[index]) for _ in range(10)]
        failures.extend(index for result in results if result != expected[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@every_codec
def test_inference_mode_makes_no_difference(codec):
    torch.manual_seed(0)
    tensor = torch.randn(5000)
    expected, results = compressed(codec, tensor), []

    def work():  # in a thread of its own, which has not compressed anything before
        with torch.inference_mode():
            results.append(compressed(codec, tensor * 1))
        results.append(compressed(codec, tensor))
        results.append(compressed(codec, tensor[:4000]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [expected, expected, compressed(codec, tensor[:4000])]


@every_codec
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_give_the_same_bytes(codec):
    for dtype, shape in itertools.product(FLOATING, SHAPES):
        tensor = torch.randn(shape).to(dtype)
        serialized, decoded = codec.compress_and_decode(tensor.cuda(), info_of(tensor))
        assert bytes(serialized.buffer) == compressed(codec, tensor)
        assert decoded.device.type == "cuda"
        assert torch.equal(decoded.cpu(), restored(codec, tensor))


def test_a_codec_of_ones_own_needs_three_methods():
    class Own(CompressionBase):
        compression_type = NoCompression.compression_type

        def compress(self, tensor, info, allow_inplace=False):
            return NoCompression().compress(tensor, info)

        def extract(self, serialized_tensor):
            return NoCompression().extract(serialized_tensor)

        def estimate_compression_ratio(self, info):
            return 1.0

    codec, tensor = Own(), torch.randn(3)
    assert codec.lossy
    assert codec.compressed_nbytes((3,), info_of(tensor)) is None
    serialized, decoded = codec.compress_and_decode(tensor, info_of(tensor))
    assert torch.equal(decoded, tensor)
    assert torch.equal(codec.extract(serialized), tensor)


def test_part_sizes_that_do_not_divide():
    info = CompressionInfo(0, TensorDescriptor((7, 3)))
    assert info.size == (7, 3)
    assert [info.get_part(index, 8).size for index in range(4)] == [(8,), (8,), (5,), (0,)]
