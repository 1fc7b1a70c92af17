"""One member's share of an all-reduce: collect parts from the senders, average each one, hand the averages back.

A part is averaged when every sender that is still trusted to come has delivered it, in the order of the members, so
that the result does not depend on who was faster. Senders may run ahead by a few parts only, and few averages wait to
be sent, which bounds the memory.

A member whose values are not finite says so and has weight 0. If a part with such values comes nevertheless, it is left
out: the average of the others does not suffer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from shoal.averaging.finite import all_finite, without_overflow
from shoal.compression.base import SerializedTensor, TensorRole
from shoal.errors import AllreduceException, ProtocolError

if TYPE_CHECKING:
    from shoal.averaging.allreduce.parts import Part

logger = logging.getLogger(__name__)

# Memory for parts that have arrived and wait for the same part of other senders; and as much again, with what they are
# made of, for averages that wait to be sent while something else is sent first.
WINDOW_BYTES = 32 * 2**20


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor | None:
    """Mean of equally shaped tensors in their own type, summed in float32 or wider; ``None`` if all weights are 0.

    What has weight 0 is left out, whatever it is. Weights may be of any size.
    """
    largest = max(weights, default=0.0)
    if largest == 0:
        return None
    values = [value for value, weight in zip(values, weights, strict=True) if weight > 0]
    # A power of two changes no bit, and the sum of such weights is of normal size.
    exponent = math.frexp(largest)[1]
    weights = [math.ldexp(weight, -exponent) for weight in weights if weight > 0]
    total, dtype = sum(weights), values[0].dtype
    wide = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
    if not (dtype.is_floating_point or dtype.is_complex):
        wide = torch.float64
    mean = values[0].to(wide) * (weights[0] / total)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean.add_(value, alpha=weight / total)
    if wide is torch.float64 and dtype is not torch.float64:
        mean.round_()
    return mean.to(dtype)


_SAMPLE = 4096


def _are_similar(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether three quarters of the values are closer together than half of their root mean square, by a sample.

    A codec may spoil values far out, which make up the norms of such tensors, but not most of them.
    """
    # Odd: not the same column of a matrix all the time.
    step = one.numel() // _SAMPLE | 1
    one, other = one.flatten()[::step], other.flatten()[::step]
    limit = 0.5 * float(torch.linalg.vector_norm(one)) / max(1, one.numel()) ** 0.5
    far = torch.count_nonzero((one - other).abs_() > limit)
    return int(far) < 0.25 * one.numel()


class OwnAverage(NamedTuple):
    """The average of a part for the member that reduces it."""

    values: torch.Tensor | None
    """``None`` = keep the local values."""
    is_delta: bool
    """What is given is the difference to the local values."""
    is_shared: bool
    """Others have contributed, or none were expected."""


