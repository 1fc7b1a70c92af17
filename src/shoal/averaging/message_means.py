"""The mean of messages that a reducer passes on as they are, because they are shorter than their encoded mean.

Everybody decodes the same messages and averages them in the order of the members. Each operation rounds once, so all
members get the same bits on whatever processors. :func:`~shoal.averaging.aggregation.weighted_mean` is for one reducer
that tells others its result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.compression import CompressionBase, SerializedTensor, SparseTensor, TopKCompression

SENDERS, MEMBERS = "senders", "members"
SPARSE_MEANS = (SENDERS, MEMBERS)
"""Over whom the mean of a value goes if not everybody has sent it: those who have sent it, or everybody."""


def check_sparse_mean(sparse_mean: str) -> None:
    """Check the name of a kind of mean.

    Raises:
        ValueError: there is no such kind.
    """
    if sparse_mean not in SPARSE_MEANS:
        raise ValueError(f"sparse_mean must be one of {', '.join(SPARSE_MEANS)}, got {sparse_mean!r}")


@torch.no_grad()
def mean_of_messages(
    codec: CompressionBase,
    messages: Sequence[SerializedTensor],
    weights: Sequence[float],
    factors: Sequence[float] | None = None,
    sparse_mean: str = SENDERS,
) -> torch.Tensor | None:
    """The weighted mean of what equally shaped messages say, in float32; ``None`` if all weights are 0.

    Args:
        codec: has made all messages.
        messages: one of each member, in the order of the members. Those with weight 0 are not decoded.
        weights: of the same members, each 0 or more, of any size.
        factors: multiply the values of each member, but not its weight; ``None``: 1 for all.
        sparse_mean: over whom the mean goes if the codec leaves values out. Over ``"senders"``, a value that nobody has
            sent is 0. Over ``"members"``, whoever has not sent a value counts as 0.

    Raises:
        ValueError: the messages differ in shape, or have metadata that make no sense.
        RuntimeError: bytes do not fit their metadata.
    """
    check_sparse_mean(sparse_mean)
    factors = [1.0] * len(messages) if factors is None else factors
    kept = [each for each in zip(messages, weights, factors, strict=True) if each[1] > 0]
    if not kept:
        return None
    # Huge or tiny weights could overflow or vanish in the sum. Scaling by a power of two is exact.
    exponent = math.frexp(max(weights))[1]
    size = kept[0][0].metadata.size
    total = 0.0
    sums = torch.zeros(size, dtype=torch.float32, device="cpu")
    by_value = isinstance(codec, TopKCompression) and sparse_mean == SENDERS
    shares = torch.zeros(size, dtype=torch.float32, device="cpu") if by_value else None
    for message, weight, factor in kept:
        if message.metadata.size != size:
            raise ValueError(f"messages must have the same shape, got {size} and {message.metadata.size}")
        scaled = math.ldexp(weight, -exponent)
        total += scaled
        if isinstance(codec, TopKCompression):
            _add_sparse(sums, shares, codec.extract_sparse(message), scaled, factor)
        else:
            sums.add_(codec.extract(message).detach().float() * (scaled * factor))
    return sums.div_(total) if shares is None else sums.div_(shares.masked_fill_(shares == 0, 1.0))


def _add_sparse(
    sums: torch.Tensor, shares: torch.Tensor | None, sent: SparseTensor, weight: float, factor: float
) -> None:
    sums.view(-1).index_add_(0, sent.indices, sent.values * (weight * factor))
    if shares is not None:
        shares.view(-1).index_add_(0, sent.indices, torch.full_like(sent.values, weight))
