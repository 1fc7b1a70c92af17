"""Error feedback: known numbers, what is sent in the end, and that only messages that have counted change anything."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from shoal.averaging.message_means import mean_of_messages
from shoal.compression import (
    BFloat16Compression,
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TopKCompression,
    Uniform8BitQuantization,
)
from shoal.optim.diloco.contribution import Compressor, Contribution, default_feedback
from shoal.optim.diloco.outer_state import OuterState
from tests.code_paths import check_same_on_both
from tests.compression.codecs import name_of
from tests.optim.diloco.quadratic import A, B, train

ALLOWED: list[CompressionBase] = [
    NoCompression(),
    Float16Compression(),
    BFloat16Compression(),
    BlockwiseQuantization(),
    Blockwise4BitQuantization(),
    TopKCompression(),
    TopKCompression(bits=8),
]
LENGTH = 3 * 4096 + 100

every_codec = pytest.mark.parametrize("codec", ALLOWED, ids=name_of)


def difference(seed: int, length: int = LENGTH) -> torch.Tensor:
    # In float64: in float32 the two code paths of torch draw different numbers.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator, dtype=torch.float64).float() * 1e-2


def sent_by(compressor: Compressor, outgoing: Contribution) -> torch.Tensor:
    return compressor.codec.extract(outgoing.message).clone()


# --- known numbers ----------------------------------------------------------------------------------------------------


def roughly(values: torch.Tensor | None, expected: Sequence[float]) -> None:
    """The known numbers are those of levels that are not rounded to float16."""
    assert values is not None
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float32), rtol=1e-3, atol=1e-3)


SENT_AND_LEFT = {
    "members": [
        ((-0.75, 0), (-2.25, 0), (0, 0), (0, 1.5), (1.5, 0)),
        ((0.375, 0), (0, 2.925), (0, 0), (-1.125, 0), (1.3125, -1.4625)),
        ((0, -1.09687), (-2.33437, 0), (0.234375, 0), (0, 0.403125), (2.47969, -0.914062)),
    ],
    "senders": [
        ((-0.75, 0), (-2.25, 0), (0, 0), (0, 1.5), (1.5, 0)),
        ((0.375, 0), (0, 2.925), (0, 0), (-1.125, 0), (1.125, -2.925)),
        ((0, -2.19375), (-2.475, 0), None, None, (3.6, -0.73125)),
    ],
}
"""What A and B send, what is left of each, and the outer parameters, round by round."""


@pytest.mark.parametrize("sparse_mean", SENT_AND_LEFT)
def test_two_peers_that_send_one_of_two_values(sparse_mean: str) -> None:
    codec = TopKCompression(density=0.5)
    state = OuterState(torch.zeros(2), partial(torch.optim.SGD, lr=1.0))
    compressors = [Compressor(codec, 2), Compressor(codec, 2)]
    for of_a, of_b, left_a, left_b, outer in SENT_AND_LEFT[sparse_mean]:
        messages = []
        for compressor, target, sent, left in zip(compressors, (A, B), (of_a, of_b), (left_a, left_b), strict=True):
            model = state.values.clone()
            train(model, target, 2)
            outgoing = compressor.prepare(state.values - model)
            messages.append(outgoing.message)
            roughly(sent_by(compressor, outgoing), sent)
            compressor.counted(outgoing)
            if left is not None:
                roughly(compressor.error, left)
        mean = mean_of_messages(codec, messages, [1.0, 1.0], sparse_mean=sparse_mean)
        assert mean is not None
        state.step(mean)
        roughly(state.values, outer)


# --- what it promises -------------------------------------------------------------------------------------------------


@every_codec
def test_with_all_of_the_error_nothing_is_lost(codec: CompressionBase) -> None:
    compressor = Compressor(codec, LENGTH, error_feedback=1.0)
    wanted, sent = torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
    for seed in range(50):
        wanted += difference(seed)
        outgoing = compressor.prepare(difference(seed))
        sent += sent_by(compressor, outgoing)
        compressor.counted(outgoing)
    assert compressor.error is not None
    torch.testing.assert_close(sent + compressor.error, wanted, rtol=0, atol=1e-6)
    assert compressor.error.abs().max() < wanted.abs().max()


def test_a_factor_below_one_lets_the_error_fade() -> None:
    compressor = Compressor(TopKCompression(), LENGTH, error_feedback=0.5)
    first = compressor.prepare(difference(0))
    compressor.counted(first)
    assert compressor.error is not None
    left = compressor.error.clone()
    second = compressor.prepare(difference(1))
    assert torch.equal(second.wanted, difference(1) + left * 0.5)
    compressor.counted(second)
    assert torch.equal(compressor.error, second.wanted - sent_by(compressor, second))


@every_codec
def test_the_decoded_message_is_known_in_advance(codec: CompressionBase) -> None:
    compressor = Compressor(codec, LENGTH)
    outgoing = compressor.prepare(difference(0))
    block = codec.block
    assert block is not None
    parts = [
        codec.compress_and_decode(part, CompressionInfo.from_tensor(part))[1]
        for part in outgoing.wanted.split(block * -(-5000 // block))
    ]
    assert len(parts) > 1
    assert torch.equal(torch.cat(parts), sent_by(compressor, outgoing))


@every_codec
def test_nothing_changes_until_a_message_has_counted(codec: CompressionBase) -> None:
    compressor = Compressor(codec, LENGTH, error_feedback=0.9)
    compressor.counted(compressor.prepare(difference(0)))
    assert compressor.error is not None
    before = compressor.error.clone()
    failed = compressor.prepare(difference(1))
    assert torch.equal(compressor.error, before)
    again = compressor.prepare(difference(1))
    assert bytes(again.message.buffer) == bytes(failed.message.buffer)
    assert torch.equal(again.wanted, failed.wanted)


def test_a_lone_peer_loses_nothing() -> None:
    compressor = Compressor(TopKCompression(), LENGTH, error_feedback=1.0)
    first = compressor.prepare(difference(0))
    compressor.counted(first)
    lost = difference(0) - sent_by(compressor, first)
    result = compressor.alone(compressor.prepare(difference(1)))
    assert torch.equal(result, difference(1) + lost)
    assert compressor.error is None


@pytest.mark.parametrize(
    "codec", [Blockwise4BitQuantization(), TopKCompression(density=1 / 8)], ids=["4 bits", "sparse"]
)
def test_a_reduced_message_keeps_its_error(codec: CompressionBase) -> None:
    """The others decode a smaller message, whose values are rounded otherwise: they count as parts of what is sent."""
    compressor, factor = Compressor(codec, 256, 1.0), 2**-0.5
    wanted = torch.randn(256, generator=torch.Generator().manual_seed(0))
    outgoing = compressor.prepare(wanted.clone())
    smaller = compressor.reduced(outgoing, factor)
    assert smaller.wanted is outgoing.wanted
    torch.testing.assert_close(smaller.wanted, wanted * factor)
    assert smaller.message is not None
    decoded = codec.extract(smaller.message)
    compressor.counted(smaller)
    assert compressor.error is not None
    torch.testing.assert_close(decoded / factor + compressor.error, wanted)
    assert not torch.equal(compressor.error, outgoing.left), "it is not what a whole message would have left out"


@pytest.mark.parametrize("codec", ALLOWED[:4], ids=name_of)
def test_without_feedback_no_error_is_kept(codec: CompressionBase) -> None:
    compressor, given = Compressor(codec, LENGTH), difference(0)
    outgoing = compressor.prepare(given)
    assert outgoing.wanted is given
    assert outgoing.left is None
    compressor.counted(outgoing)
    assert compressor.error is None


def test_the_memory_of_the_difference_is_used() -> None:
    compressor, given = Compressor(TopKCompression(), LENGTH), difference(0)
    outgoing = compressor.prepare(given)
    compressor.counted(outgoing)
    assert outgoing.wanted is given
    assert compressor.error is outgoing.left


# --- construction and checkpoints -------------------------------------------------------------------------------------


def test_factors_that_suit_codecs() -> None:
    assert [default_feedback(codec) for codec in ALLOWED] == [0, 0, 0, 0, 1, 0.95, 0.95]
    assert Compressor(TopKCompression(), 5).feedback == 0.95
    assert Compressor(TopKCompression(), 5, 0.0).feedback == 0
    assert Compressor(Float16Compression(), 5, 1.0).feedback == 1


@pytest.mark.parametrize("feedback", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    "codec",
    [
        Uniform8BitQuantization(),
        Quantile8BitQuantization(),
        ScaledFloat16Compression(),
        PerTensorCompression([NoCompression()]),
    ],
    ids=name_of,
)
def test_codecs_without_blocks_are_refused(codec: CompressionBase, feedback: float | None) -> None:
    with pytest.raises(ValueError, match=rf"{name_of(codec)} has no blocks.*use Float16Compression\(\)"):
        Compressor(codec, 5, feedback)


@pytest.mark.parametrize("feedback", [-0.1, 1.1, float("nan")])
def test_factors_that_cannot_be(feedback: float) -> None:
    with pytest.raises(ValueError, match=f"error_feedback must be from 0 to 1, got {feedback}"):
        Compressor(TopKCompression(), 5, feedback)


@pytest.mark.parametrize("given", [torch.zeros(4), torch.zeros(5, 1), torch.zeros(5).half()], ids=str)
def test_differences_that_do_not_fit(given: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="the difference must be 5 float32 values on the CPU, got"):
        Compressor(TopKCompression(), 5).prepare(given)


def test_a_checkpoint_goes_on_where_it_was() -> None:
    first, second = (Compressor(TopKCompression(), LENGTH) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert second.error is None
    first.counted(first.prepare(difference(0)))
    second.load_state_dict({"error": first.state_dict()["error"].double()})
    first.counted(first.prepare(difference(1)))
    second.counted(second.prepare(difference(1)))
    assert first.error is not None
    assert second.error is not None
    assert torch.equal(first.error, second.error)
    second.forget()
    assert second.error is None
    with pytest.raises(ValueError, match="the error must be 5 float32 values"):
        Compressor(TopKCompression(), 5).load_state_dict(first.state_dict())
    without = Compressor(TopKCompression(), LENGTH, error_feedback=0.0)
    without.load_state_dict(first.state_dict())
    assert without.error is None


# --- the same bits on all machines ------------------------------------------------------------------------------------


def digest() -> str:
    """Of 50 rounds of three peers with each codec: what they send, what they keep, and the outer parameters."""
    found, weights = hashlib.sha256(), [3.0, 1.7, 0.3]
    for codec in ALLOWED:
        state = OuterState(torch.zeros(LENGTH), partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))
        compressors = [Compressor(codec, LENGTH, 0.95) for _ in weights]
        for number in range(50):
            messages = []
            for peer, compressor in enumerate(compressors):
                outgoing = compressor.prepare((state.values - difference(peer)) * (0.1 + 0.01 * number))
                messages.append(outgoing.message)
                compressor.counted(outgoing)
            for sparse_mean in ("members", "senders"):
                mean = mean_of_messages(codec, messages, weights, sparse_mean)
                assert mean is not None
                found.update(mean.numpy().tobytes())
            state.step(mean)
        for vector in (state.values, *(compressor.error for compressor in compressors)):
            assert vector is not None
            found.update(vector.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(300)  # both processes only compute
@pytest.mark.slow_drill
def test_both_torch_paths_make_the_same_rounds() -> None:
    check_same_on_both("tests.optim.diloco.test_compressor")
