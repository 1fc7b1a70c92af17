"""Messages that a reducer passes on as they are, because they are shorter than their encoded mean; and their mean.

A sparse message is so short that the messages of a dozen members are shorter than their mean. So the reducer sends each
member the messages of the others, with their weights. All members decode the same messages and average them in the
order of the members. Each operation rounds once, so all members get the same bits on any processor.
(:func:`~shoal.averaging.aggregation.weighted_mean` is for one reducer that tells others its result.)

The payload, little-endian: the number of messages, 2 bytes; for each of them, in the order of the members, its weight
(float64) and its length (4 bytes); then the messages themselves. The receiver's own message is not sent back; an
impossible length (:data:`YOURS`) marks its place.

The reducer reads each message before it passes it on, so only the sender is to blame for a malformed one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.base.logs import quoted
from shoal.compression import (
    CompressionBase,
    CompressionInfo,
    SerializedTensor,
    SparseTensor,
    TensorMetadata,
    TopKCompression,
)
from shoal.compression.base import DTYPES, Buffer, bytes_of, dtype_name
from shoal.compression.one_result import Relayed

SENDERS, MEMBERS = "senders", "members"
SPARSE_MEANS = (SENDERS, MEMBERS)
"""Which members the mean of a value covers if not all have sent it: only the senders, or all members."""


def check_sparse_mean(sparse_mean: str) -> None:
    """Check the name of a kind of mean.

    Raises:
        ValueError: the name is unknown.
    """
    if sparse_mean not in SPARSE_MEANS:
        raise ValueError(f"sparse_mean must be one of {', '.join(SPARSE_MEANS)}, got {sparse_mean!r}")


@torch.no_grad()
def mean_of_messages(
    codec: CompressionBase,
    messages: Sequence[SerializedTensor],
    weights: Sequence[float],
    sparse_mean: str = SENDERS,
) -> torch.Tensor | None:
    """The weighted mean of equally shaped messages, in float32; ``None`` if all weights are 0.

    Args:
        codec: the codec of all messages.
        messages: one per member, in the order of the members. Those with weight 0 are not decoded.
        weights: one per member, each 0 or more, of any size.
        sparse_mean: which members the mean covers if the codec leaves values out. With ``"senders"``, a value that no
            member has sent is 0. With ``"members"``, a member that has not sent a value counts as 0.

    Raises:
        ValueError: the messages differ in shape, or their metadata are malformed.
        RuntimeError: bytes do not fit their metadata.
    """
    check_sparse_mean(sparse_mean)
    kept = [each for each in zip(messages, weights, strict=True) if each[1] > 0]
    if not kept:
        return None
    # Huge or tiny weights could overflow or vanish in the sum. Scaling by a power of two is exact.
    exponent = math.frexp(max(weights))[1]
    size = kept[0][0].metadata.size
    total = 0.0
    sums = torch.zeros(size, dtype=torch.float32, device="cpu")
    by_value = isinstance(codec, TopKCompression) and sparse_mean == SENDERS
    shares = torch.zeros(size, dtype=torch.float32, device="cpu") if by_value else None
    for message, weight in kept:
        if message.metadata.size != size:
            raise ValueError(f"messages must have the same shape, got {size} and {quoted(message.metadata.size)}")
        scaled = math.ldexp(weight, -exponent)
        total += scaled
        if isinstance(codec, TopKCompression):
            _add_sparse(sums, shares, codec.extract_sparse(message), scaled)
        else:
            sums.add_(codec.extract(message).detach().float() * scaled)
    return sums.div_(total) if shares is None else sums.div_(shares.masked_fill_(shares == 0, 1.0))


def _add_sparse(sums: torch.Tensor, shares: torch.Tensor | None, sent: SparseTensor, weight: float) -> None:
    sums.view(-1).index_add_(0, sent.indices, sent.values * weight)
    if shares is not None:
        shares.view(-1).index_add_(0, sent.indices, torch.full_like(sent.values, weight))


# --- passing messages on ----------------------------------------------------------------------------------------------

_COUNT, _ENTRY = struct.Struct("<H"), struct.Struct("<dI")
# In place of a length: the receiver's own message. Chosen: the largest number of 4 bytes, which no message has.
YOURS = 2**32 - 1


def as_bytes(message: SerializedTensor) -> torch.Tensor:
    """The bytes of a message, as a tensor."""
    return torch.frombuffer(bytearray(message.buffer), dtype=torch.uint8)


def checked(codec: Relayed, message: SerializedTensor) -> torch.Tensor:
    """The bytes of a message that has arrived, after it has been decoded as a check.

    Raises:
        ValueError, RuntimeError: it is malformed, or has values that are not finite.
    """
    if not torch.isfinite(codec.out.extract(message)).all():
        raise ValueError("sent values that are not finite")
    return as_bytes(message)


@dataclass(frozen=True)
class PartMessages:
    """The members' messages for one part. Members with weight 0 are left out."""

    codec: Relayed
    metadata: TensorMetadata
    """The metadata of each message."""
    members: Sequence[int]
    """The members' positions, ascending."""
    weights: Sequence[float]
    buffers: Sequence[Buffer]

    @classmethod
    def of(
        cls,
        codec: Relayed,
        info: CompressionInfo,
        members: Sequence[int],
        weights: Sequence[float],
        messages: Sequence[torch.Tensor],
    ) -> PartMessages:
        """Collect messages, which are the bytes from :func:`as_bytes`."""
        metadata = TensorMetadata(int(codec.out.compression_type), dtype_name(info.descriptor.dtype), info.size)
        kept = [each for each in zip(members, weights, messages, strict=True) if each[1] > 0]
        return cls(
            codec,
            metadata,
            [member for member, _, _ in kept],
            [weight for _, weight, _ in kept],
            [bytes_of(message) for _, _, message in kept],
        )

    def pay(self, info: CompressionInfo) -> bool:
        """Whether the messages of all others are no longer than the encoded mean."""
        others = sum(len(each) for each in self.buffers) * (1 - 1 / max(1, len(self.buffers)))
        whole = info.descriptor.dtype.itemsize * math.prod(info.size)
        return others <= whole * self.codec.back.estimate_compression_ratio(info)

    def mean(self) -> torch.Tensor | None:
        """The mean of the messages; ``None``: there are none.

        Raises:
            ValueError, RuntimeError: a message is malformed.
        """
        messages = [SerializedTensor(self.metadata, buffer) for buffer in self.buffers]
        mean = mean_of_messages(self.codec.out, messages, self.weights, sparse_mean=self.codec.sparse_mean)
        return None if mean is None else mean.to(DTYPES[self.metadata.dtype])

    def pack(self, receiver: int) -> SerializedTensor:
        """All messages for a member, in one payload."""
        lengths = [
            YOURS if member == receiver else len(buffer)
            for member, buffer in zip(self.members, self.buffers, strict=True)
        ]
        entries = [_ENTRY.pack(*each) for each in zip(self.weights, lengths, strict=True)]
        sent = [buffer for buffer, length in zip(self.buffers, lengths, strict=True) if length != YOURS]
        return SerializedTensor(self.metadata, b"".join([_COUNT.pack(len(entries)), *entries, *sent]))


