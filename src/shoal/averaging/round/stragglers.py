"""Members without which a round goes on, and the result that is kept for them.

A late member gets all averages anew, also those that it holds already: others may have averaged the same parts again
without it.
"""

from __future__ import annotations

import asyncio

import torch

from shoal.averaging.messages import RoundKind, RoundMessage
from shoal.averaging.round.members import FollowerCall
from shoal.averaging.round.parts import RoundVector
from shoal.errors import ProtocolError


class Resigned(ProtocolError):
    """The coordinator is late itself and does not lead the round to its end."""


class Missed(ProtocolError):
    """The round was committed without this member."""


class Stragglers:
    """What a coordinator does for late members.

    Args:
        vector: this member's values.
        has_averages: whether this member gets averages itself; an auxiliary does not.
    """

    def __init__(self, vector: RoundVector, *, has_averages: bool) -> None:
        self._vector, self._has_averages = vector, has_averages
        self.can_get_result = vector.alpha == 1 and has_averages
        """Whether a result can be passed on. Where members mix averages with values of their own, a late member keeps
        what it has."""
        self._values: list[torch.Tensor] | None = None
        self._is_released = False
        self._weights: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def release(self, *, keep: bool) -> None:
        """The tensors go back to their user, who may change them; ``keep``: somebody may still want these values."""
        self._values, self._is_released = self._vector.copy_values() if keep else None, True

    def keep_result(self, weights: list[float]) -> None:
        """Keep the values of the result, which this member has now, and the weights of all members."""
        if not self._is_released:
            self._values = self._vector.copy_values()
        self._weights.set_result(weights)

    def close(self) -> None:
        """The round has ended here; if it has no result, there will be none."""
        if not self._weights.done():
            self._weights.cancel()

    async def send_result(self, link: FollowerCall, timeout: float) -> None:
        """Give a late member all averages as soon as the round is over.

        Args:
            timeout: seconds within which each part must be sent; all of them may take longer.
        """
        weights = await asyncio.shield(self._weights)
        values = self._values if self._has_averages else None
        for reducer, parts in enumerate(self._vector.parts):
            for index, part in enumerate(parts):
                is_there = self._vector.has_average(reducer, index)
                encoded = part.returned.compress(part.of(values)) if values is not None and is_there else None
                async with asyncio.timeout(timeout):
                    await link.shared.send_part((reducer, index), encoded)
        await link.shared.send(RoundMessage(kind=RoundKind.COMMIT, weights=weights), end=True)
