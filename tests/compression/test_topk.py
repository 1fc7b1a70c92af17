"""The codec that sends the largest values: its rule, its bytes one by one, and bytes that it cannot have made."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import SerializedTensor, SparseTensor, TopKCompression, deserialize_torch_tensor
from shoal.compression.floating import CHUNK
from tests.code_paths import check_same_on_both
from tests.compression.codecs import EVERY, FLOATING, SPARSE, compressed, info_of, name_of, restored

BLOCK = 4096
EXAMPLE = [0.1, -0.9, 0.3, 0.0, 0.5, -0.2, 1.1, -0.4]

every_sparse_codec = pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: f"{codec.bits} bits")


def sent_of(codec: TopKCompression, tensor: torch.Tensor) -> SparseTensor:
    return codec.extract_sparse(codec.compress(tensor, info_of(tensor)))


def expected(values: list[float], density: float, bits: int) -> dict[int, float]:
    """The rule, as slow and obvious as can be: position and value of all that is sent."""
    sent: dict[int, float] = {}
    for start in range(0, len(values), BLOCK):
        chunk = dict(enumerate(values[start : start + BLOCK], start))
        largest = sorted(chunk, key=lambda index: -abs(chunk[index]))[: max(1, round(density * len(chunk)))]
        kept = {index: min(abs(chunk[index]), 65504) for index in sorted(largest) if abs(chunk[index]) >= 2**-24}
        if not kept:
            continue
        mean = sum(kept.values()) / len(kept)
        high = [value for value in kept.values() if value > mean]
        low = [value for value in kept.values() if not value > mean]
        levels = [sum(each) / max(1, len(each)) for each in (low, high)]
        scale = float(torch.tensor(max(kept.values())).half())
        for index, value in kept.items():
            magnitude = (
                levels[value > mean] if bits == 2 else min(128, max(1, round(value / scale * 128))) / 128 * scale
            )
            sent[index] = magnitude if chunk[index] > 0 else -magnitude
    return sent


def assert_is_expected(codec: TopKCompression, tensor: torch.Tensor) -> None:
    sent, wanted = sent_of(codec, tensor), expected(tensor.tolist(), codec.density, codec.bits)
    assert sent.indices.tolist() == list(wanted)
    # A level is rounded to float16; the smallest ones have few bits.
    torch.testing.assert_close(sent.values, torch.tensor(list(wanted.values())), rtol=5e-4, atol=2**-25)


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_the_example() -> None:
    codec, tensor = TopKCompression(density=0.5), torch.tensor(EXAMPLE)
    wanted = torch.tensor([0, -1, 0, 0, 0.45, 0, 1, -0.45])
    # Ten times as large, both levels are numbers of float16.
    torch.testing.assert_close(restored(codec, 10 * tensor) / 10, wanted, rtol=0, atol=1e-6)
    error = torch.tensor([0.1, 0.1, 0.3, 0, 0.05, -0.2, 0.1, 0.05])
    torch.testing.assert_close(tensor - restored(codec, 10 * tensor) / 10, error, rtol=0, atol=1e-6)
    torch.testing.assert_close(restored(codec, tensor), wanted.half().float(), rtol=0, atol=0)
    assert restored(TopKCompression(0.5, bits=8), torch.tensor([1.0, -0.5, 0.25, 0.1])).tolist() == [1, -0.5, 0, 0]


@every_sparse_codec
@pytest.mark.parametrize("count", [1, 31, 64, 100, 4095, 4096, 4097, 3 * 4096 + 77])
def test_it_sends_what_the_slow_rule_says(codec: TopKCompression, count: int) -> None:
    torch.manual_seed(count)
    for density in (1 / 64, 1 / 3, 0.9, 1.0, 1e-9):
        for tensor in (torch.randn(count), torch.randn(count) ** 9 * 1e-3, torch.randint(-3, 4, (count,)).float()):
            assert_is_expected(TopKCompression(density, codec.bits), tensor)


@every_sparse_codec
@given(
    # Few different ones, so that many are equal.
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-3, 65504.0, 7e4, 2**-24, 2**-25]), max_size=60),
    density=st.floats(0.001, 1),
    repeated=st.integers(1, 150),
)
def test_any_values_by_that_rule(codec: TopKCompression, values: list[float], density: float, repeated: int) -> None:
    assert_is_expected(TopKCompression(density, codec.bits), torch.tensor(values * repeated))


@every_sparse_codec
def test_of_equal_values_those_at_lower_positions_are_sent(codec: TopKCompression) -> None:
    sent = sent_of(codec, torch.full((3 * BLOCK,), -1.5))
    assert sent.indices.view(3, 64).tolist() == [list(range(start, start + 64)) for start in (0, BLOCK, 2 * BLOCK)]
    assert sent.values.unique().tolist() == [-1.5]
    two = torch.zeros(BLOCK)
    two[[4000, 17]], two[[1, 4001]] = 2.0, -2.0
    assert sent_of(TopKCompression(3 / BLOCK, codec.bits), two).indices.tolist() == [1, 17, 4000]


@pytest.mark.parametrize("value", [0.001, 0.1, 1 / 3, 65504.0, 2**-24])
def test_equal_values_whose_mean_is_rounded(value: float) -> None:
    for count in range(1, 65):
        tensor = torch.full((count,), value)
        assert torch.equal(restored(TopKCompression(1.0), tensor), tensor.half().float())


@every_sparse_codec
def test_what_is_sent_is_never_zero(codec: TopKCompression) -> None:
    tensor = torch.zeros(2 * BLOCK + 5)
    assert compressed(codec, tensor) == bytes(6), "a chunk that sends nothing takes two bytes"
    tensor[BLOCK + 7], tensor[BLOCK + 8] = 1e-3, -1e-8
    sent = sent_of(codec, tensor)
    assert sent.indices.tolist() == [BLOCK + 7]
    torch.manual_seed(0)
    assert bool((sent_of(codec, torch.randn(50_000) ** 15 * 1e-5).values != 0).all())


@every_sparse_codec
def test_values_that_are_not_finite_spoil_nothing(codec: TopKCompression) -> None:
    torch.manual_seed(0)
    broken, repaired = torch.randn(3 * BLOCK), torch.zeros(0)
    broken[100], broken[BLOCK + 3], broken[BLOCK + 9] = torch.nan, torch.inf, -torch.inf
    repaired = broken.nan_to_num(0.0, 0.0, 0.0)
    largest = repaired[BLOCK : 2 * BLOCK].abs().max()
    repaired[BLOCK + 3], repaired[BLOCK + 9] = largest, -largest
    assert compressed(codec, broken) == compressed(codec, repaired)
    assert restored(codec, torch.tensor([1e30, -1e38, 3.0, 1e5])).abs().max() == 65504
    assert restored(codec, torch.tensor([-1e300], dtype=torch.float64)).tolist() in ([-65504.0], [0.0])


@every_sparse_codec
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_whole_tensors_are_zero_where_nothing_was_sent(codec: TopKCompression, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(2, CHUNK + 77).to(dtype)
    serialized = codec.compress(tensor, info_of(tensor))
    sent, whole = codec.extract_sparse(serialized), deserialize_torch_tensor(serialized)
    assert torch.equal(whole.flatten()[sent.indices], sent.values.to(dtype))
    assert whole.count_nonzero() == len(sent.indices)
    assert torch.equal(sent.dense(dtype), whole)
    # As if all chunks had come alone.
    last = tensor.flatten()[-(tensor.numel() % BLOCK) :]
    assert torch.equal(whole.flatten()[-len(last) :], restored(codec, last))


@every_sparse_codec
def test_what_was_decoded_is_encoded_to_the_same_values(codec: TopKCompression) -> None:
    torch.manual_seed(0)
    for density in (1 / 64, 1.0):
        dense = TopKCompression(density, codec.bits)
        once = restored(dense, torch.randn(20_000))
        assert torch.equal(restored(dense, once), once)


# --- bytes ------------------------------------------------------------------------------------------------------------


def packed(*sections: bytes | str) -> bytes:
    return b"".join(bytes.fromhex(each) if isinstance(each, str) else each for each in sections)


def test_bytes_of_two_bits() -> None:
    tensor = torch.zeros(2 * BLOCK + 3)
    tensor[[0x123, 0xABC, 0xFFF]] = torch.tensor([1.0, -3.0, 2.0])  # mean 2: low 1.5, high 3
    tensor[2 * BLOCK + 2] = -0.5
    assert compressed(TopKCompression(), tensor) == packed(
        struct.pack("<3H", 3, 0, 1),
        struct.pack("<4e", 1.5, 3.0, 0.5, 0.5),
        "23 c1 ab  ff 2f 00",  # 0x123, 0xabc; 0xfff, 2
        bytes([0b00 | 0b11 << 2 | 0b00 << 4 | 0b10 << 6]),
    )


def test_bytes_of_eight_bits() -> None:
    tensor = torch.zeros(2 * BLOCK + 3)
    tensor[[0x123, 0xABC, 0xFFF]] = torch.tensor([1.0, -4.0, 0.001])
    assert compressed(TopKCompression(bits=8), tensor) == packed(
        struct.pack("<3H", 3, 0, 0),
        struct.pack("<e", 4.0),
        "23 c1 ab  ff 0f",
        bytes([31, 128 + 127, 0]),  # 32/128, -128/128; what would be 0 is 1/128
    )


@every_sparse_codec
@pytest.mark.parametrize("count", [0, 1, 64, 4095, 4096, 10_000, CHUNK + 5])
def test_the_number_of_bytes(codec: TopKCompression, count: int) -> None:
    torch.manual_seed(0)
    for density in (1 / 64, 1 / 7, 1.0):
        dense, tensor = TopKCompression(density, codec.bits), torch.randn(count)
        assert dense.compressed_nbytes(tensor.shape, info_of(tensor)) is None
        ratio = dense.estimate_compression_ratio(info_of(tensor))
        assert ratio == (len(compressed(dense, tensor)) / tensor.nbytes if count else 1.0)


def test_bits_per_value() -> None:
    torch.manual_seed(0)
    assert 8 * len(compressed(TopKCompression(), torch.randn(100 * BLOCK))) / (100 * BLOCK) == 0.23046875
    assert 8 * len(compressed(TopKCompression(bits=8), torch.randn(100 * BLOCK))) / (100 * BLOCK) == 0.3203125


def test_any_density_can_be_read() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(10_000)
    serialized = TopKCompression(1 / 3).compress(tensor, info_of(tensor))
    assert torch.equal(TopKCompression().extract(serialized), TopKCompression(1 / 3).extract(serialized))
    with pytest.raises(ValueError, match=r"codec 8.* cannot be read by TopKCompression \(9\)"):
        TopKCompression(bits=8).extract(serialized)


@pytest.mark.parametrize("density", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_impossible_densities(density: float) -> None:
    with pytest.raises(ValueError, match=f"density must be above 0 and at most 1, got {density}: 1/64 sends one"):
        TopKCompression(density)


def test_impossible_bits() -> None:
    with pytest.raises(ValueError, match="bits must be 2 or 8, got 4"):
        TopKCompression(bits=4)


# --- bytes that nobody can have made ----------------------------------------------------------------------------------


def hostile(raw: bytes, count: int = BLOCK + 10, bits: int = 2) -> SerializedTensor:
    serialized = TopKCompression(bits=bits).compress(torch.zeros(count), info_of(torch.zeros(count)))
    return replace(serialized, buffer=raw)


LEVELS = struct.pack("<2e", 1.0, 2.0)
HOSTILE = {
    "nothing": (b"", "takes at least 4 bytes, got 0"),
    "no counts": (bytes(3), "takes at least 4 bytes, got 3"),
    "too many bytes": (bytes(5), "takes 4 bytes, got 5"),
    "all counts, no values": (b"\xff" * 4, "takes 229385 bytes, got 4"),
    "a missing byte": (packed(struct.pack("<2H", 1, 0), LEVELS, "05 00"), "takes 11 bytes, got 10"),
    "twice the same": (packed(struct.pack("<2H", 2, 0), LEVELS, "05 50 00", "00"), "do not ascend"),
    "descending": (packed(struct.pack("<2H", 2, 0), LEVELS, "05 40 00", "00"), "do not ascend"),
    "beyond the end": (packed(struct.pack("<2H", 0, 1), LEVELS, "0a 00", "00"), "beyond its end"),
    "level of 0": (packed(struct.pack("<2H", 1, 0), struct.pack("<2e", 0.0, 2.0), "05 00", "00"), "positive finite"),
    "infinite level": (packed(struct.pack("<2H", 1, 0), "003c 007c", "05 00", "00"), "positive finite"),
    "no number": (packed(struct.pack("<2H", 1, 0), "003c 017e", "05 00", "00"), "positive finite"),
    "negative level": (packed(struct.pack("<2H", 1, 0), "003c 00bc", "05 00", "00"), "positive finite"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes(case: str) -> None:
    raw, words = HOSTILE[case]
    with pytest.raises(RuntimeError, match=words):
        deserialize_torch_tensor(hostile(raw))


def test_more_values_than_a_chunk_has() -> None:
    """They cannot all ascend."""
    count = BLOCK + 1
    raw = packed(struct.pack("<2H", count, 0), LEVELS, bytes(-(-count * 3 // 2)), bytes(-(-count // 4)))
    with pytest.raises(RuntimeError, match="do not ascend"):
        deserialize_torch_tensor(hostile(raw))


def test_surplus_bits_are_ignored() -> None:
    raw = packed(struct.pack("<2H", 1, 0), LEVELS, "05 f0", "fd")
    assert TopKCompression().extract_sparse(hostile(raw)).values.tolist() == [2.0]


@every_sparse_codec
@given(data=st.data(), count=st.sampled_from([5, BLOCK, 2 * BLOCK + 100]))
def test_changed_bytes_are_refused_or_give_some_tensor(codec: TopKCompression, data: st.DataObject, count: int) -> None:
    tensor = torch.linspace(-1, 2, count)
    raw = bytearray(compressed(codec, tensor))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = deserialize_torch_tensor(hostile(bytes(raw), count, codec.bits))
    except RuntimeError:
        return
    assert result.shape == (count,)
    assert result.isfinite().all()


# --- the same bits on all machines ------------------------------------------------------------------------------------


def digest() -> str:
    """Of what codecs with blocks send and read."""
    found = hashlib.sha256()
    codecs = [codec for codec in EVERY if codec.block is not None]
    for codec in [*codecs, TopKCompression(1 / 5), TopKCompression(1 / 5, bits=8)]:
        for dtype in FLOATING:
            generator = torch.Generator().manual_seed(0)
            tensor = (torch.randn(CHUNK + 12_345, generator=generator, dtype=torch.float64) * 1e-3).to(dtype)
            serialized, decoded = codec.compress_and_decode(tensor, info_of(tensor))
            found.update(bytes(serialized.buffer))
            found.update(decoded.view(torch.uint8).numpy().tobytes())
        found.update(name_of(codec).encode())
    return found.hexdigest()


@pytest.mark.slow_drill
@pytest.mark.timeout(300)  # both processes only compute
def test_both_code_paths_of_torch_send_and_read_the_same_bits() -> None:
    check_same_on_both("tests.compression.test_topk")
