"""This member's tensors in the course of one round: cut into parts, with a count of those that hold the average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shoal.averaging.finite import all_finite
from shoal.averaging.partition import Part, split_into_parts
from shoal.averaging.protocol import PartHeader, PartStatus
from shoal.compression import CompressionBase, CompressionInfo
from shoal.compression.base import SerializedTensor, bytes_of, dtype_name
from shoal.errors import ProtocolError
from shoal.p2p import Call

Averages = list[torch.Tensor | None]
"""Values of several parts; ``None`` = the local values stay."""


class _Average(NamedTuple):
    values: torch.Tensor | None
    is_delta: bool


class RoundVector:
    """The averaged tensors as parts, by the member that reduces them.

    Args:
        tensors: contiguous CPU tensors; they receive the averages.
        infos: one for each tensor.
        codec: how parts travel.
        part_size_bytes: about how large a part is on the way.
        shares: how many values each member reduces.
        alpha: local values move by this fraction of the way to the average.
        is_spoilt: some values of this member may be NaN or infinite.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        infos: Sequence[CompressionInfo],
        codec: CompressionBase,
        part_size_bytes: int,
        shares: Sequence[int],
        alpha: float,
        is_spoilt: bool = False,
    ) -> None:
        self.alpha, self.is_spoilt = alpha, is_spoilt
        self._flat = [tensor.detach().view(-1) for tensor in tensors]
        self._values_averaged = 0
        self.parts: list[list[Part]] = [[] for _ in shares]
        """Parts of each reducer, in the order in which they are averaged."""
        for part in split_into_parts(infos, codec, part_size_bytes, shares):
            self.parts[part.reducer].append(part)
        self.held = [0] * len(shares)
        """How many parts of each reducer, from the first one on, hold the average here."""
        self._without_average: set[tuple[int, int]] = set()
        """Parts that are held, but to which nobody has contributed, by reducer and index."""
        self._early: list[dict[int, _Average]] = [{} for _ in shares]
        """Averages that came before those of earlier parts, by reducer and index."""

    @property
    def share_averaged(self) -> float:
        """Which share of the values holds an average with others, from 0 to 1."""
        total = sum(flat.numel() for flat in self._flat)
        return self._values_averaged / total if total else 1.0

    @property
    def is_complete(self) -> bool:
        """Whether all parts hold the average."""
        return all(held == len(parts) for held, parts in zip(self.held, self.parts, strict=True))

    def restart(self) -> None:
        """Forget what has been averaged: all of it is going to come."""
        self.held = [0] * len(self.held)
        self._values_averaged = 0
        self._without_average.clear()
        self.drop_early()

    def drop_early(self) -> None:
        """Forget averages whose predecessors have not come."""
        for early in self._early:
            early.clear()

    def has_average(self, reducer: int, index: int) -> bool:
        """Whether there is one of a part, as far as this member knows: nobody may have contributed."""
        return (reducer, index) not in self._without_average

    def copy_values(self) -> list[torch.Tensor]:
        """The values of all tensors now, flat; :meth:`Part.of` finds a part in them."""
        return [flat.clone() for flat in self._flat]

    def values(self, part: Part) -> torch.Tensor:
        """The values of a part: a view if they are of one tensor, else a copy."""
        return part.of(self._flat)

    def sound_values(self, part: Part) -> torch.Tensor | None:
        """The same, or ``None`` if some of them are not finite."""
        values = self.values(part)
        return None if self.is_spoilt and not all_finite(values) else values

    def encode(self, part: Part) -> SerializedTensor | None:
        """The values of a part, ready to be sent; ``None`` if some of them are not finite."""
        values = self.sound_values(part)
        return None if values is None else part.compress(values)

    def take(self, reducer: int, index: int, values: torch.Tensor | None, *, is_delta: bool = False) -> None:
        """The average of a reducer's part is here; it is applied when those of all earlier parts are.

        Args:
            values: ``None`` = there is none, the local values stay.
            is_delta: what is given is the difference to the local values.
        """
        early = self._early[reducer]
        early[index] = _Average(values, is_delta)
        while self.held[reducer] in early:
            average = early.pop(self.held[reducer])
            part = self.parts[reducer][self.held[reducer]]
            if average.values is not None:
                self._values_averaged += part.length
                pieces = part.pieces_of(self._flat)
                for piece, values in zip(pieces, average.values.split_with_sizes([*map(len, pieces)]), strict=True):
                    self._apply(piece, values, is_delta=average.is_delta)
            else:
                self._without_average.add((reducer, self.held[reducer]))
            self.held[reducer] += 1

    def _apply(self, target: torch.Tensor, values: torch.Tensor, *, is_delta: bool) -> None:
        if is_delta:
            largest = torch.finfo(target.dtype).max  # which a sum may exceed by what a codec has lost
            target.add_(values.to(target.dtype), alpha=self.alpha).clamp_(-largest, largest)
        elif self.alpha == 1 or (self.is_spoilt and not all_finite(target)):
            target.copy_(values)
        elif target.is_floating_point() or target.is_complex():
            mixed = torch.lerp(target, values, self.alpha)
            if not all_finite(mixed):  # the difference of huge numbers may be too large, but not what is between them
                mixed = (target * (1 - self.alpha)).add_(values, alpha=self.alpha)
            target.copy_(mixed)
        else:
            target.copy_(torch.lerp(target.double(), values.double(), self.alpha).round_())

    async def receive(self, call: Call, headers: Sequence[PartHeader], parts: Sequence[Part]) -> Averages:
        """Receive the payload of a message, after checking that it holds the parts that are due.

        Returns:
            The values of each part, or ``None`` if there are none.

        Raises:
            ProtocolError: it holds something else.
        """
        for header, part in zip(headers, parts, strict=True):
            self.check(header, part)
        nbytes = sum(header.nbytes for header in headers)
        buffer = bytes_of(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        await call.read_payload_into(buffer)
        values, start = [], 0
        for header, part in zip(headers, parts, strict=True):
            values.append(self.decode(header, part, buffer[start : start + header.nbytes]))
            start += header.nbytes
        return values

    def check(self, header: PartHeader, part: Part) -> None:
        """Check that a part is announced as it has to be.

        Raises:
            ProtocolError: it is not.
        """
        metadata, nbytes, dtype = header.metadata, header.nbytes, part.info.descriptor.dtype
        if header.status == PartStatus.UNCHANGED and metadata is None and not nbytes:
            return
        if metadata is None or metadata.size != (part.length,) or metadata.dtype != dtype_name(dtype):
            raise ProtocolError(f"sent {metadata} for a part of {part.length} values of {dtype}")
        if header.status == PartStatus.DELTA and not dtype.is_floating_point:
            raise ProtocolError(f"sent a difference for a part of {dtype}")
        limit = 2 * part.length * dtype.itemsize + 2**16
        if nbytes != part.nbytes if math.isfinite(part.nbytes) else not 0 <= nbytes <= limit:
            raise ProtocolError(f"sent {nbytes} bytes for a part of {part.length} values")

    def decode(self, header: PartHeader, part: Part, buffer: memoryview) -> torch.Tensor | None:
        """The values of a part whose bytes are all here, after :meth:`check`; ``None`` if there are none."""
        if header.metadata is None:
            return None
        return part.codec.extract(SerializedTensor(header.metadata, buffer)).detach()
