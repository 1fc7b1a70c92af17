"""The mean of messages that are passed on: against the slow sum, over those who have sent a value or over everybody."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.averaging.message_means import SPARSE_MEANS, mean_of_messages
from shoal.compression import CompressionBase, SerializedTensor, TopKCompression
from tests.compression.codecs import EVERY, SPARSE, info_of, name_of

every_mean = pytest.mark.parametrize("sparse_mean", SPARSE_MEANS)


def messages_of(codec: CompressionBase, tensors: list[torch.Tensor]) -> list[SerializedTensor]:
    return [codec.compress(tensor, info_of(tensor)) for tensor in tensors]


def tensors_of(count: int, size: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(count)
    common = torch.randn(size)  # so that peers send some values together
    return [common + torch.randn(size) / 2 for _ in range(count)]


@every_mean
@pytest.mark.parametrize("codec", EVERY, ids=name_of)
@pytest.mark.parametrize("size", [(10_000,), (2, 3000), (), (0,)], ids=str)
def test_against_the_slow_sum(codec: CompressionBase, size: tuple[int, ...], sparse_mean: str) -> None:
    messages = messages_of(codec, tensors_of(4, size))
    weights = [3.0, 0.0, 1.5, 0.5]
    decoded = [codec.extract(message).double() for message in messages]
    sums = sum(w * values for w, values in zip(weights, decoded, strict=True))
    shares = torch.full(size, sum(weights), dtype=torch.float64)
    if codec.sparse and sparse_mean == "senders":
        sent = sum(w * (values != 0).double() for w, values in zip(weights, decoded, strict=True))
        shares = torch.as_tensor(sent).masked_fill_(torch.as_tensor(sent) == 0, 1)
    mean = mean_of_messages(codec, messages, weights, sparse_mean)
    assert mean is not None
    assert (mean.dtype, mean.shape) == (torch.float32, size)
    torch.testing.assert_close(mean.double(), torch.as_tensor(sums) / shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: f"{codec.bits} bits")
def test_over_whom_the_mean_goes(codec: TopKCompression) -> None:
    first, second = torch.zeros(4096), torch.zeros(4096)
    first[[5, 6]], second[[6, 9]] = torch.tensor([1.0, 1.0]), torch.tensor([-2.0, -2.0])
    messages = messages_of(codec, [first, second])
    of_senders = mean_of_messages(codec, messages, [3.0, 1.0])
    of_members = mean_of_messages(codec, messages, [3.0, 1.0], sparse_mean="members")
    assert of_senders is not None
    assert of_members is not None
    assert of_senders[[4, 5, 6, 9]].tolist() == [0, 1, 0.25, -2]
    assert of_members[[4, 5, 6, 9]].tolist() == [0, 0.75, 0.25, -0.5]


@every_mean
def test_messages_without_weight_are_not_decoded(sparse_mean: str) -> None:
    codec = TopKCompression()
    good, other = messages_of(codec, tensors_of(2, (5000,)))
    bad = replace(other, buffer=b"")
    mean = mean_of_messages(codec, [bad, good], [0.0, 2.0], sparse_mean=sparse_mean)
    assert mean is not None
    assert torch.equal(mean, codec.extract(good))
    assert mean_of_messages(codec, [bad, good], [0.0, 0.0], sparse_mean=sparse_mean) is None
    assert mean_of_messages(codec, [], [], sparse_mean=sparse_mean) is None
    with pytest.raises(RuntimeError, match="takes"):
        mean_of_messages(codec, [good, bad], [1.0, 1.0], sparse_mean=sparse_mean)


@every_mean
@given(exponent=st.integers(-900, 900))
def test_weights_of_any_size(sparse_mean: str, exponent: int) -> None:
    codec = TopKCompression(1 / 4)
    messages, weights = messages_of(codec, tensors_of(3, (100,))), [3.0, 1.0, 5.0]
    scaled = mean_of_messages(codec, messages, [w * 2.0**exponent for w in weights], sparse_mean=sparse_mean)
    expected = mean_of_messages(codec, messages, weights, sparse_mean=sparse_mean)
    assert scaled is not None
    assert expected is not None
    assert torch.equal(scaled, expected)


def test_messages_that_do_not_fit_together() -> None:
    codec = TopKCompression()
    one, other = messages_of(codec, [torch.ones(5), torch.ones(6)])
    with pytest.raises(ValueError, match=r"must have the same shape, got \(5,\) and \(6,\)"):
        mean_of_messages(codec, [one, other], [1.0, 1.0])
    with pytest.raises(ValueError, match="sparse_mean must be one of senders, members, got 'median'"):
        mean_of_messages(codec, [one], [1.0], sparse_mean="median")
    with pytest.raises(ValueError, match="peers must use the same compression"):
        mean_of_messages(TopKCompression(bits=8), [one], [1.0])


def test_the_messages_stay_as_they_are() -> None:
    for codec in EVERY:
        messages = messages_of(codec, tensors_of(2, (5000,)))
        before = [bytes(message.buffer) for message in messages]
        mean_of_messages(codec, messages, [1.0, 2.0])
        assert [bytes(message.buffer) for message in messages] == before
