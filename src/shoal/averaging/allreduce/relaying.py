"""Messages that a reducer passes on instead of their mean.

A sparse message is so short that those of a dozen members are shorter than their mean. So the reducer sends each member
what the others have sent, and how much it counts. Everybody computes the mean of the same bytes in the same order.

The payload, little-endian: the number of messages, 2 bytes; for each of them, in the order of the members, its weight
(float64) and its length (4 bytes); then the messages themselves. The receiver's own message is not sent back: it has a
length of its own that cannot be (:data:`YOURS`).

Each message has been read by the reducer before, so one that makes no sense is the fault of its sender alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.averaging.finite import all_finite
from shoal.averaging.message_means import mean_of_messages
from shoal.compression import CompressionInfo, SerializedTensor, TensorMetadata
from shoal.compression.base import DTYPES, Buffer, bytes_of, dtype_name
from shoal.compression.one_result import Relayed

_COUNT, _ENTRY = struct.Struct("<H"), struct.Struct("<dI")
YOURS = 2**32 - 1


def as_bytes(message: SerializedTensor) -> torch.Tensor:
    """The bytes of a message, as a tensor."""
    return torch.frombuffer(bytearray(message.buffer), dtype=torch.uint8)


def checked(codec: Relayed, message: SerializedTensor) -> torch.Tensor:
    """The bytes of a message that has arrived, once it has been read without trouble.

    Raises:
        ValueError, RuntimeError: it makes no sense, or has values that are not finite.
    """
    if not all_finite(codec.out.extract(message)):
        raise ValueError("sent values that are not finite")
    return as_bytes(message)


@dataclass(frozen=True)
class Messages:
    """What members have sent of one part. Those with weight 0 are left out."""

    codec: Relayed
    metadata: TensorMetadata
    """Of each message."""
    members: Sequence[int]
    """Their positions, ascending."""
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
    ) -> Messages:
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
        """Whether the messages of all others are not longer than the mean, encoded."""
        others = sum(len(each) for each in self.buffers) * (1 - 1 / max(1, len(self.buffers)))
        whole = info.descriptor.dtype.itemsize * math.prod(info.size)
        return others <= whole * self.codec.back.estimate_compression_ratio(info)

    def mean(self) -> torch.Tensor | None:
        """Their mean; ``None``: there are none.

        Raises:
            ValueError, RuntimeError: a message makes no sense.
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
        packed: from :meth:`Messages.pack`.
        own: makes the message that this member has sent.

    Raises:
        ValueError, RuntimeError: the payload makes no sense.
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
    return Messages(codec, packed.metadata, range(count), [weight for weight, _ in entries], buffers).mean()