@dataclass
class _PartState:
    values: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """What has arrived, by sender; of this member what counts, if that is not its values as they are. ``None``: nothing
    that counts, because it is not finite."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    average: torch.Tensor | None = None
    encoded: SerializedTensor | None = None
    is_shared: bool = True
    """Somebody else has contributed, or nobody else was expected to."""
    takers: set[int] = field(default_factory=set)
    """Members that will still ask for the average, also this one."""


class PartReducer:
    """Averages the parts of which this member is the reducer.

    Args:
        parts: those that it reduces.
        senders: positions of the members that will send, without this one.
        own_values: gives this member's own values of a part, if they are finite; ``None``: it does not contribute.
        local_index: this member's position.
        weights: of the members as far as they are known: this one's, at least.
        on_not_finite: called with a sender that has a weight, but values that are not finite.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        senders: Sequence[int],
        own_values: Callable[[Part], torch.Tensor | None] | None,
        local_index: int,
        weights: dict[int, float],
        on_not_finite: Callable[[int], None] = lambda member: None,
    ) -> None:
        self._parts, self._on_not_finite = parts, on_not_finite
        self._expects_others = bool(senders)
        self.waiting_for = set(senders)
        """Senders that have neither delivered everything and said so, nor been excluded."""
        self.banned: dict[int, str] = {}
        self.finished = asyncio.Event()
        """Nobody is waited for any more."""
        self._error: Exception | None = None
        self.weights = dict(weights)
        """Of the members that have announced themselves, and this one's."""
        self._own_values, self._local_index = own_values, local_index
        self._states = [_PartState() for _ in parts]
        largest = max((part.length * part.info.descriptor.dtype.itemsize for part in parts), default=1)
        self._window = max(2, WINDOW_BYTES // (largest * max(1, len(self.waiting_for))))
        self._reduce_complete_parts()
        self._check_finished()

    def __len__(self) -> int:
        return len(self._parts)

    def begin(self, sender: int, weight: float) -> None:
        """A sender has announced itself."""
        self.weights[sender] = weight

    def has_begun(self, sender: int) -> bool:
        return sender in self.weights

    async def wait_for_room(self, index: int) -> None:
        """Wait until a sender may deliver part ``index``: not too far ahead of the slowest sender."""
        if index >= self._window:
            await self._states[index - self._window].done.wait()

    def deliver(self, sender: int, index: int, values: torch.Tensor | None) -> None:
        """A part has arrived; the tensor now belongs to the reducer. ``None``: the sender has no finite values."""
        state = self._states[index]
        if not state.done.is_set():
            state.values[sender] = values
            self._reduce_if_complete(state, index)

    async def average(self, index: int) -> OwnAverage:
        """The average of a part, for this member itself."""
        state = self._states[index]
        await state.done.wait()
        average, counted = state.average, state.values.get(self._local_index)
        self._taken(state, self._local_index)
        if average is None or counted is None:
            return OwnAverage(average, False, state.is_shared)
        return OwnAverage(without_overflow(average - counted), True, state.is_shared)

    def is_averaged(self, index: int) -> bool:
        """Nobody is waited for any more with a part."""
        return self._states[index].done.is_set()

    def is_crowded(self, index: int) -> bool:
        """Whether too many averages have to be kept as long as part ``index`` is not sent."""
        return index + self._window < len(self._states) and self.is_averaged(index + self._window)

    async def peek(self, index: int) -> torch.Tensor | None:
        """The average of a part, which stays here.

        Raises:
            AllreduceException: this member could not average a part.
        """
        state = self._states[index]
        await state.done.wait()
        self._check_error()
        return state.average

    async def reply(self, index: int, sender: int) -> tuple[SerializedTensor | None, bool]:
        """What to send back for a part: the bytes, or ``None`` for "unchanged", and whether they are a difference.

        Raises:
            ProtocolError: the sender was given up before it delivered the part.
        """
        state = self._states[index]
        await state.done.wait()
        if sender not in state.takers:
            raise ProtocolError(f"part {index} was averaged without this member")
        part, average, sent = self._parts[index], state.average, state.values.get(sender)
        try:
            if average is None:
                return None, False
            # Lossy codecs are only for floating point numbers.
            if part.codec.lossy and sent is not None and sent.is_floating_point():
                difference = average - sent
                if all_finite(difference) or all_finite(sent):
                    difference = without_overflow(difference)
                    return part.codec.compress(difference, part.info, allow_inplace=True), True
            if state.encoded is None:
                state.encoded = part.compress(average)
            return state.encoded, False
        finally:
            self._taken(state, sender)

    def _taken(self, state: _PartState, member: int) -> None:
        state.takers.discard(member)
        if not state.takers:
            state.average = state.encoded = None
            state.values.clear()

    def delivered_everything(self, sender: int) -> None:
        """A sender has its averages, too."""
        self.waiting_for.discard(sender)
        self._check_finished()

    def ban(self, sender: int, reason: str) -> None:
        """Do not wait for a sender any more; what it has delivered counts."""
        if sender not in self.waiting_for:
            return
        self.waiting_for.discard(sender)
        self.banned[sender] = reason
        self._reduce_complete_parts()
        self._check_finished()

    def _check_finished(self) -> None:
        if not self.waiting_for:
            self.finished.set()

    def _reduce_complete_parts(self) -> None:
        for index, state in enumerate(self._states):
            if not state.done.is_set():
                self._reduce_if_complete(state, index)

    def _reduce_if_complete(self, state: _PartState, index: int) -> None:
        if self.waiting_for - state.values.keys():
            return
        try:
            self._reduce(state, index)
        except Exception as e:
            logger.exception("could not average a part")
            self._give_up(e)

    def _give_up(self, error: Exception) -> None:
        """This member cannot go on, which is not the fault of whoever has sent the last part."""
        self._error = self._error or error
        self.waiting_for.clear()
        for state in self._states:
            state.done.set()
        self.finished.set()

    async def finish(self) -> None:
        """Wait until nobody is waited for any more.

        Raises:
            AllreduceException: this member could not average a part.
        """
        await self.finished.wait()
        self._check_error()

    def _check_error(self) -> None:
        if self._error is not None:
            raise AllreduceException(f"this peer could not average a part: {self._error}") from self._error

    def _reduce(self, state: _PartState, index: int) -> None:
        senders, part = sorted(state.values), self._parts[index]
        state.average = self._mean(state, part)
        if state.average is not None and not all_finite(state.average):
            self._leave_out_not_finite(state)
            mean = self._mean(state, part, trust_own=False)
            # Shares may add up to more than 1.
            state.average = None if mean is None else without_overflow(mean)
        state.takers = {*senders, self._local_index} if self._own_values is not None else set(senders)
        state.is_shared = bool(senders) or not self._expects_others
        if not part.codec.lossy:  # only differences need what was sent
            state.values.clear()
        state.done.set()

    def _mean(self, state: _PartState, part: Part, *, trust_own: bool = True) -> torch.Tensor | None:
        values = {sender: sent for sender, sent in state.values.items() if sent is not None}
        own = None if self._own_values is None else self._own_values(part)
        if own is not None and (trust_own or all_finite(own)):
            values[self._local_index] = self._counted(own, part, state)
        order = sorted(values)
        return weighted_mean([values[i] for i in order], [self.weights[i] for i in order])

    def _leave_out_not_finite(self, state: _PartState) -> None:
        """Somebody has not checked its values before it sent them: they would spoil the average."""
        state.values.pop(self._local_index, None)
        for sender, values in sorted(state.values.items()):
            if values is not None and not all_finite(values):
                state.values[sender] = None
                if self.weights[sender] > 0:
                    self._on_not_finite(sender)

    def _counted(self, values: torch.Tensor, part: Part, state: _PartState) -> torch.Tensor:
        """This member's own values as they count in an average with those that have arrived.

        Members have nearly the same parameters, and a codec errs in the same way in the same values. If it errs in
        all of them, also in these, which do not travel, that cancels out in every difference: who agrees with the
        others stays where it is. What has little in common, as gradients, counts as exactly as possible.
        """
        if not part.codec.lossy or not state.values or part.info.role is TensorRole.GRADIENT:
            return values
        others = [sent for i, sent in sorted(state.values.items()) if sent is not None and self.weights[i] > 0]
        if not others or not values.is_floating_point() or not _are_similar(values, others[0]):
            return values
        _, decoded = part.codec.compress_and_decode(values, part.info)
        state.values[self._local_index] = decoded
        return decoded
