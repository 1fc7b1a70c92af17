"""Members without which a round goes on, and the result that is kept for them.

A late member gets all averages anew, also those that it holds already: others may have averaged the same parts again
without it.
"""

from __future__ import annotations

import asyncio

import torch

from shoal.averaging.allreduce.members import Link
from shoal.averaging.allreduce.parts import RoundVector
from shoal.averaging.messages import RoundKind, RoundMessage


class Latecomers:
    """What a coordinator does for late members.

    Args:
        vector: this member's values.
        has_averages: whether this member gets averages itself; an auxiliary does not.
        is_verified: whether members compare the averages that they get.
    """

    def __init__(self, vector: RoundVector, *, has_averages: bool, is_verified: bool) -> None:
        self._vector, self._has_averages = vector, has_averages
        self.can_get_result = vector.alpha == 1 and has_averages and not is_verified
        """Whether a result can be passed on. Where members mix averages with values of their own, or check who has
        signed them, a late member keeps what it has."""
        # All values, and the weights of all members.
        self._result: asyncio.Future[tuple[list[torch.Tensor], list[float]]]
        self._result = asyncio.get_running_loop().create_future()

    def keep_result(self, weights: list[float]) -> None:
        """Keep all values of the result, which this member has now, and the weights of all members."""
        self._result.set_result((self._vector.copy_values(), weights))

    def close(self) -> None:
        """The round has ended here; if it has no result, there will be none."""
        if not self._result.done():
            self._result.cancel()

    async def send_result(self, link: Link) -> None:
        """Give a late member all averages as soon as the round is over."""
        values, weights = await asyncio.shield(self._result)
        for reducer, parts in enumerate(self._vector.parts):
            for index, part in enumerate(parts):
                has_average = self._has_averages and self._vector.has_average(reducer, index)
                encoded = part.returned.compress(part.of(values)) if has_average else None
                await link.shared.send_part((reducer, index), encoded)
        await link.shared.send(RoundMessage(kind=RoundKind.COMMIT, weights=weights), end=True)