def unpack(codec: Relayed, packed: SerializedTensor, own: Callable[[], Buffer]) -> torch.Tensor | None:
    """The mean of the messages in a payload.

    Args:
        packed: from :meth:`PartMessages.pack`.
        own: makes the message that this member has sent.

    Raises:
        ValueError, RuntimeError: the payload is malformed.
    """
    data = memoryview(packed.buffer)
    if len(data) < _COUNT.size:
        raise RuntimeError("messages of members without their number")
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size + count * _ENTRY.size
    if len(data) < at:
        raise RuntimeError(f"{len(data)} bytes for {count} messages of members")
    entries = list(_ENTRY.iter_unpack(data[_COUNT.size : at]))
    if sum(length == YOURS for _, length in entries) > 1:
        raise ValueError("the same member's message twice")
    buffers: list[Buffer] = []
    for weight, length in entries:
        if not 0 < weight < math.inf:
            raise ValueError(f"a message of a member with weight {weight}")
        if length == YOURS:
            buffers.append(own())
        else:
            buffers.append(data[at : at + length])
            at += length
    if at != len(data):
        raise RuntimeError(f"the messages of {count} members take {at} bytes, got {len(data)}")
    return PartMessages(codec, packed.metadata, range(count), [weight for weight, _ in entries], buffers).mean()
