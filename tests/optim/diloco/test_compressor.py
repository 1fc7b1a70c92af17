"""Messages: error feedback, of which only messages that have counted change anything; and what they weigh."""

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
    SerializedTensor,
    TopKCompression,
)
from shoal.optim.diloco.fragments import OuterState
from shoal.optim.diloco.messages import Contribution, Effort, default_feedback, discount, usual_staleness
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


def contribution(codec: CompressionBase, feedback: float | None = None) -> Contribution:
    return Contribution(codec, default_feedback(codec) if feedback is None else feedback)


def encoded(codec: CompressionBase, message: torch.Tensor) -> SerializedTensor:
    return codec.compress(message, CompressionInfo.from_tensor(message))


def decoded(codec: CompressionBase, message: torch.Tensor) -> torch.Tensor:
    """What the others read of a message."""
    return codec.extract(encoded(codec, message)).clone()


def send(own: Contribution, wanted: torch.Tensor) -> torch.Tensor:
    """A round in which the message counts; returns what was wanted, with what was left out before."""
    own.error = own.write(wanted)
    return wanted


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
    peers = [contribution(codec), contribution(codec)]
    for of_a, of_b, left_a, left_b, outer in SENT_AND_LEFT[sparse_mean]:
        messages = []
        for own, target, sent, left in zip(peers, (A, B), (of_a, of_b), (left_a, left_b), strict=True):
            model = state.values.clone()
            train(model, target, 2)
            message = send(own, state.values - model)
            messages.append(encoded(codec, message))
            roughly(decoded(codec, message), sent)
            if left is not None:
                roughly(own.error, left)
        mean = mean_of_messages(codec, messages, [1.0, 1.0], sparse_mean=sparse_mean)
        assert mean is not None
        state.step(mean)
        roughly(state.values, outer)


# --- what it promises -------------------------------------------------------------------------------------------------


@every_codec
def test_with_all_of_the_error_nothing_is_lost(codec: CompressionBase) -> None:
    own = contribution(codec, 1.0)
    wanted, sent = torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
    for seed in range(50):
        wanted += difference(seed)
        sent += decoded(codec, send(own, difference(seed)))
    assert own.error is not None
    torch.testing.assert_close(sent + own.error, wanted, rtol=0, atol=1e-6)
    assert own.error.abs().max() < wanted.abs().max()


def test_a_factor_below_one_lets_the_error_fade() -> None:
    codec = TopKCompression()
    own = contribution(codec, 0.5)
    send(own, difference(0))
    assert own.error is not None
    left = own.error.clone()
    second = send(own, difference(1))
    assert torch.equal(second, difference(1) + left * 0.5)
    assert torch.equal(own.error, second - decoded(codec, second))


@every_codec
def test_the_decoded_message_is_known_in_advance(codec: CompressionBase) -> None:
    message, block = difference(0), codec.block
    left = contribution(codec, 1.0).write(message)
    assert block is not None
    parts = [decoded(codec, part) for part in message.split(block * -(-5000 // block))]
    assert len(parts) > 1
    assert left is not None
    assert torch.equal(message - torch.cat(parts), left)


@every_codec
def test_nothing_changes_until_a_message_has_counted(codec: CompressionBase) -> None:
    own = contribution(codec, 0.9)
    send(own, difference(0))
    assert own.error is not None
    before = own.error.clone()
    failed, again = difference(1), difference(1)
    own.write(failed)
    assert torch.equal(own.error, before)
    own.write(again)
    assert torch.equal(again, failed)


@pytest.mark.parametrize(
    "codec", [Blockwise4BitQuantization(), TopKCompression(density=1 / 8)], ids=["4 bits", "sparse"]
)
def test_a_reduced_message_keeps_its_error(codec: CompressionBase) -> None:
    """The others decode a smaller message, whose values are rounded otherwise: they count as parts of what is sent."""
    own, factor = contribution(codec, 1.0), 2**-0.5
    wanted = torch.randn(256, generator=torch.Generator().manual_seed(0))
    message, whole = wanted.clone(), wanted.clone()
    left = own.write(message, factor)
    assert left is not None
    torch.testing.assert_close(message, wanted * factor)
    torch.testing.assert_close(decoded(codec, message) / factor + left, wanted)
    assert not torch.equal(left, own.write(whole)), "it is not what a whole message would have left out"
    assert torch.equal(own.write(wanted.clone(), 0.0), wanted), "nothing was sent"


@pytest.mark.parametrize("codec", ALLOWED[:4], ids=name_of)
def test_without_feedback_no_error_is_kept(codec: CompressionBase) -> None:
    message = difference(0)
    assert contribution(codec).write(message, 0.5) is None
    assert torch.equal(message, difference(0) * 0.5)


def test_factors_that_suit_codecs() -> None:
    assert [default_feedback(codec) for codec in ALLOWED] == [0, 0, 0, 0, 1, 0.95, 0.95]


# --- weights ----------------------------------------------------------------------------------------------------------


def test_the_mean_batch_counts_every_sample_once() -> None:
    """With a small inner rate the weighted mean points where the gradient of all samples does."""
    efforts, rate = [Effort(5, 15), Effort(2, 8)], 1e-4
    deltas = [effort.steps * rate * -target for effort, target in zip(efforts, (A, B), strict=True)]
    weights = [effort.weight("batch") for effort in efforts]
    assert weights == [3.0, 4.0]
    total = sum(weight * delta for weight, delta in zip(weights, deltas, strict=True))
    torch.testing.assert_close(total / rate, -15 * A - 8 * B)
    assert [effort.weight("samples") for effort in efforts] == [15.0, 8.0]


def test_efforts_add_up() -> None:
    assert Effort(2, 8) + Effort(1, 3) - Effort(2, 8) == Effort(1, 3)
    assert Effort().weight("batch") == Effort().weight("samples") == 0


def test_old_work_counts_less() -> None:
    assert [round(discount(usual_staleness, age), 4) for age in range(4)] == [1.0, 0.7071, 0.5774, 0.5]


def test_an_impossible_discount_is_refused() -> None:
    assert discount(lambda versions: 7.0, 0) == 1.0
    with pytest.raises(ValueError, match="for 2 versions it gave 7"):
        discount(lambda versions: 7.0, 2)


# --- the same bits on all machines ------------------------------------------------------------------------------------


def digest() -> str:
    """Of 50 rounds of three peers with each codec: what they send, what they keep, and the outer parameters."""
    found, weights = hashlib.sha256(), [3.0, 1.7, 0.3]
    for codec in ALLOWED:
        state = OuterState(torch.zeros(LENGTH), partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True))
        peers = [contribution(codec, 0.95) for _ in weights]
        for number in range(50):
            messages = []
            for peer, own in enumerate(peers):
                message = send(own, (state.values - difference(peer)) * (0.1 + 0.01 * number))
                messages.append(encoded(codec, message))
            for sparse_mean in ("members", "senders"):
                mean = mean_of_messages(codec, messages, weights, sparse_mean)
                assert mean is not None
                found.update(mean.numpy().tobytes())
            state.step(mean)
        for vector in (state.values, *(own.error for own in peers)):
            assert vector is not None
            found.update(vector.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(300)  # both processes only compute
@pytest.mark.slow_drill
def test_both_torch_paths_make_the_same_rounds() -> None:
    check_same_on_both("tests.optim.diloco.test_compressor")
