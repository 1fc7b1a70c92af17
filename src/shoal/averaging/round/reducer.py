"""One member's share of an all-reduce: it collects parts from the senders, averages them, and hands the averages back.

A part is averaged when all senders that have not been given up have delivered it. The values are added in the order of
the members, so the result does not depend on which of them was faster. Memory is bounded: senders may run ahead by only
a few parts, and only a few averages wait to be sent.

A member whose values are not finite announces this and has weight 0. If a part with non-finite values arrives anyway,
it is left out of the average.

The average is the weighted mean, unless the group has another rule (:mod:`shoal.averaging.aggregation`). A slow rule
works on one part after another in a thread, so that it does not block the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from shoal.averaging.aggregation import weighted_mean
from shoal.averaging.finite import all_finite, without_overflow
from shoal.averaging.message_means import PartMessages, as_bytes
from shoal.averaging.messages import PartStatus
from shoal.base.tasks import cancel_and_wait, run_in_worker
from shoal.compression.base import SerializedTensor, TensorRole
from shoal.compression.one_result import Relayed
from shoal.errors import AllreduceException, ProtocolError

if TYPE_CHECKING:
    from shoal.averaging.round.combining import Combination, Combiner
    from shoal.averaging.round.parts import Part
from shoal.averaging.round.waits import Missing, Waits

logger = logging.getLogger(__name__)

# Memory for parts that wait for the same part of other senders (chosen). Averages that wait to be sent, and the values
# that they are made of, may take as much again.
WINDOW_BYTES = 32 * 2**20


# The approximate number of values that are compared to tell whether two tensors are similar (chosen).
_SAMPLE = 4096


def _are_similar(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are nearly the same, judged by a sample of their values.

    They are if three quarters of the values differ by less than half of their root mean square. Norms would not show
    this: a codec may distort a few very large values, which dominate the norm, but not most of the values.
    """
    # The step is odd, because an even one could hit the same column of a matrix again and again.
    step = one.numel() // _SAMPLE | 1
    one, other = one.flatten()[::step], other.flatten()[::step]
    limit = 0.5 * float(torch.linalg.vector_norm(one)) / max(1, one.numel()) ** 0.5
    far = torch.count_nonzero((one - other).abs_() > limit)
    return int(far) < 0.25 * one.numel()


def _choose(choices: list[bool], one: torch.Tensor, other: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """For each piece, the values of one tensor or of the other."""
    pieces = zip(choices, one.split_with_sizes(lengths), other.split_with_sizes(lengths), strict=True)
    return torch.cat([first if is_first else second for is_first, first, second in pieces])


def _in_range(average: torch.Tensor | None) -> torch.Tensor | None:
    return None if average is None else without_overflow(average)


class OwnAverage(NamedTuple):
    """The average of a part for the member that reduces it."""

    values: torch.Tensor | None
    """``None``: keep the local values."""
    is_delta: bool
    """Whether ``values`` is the difference to the local values."""
    is_shared: bool
    """Whether another member has contributed, or no other was expected to."""


@dataclass
class _PartState:
    values: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """By sender: the values that have arrived; ``None``: they are not finite. For this member: the values that count,
    if these differ from its own."""
    similar: list[bool] | None = None
    """By tensor: whether this member's own values count as if they had been sent; ``None``: the same for all."""
    is_complete: bool = False
    """The part is being averaged, so values that arrive now are too late."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    average: torch.Tensor | None = None
    encoded: SerializedTensor | None = None
    messages: PartMessages | None = None
    """The messages that the average is made of, if these are sent instead of it."""
    is_shared: bool = True
    """Another member has contributed, or no other was expected to."""
    takers: set[int] = field(default_factory=set)
    """Members that still need the average; may include this one."""


class PartReducer:
    """Averages the parts that this member reduces.

    Args:
        parts: the parts to reduce.
        senders: positions of the members that will send, without this one.
        own_values: returns this member's own values of a part, or ``None`` if they are not finite. ``None``: this
            member does not contribute.
        local_index: this member's position.
        weights: the weights that are known so far; at least this member's own.
        on_not_finite: called with a sender that has a weight above 0 but has sent values that are not finite.
        combiner: averages by another rule; ``None``: the mean.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        senders: Sequence[int],
        own_values: Callable[[Part], torch.Tensor | None] | None,
        local_index: int,
        weights: dict[int, float],
        on_not_finite: Callable[[int], None] = lambda member: None,
        combiner: Combiner | None = None,
    ) -> None:
        self._parts, self._on_not_finite, self._combiner = parts, on_not_finite, combiner
        self._senders = frozenset(senders)
        self.waiting_for = set(senders)
        """Senders that still have something to deliver and have not been given up."""
        self.left_out: set[int] = set()
        """Senders whose values are missing in some averages, made here or, as other reducers say, there."""
        self.banned: dict[int, str] = {}
        """By sender that was given up before it had delivered everything: the reason."""
        self.finished = asyncio.Event()
        """Set when the reducer no longer waits for any sender."""
        self.waits: Waits | None = None
        """How long this member waits for each other one alone; ``None``: not measured."""
        self._first = 0  # the first part that is not complete
        self._error: Exception | None = None
        self.weights = dict(weights)
        """The weights of the members that have announced themselves, and this member's own."""
        self._own_values, self._local_index = own_values, local_index
        self._states = [_PartState() for _ in parts]
        # Parts that a rule works on or will work on. Their memory is bounded like that of waiting parts.
        self._at_work: dict[asyncio.Task[None], None] = {}
        self._one_at_a_time = asyncio.Lock()
        largest = max((part.length * part.info.descriptor.dtype.itemsize for part in parts), default=1)
        # At least two, so that one part can be in flight while another one is being averaged.
        self._window = max(2, WINDOW_BYTES // (largest * max(1, len(self.waiting_for))))
        self._reduce_complete_parts()
        self._check_finished()

    def __len__(self) -> int:
        return len(self._parts)

    def begin(self, sender: int, weight: float) -> None:
        """Note a sender that has announced itself, and its weight."""
        self.weights[sender] = weight

    def has_begun(self, sender: int) -> bool:
        return sender in self.weights

    async def wait_for_room(self, index: int) -> None:
        """Wait until a sender may deliver part ``index``, so that it does not get too far ahead of the slowest one."""
        if index >= self._window:
            await self._states[index - self._window].done.wait()

    def deliver(self, sender: int, index: int, values: torch.Tensor | None) -> None:
        """Take a part that has arrived. The tensor now belongs to the reducer.

        Args:
            sender: the member that has sent it.
            index: the index of the part.
            values: its values; ``None``: they are not finite.
        """
        state = self._states[index]
        if self._combiner is not None and values is not None:
            values = values if self._combiner.admits(sender, self._parts[index], values) else None
        if not state.is_complete:
            state.values[sender] = values
            self._reduce_if_complete(state, index)
            self._note_who_is_missing()

    async def average(self, index: int) -> OwnAverage:
        """Wait for the average of a part, for this member itself."""
        state = self._states[index]
        await state.done.wait()
        average, counted, part = state.average, state.values.get(self._local_index), self._parts[index]
        self._taken(state, self._local_index)
        if average is None or counted is None:
            return OwnAverage(average, False, state.is_shared)
        difference = without_overflow(average - counted)
        own = None if state.similar is None or self._own_values is None else self._own_values(part)
        if state.similar is None or own is None:
            return OwnAverage(difference, True, state.is_shared)
        # A difference would round the averages of tensors whose own values counted exactly.
        moved = without_overflow(own + difference)
        return OwnAverage(_choose(state.similar, moved, average, part.lengths), False, state.is_shared)

    def is_averaged(self, index: int) -> bool:
        """Whether a part has been averaged."""
        return self._states[index].done.is_set()

    def is_crowded(self, index: int) -> bool:
        """Whether the average of part ``index`` must be sent soon, because a full window of later ones is waiting."""
        return index + self._window < len(self._states) and self.is_averaged(index + self._window)

    async def peek(self, index: int) -> torch.Tensor | None:
        """Wait for the average of a part without taking it.

        Raises:
            AllreduceException: this member could not average a part.
        """
        state = self._states[index]
        await state.done.wait()
        self._check_error()
        return state.average

    async def reply(self, index: int, sender: int) -> tuple[SerializedTensor | None, PartStatus]:
        """Wait for the average of a part, and encode it for a sender.

        With a lossy codec the reply is the difference between the average and the sender's values. It is smaller than
        the average itself, so the codec loses less.

        Returns:
            The bytes, or ``None`` for "unchanged"; and their meaning.

        Raises:
            ProtocolError: the sender was given up before it delivered the part.
        """
        state = self._states[index]
        await state.done.wait()
        if sender not in state.takers:
            raise ProtocolError(f"part {index} was averaged without this member, or it holds the average already")
        part, average, sent = self._parts[index], state.average, state.values.get(sender)
        try:
            if average is None:
                return None, PartStatus.UNCHANGED
            if state.messages is not None:
                return state.messages.pack(sender), PartStatus.MESSAGES
            # Lossy codecs are for floating point numbers only, and receivers refuse differences of other types.
            if part.codec.lossy and sent is not None and sent.is_floating_point() and part.codec.for_averages is None:
                difference = average - sent
                if all_finite(difference) or all_finite(sent):
                    difference = without_overflow(difference)
                    return part.codec.compress(difference, part.info, allow_inplace=True), PartStatus.DELTA
            if state.encoded is None:
                state.encoded = part.returned.compress(average)
            return state.encoded, PartStatus.VALUES
        finally:
            self._taken(state, sender)

    def _taken(self, state: _PartState, member: int) -> None:
        state.takers.discard(member)
        if not state.takers:
            state.average = state.encoded = state.messages = None
            state.values.clear()

    def find_who_holds_up(self) -> set[int]:
        """Senders that have not delivered the first open part although others are half a window ahead."""
        for index, state in enumerate(self._states):
            if not state.is_complete:
                later = self._states[min(index + self._window // 2, len(self._states) - 1)]
                return self.waiting_for - state.values.keys() if later.values else set()
        return set()

    def delivered_everything(self, sender: int) -> None:
        """Note that a sender has delivered all its parts and received its averages."""
        self.waiting_for.discard(sender)
        self._check_finished()

    def ban(self, sender: int, reason: str) -> None:
        """Stop waiting for a sender. The parts that it has delivered still count."""
        if sender not in self.waiting_for:
            return
        self.waiting_for.discard(sender)
        self.banned[sender] = reason
        self._reduce_complete_parts()
        self._note_who_is_missing()
        self._check_finished()

    def _note_who_is_missing(self) -> None:
        """Note which senders are missing. No sender is late with the first open part before others have delivered."""
        if self.waits is None:
            return
        while self._first < len(self._states) and self._states[self._first].is_complete:
            self._first += 1
        values = self._states[self._first].values if self._first < len(self._states) else {}
        self.waits.miss(self.waiting_for - values.keys() if values else (), Missing.PARTS)

    def _check_finished(self) -> None:
        if not self.waiting_for:
            self.finished.set()

    def _reduce_complete_parts(self) -> None:
        for index, state in enumerate(self._states):
            if not state.is_complete:
                self._reduce_if_complete(state, index)

    def _reduce_if_complete(self, state: _PartState, index: int) -> None:
        if self.waiting_for - state.values.keys():
            return
        try:
            self.reduce(state, index)
        except Exception as e:
            logger.exception("could not average a part")
            self._give_up(e)

    def _give_up(self, error: Exception) -> None:
        """Fail the whole reducer, because the error is this member's own and not the fault of the part's sender."""
        self._error = self._error or error
        self.waiting_for.clear()
        for state in self._states:
            state.is_complete = True
            state.done.set()
        self.finished.set()

    async def finish(self) -> None:
        """Wait until no more senders are awaited and all parts are averaged.

        Raises:
            AllreduceException: this member could not average a part.
        """
        try:
            await self.finished.wait()
            while self._at_work and self._error is None:
                await asyncio.wait(self._at_work)
        finally:
            await self.close()
        self._check_error()

    async def close(self) -> None:
        """Stop the work on averages, because they are no longer needed."""
        await cancel_and_wait(*self._at_work)

    def _check_error(self) -> None:
        if self._error is not None:
            raise AllreduceException(f"this peer could not average a part: {self._error}") from self._error

    def reduce(self, state: _PartState, index: int) -> None:
        """Average one part from the members that have sent it."""
        senders, part = sorted(state.values), self._parts[index]
        state.is_complete = True
        state.takers = {*senders, self._local_index} if self._own_values is not None else set(senders)
        state.is_shared = bool(senders) or not self._senders
        self.left_out |= self._senders.difference(senders)
        if isinstance(part.codec, Relayed):
            self._note_messages(state, index, part.codec)
            return
        if self._combiner is None:
            self._note_average(state, index, self._mean(state, part))
            return
        # The mean would show values that are not finite; other rules might hide them.
        self._leave_out_not_finite(state)
        order, values = self._counting(state, part, trust_own=False)
        combination = self._combiner.combination(order, values, self.weights, part)
        if combination.is_heavy:
            task = asyncio.ensure_future(self._work(state, index, combination))
            self._at_work[task] = None
            task.add_done_callback(self._at_work.pop)
        else:
            self._note_average(state, index, _in_range(combination.make()))

    async def _work(self, state: _PartState, index: int, combination: Combination) -> None:
        """Let the rule make an average in a thread."""
        try:
            async with self._one_at_a_time:
                average = await run_in_worker(lambda: _in_range(combination.make()))
            if not state.done.is_set():  # otherwise this member has given up
                self._note_average(state, index, average)
        except Exception as e:
            logger.exception("could not average a part")
            self._give_up(e)

    def _note_average(self, state: _PartState, index: int, average: torch.Tensor | None) -> None:
        part, state.average = self._parts[index], average
        if part.codec.for_averages is not None and average is not None:
            # This member, too, takes the values that the others will decode.
            state.encoded, state.average = part.returned.codec.compress_and_decode(average, part.info)
        if not part.codec.lossy or part.codec.for_averages is not None:  # only differences need the sent values
            state.values.clear()
        state.done.set()

    def _note_messages(self, state: _PartState, index: int, codec: Relayed) -> None:
        """Average the messages of the members, and decide whether to send others the messages or their mean."""
        part = self._parts[index]
        order, received = self._counting(state, part)
        messages = PartMessages.of(codec, part.info, order, [self.weights[member] for member in order], received)
        state.average = messages.mean()
        if messages.pay(part.info):
            state.messages = messages
        elif state.average is not None:
            state.encoded, state.average = codec.back.compress_and_decode(state.average, part.info)
        state.values.clear()
        state.done.set()

    def _mean(self, state: _PartState, part: Part) -> torch.Tensor | None:
        mean = self._mean_of(*self._counting(state, part))
        if mean is None or all_finite(mean):
            return mean
        self._leave_out_not_finite(state)
        # Shares may add up to more than 1.
        return _in_range(self._mean_of(*self._counting(state, part, trust_own=False)))

    def _mean_of(self, members: Sequence[int], values: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return weighted_mean(values, [self.weights[member] for member in members])

    def _counting(
        self, state: _PartState, part: Part, *, trust_own: bool = True
    ) -> tuple[list[int], list[torch.Tensor]]:
        """The members whose values count, in order, and their values."""
        values = {sender: sent for sender, sent in state.values.items() if sent is not None}
        own = None if self._own_values is None else self._own_values(part)
        if own is not None and (trust_own or all_finite(own)):
            values[self._local_index] = self._counted(own, part, state)
        order = sorted(values)
        return order, [values[member] for member in order]

    def _leave_out_not_finite(self, state: _PartState) -> None:
        """Leave out members that have sent values that are not finite, and report those with a weight above 0."""
        state.values.pop(self._local_index, None)
        for sender, values in sorted(state.values.items()):
            if values is not None and not all_finite(values):
                state.values[sender] = None
                if self.weights[sender] > 0:
                    self._on_not_finite(sender)

    def _counted(self, values: torch.Tensor, part: Part, state: _PartState) -> torch.Tensor:
        """This member's own values as they count in an average with those that have arrived.

        Own values do not travel, so no codec has changed them. If members hold nearly the same values (parameters, for
        example), the codec is applied to own values as well. It makes the same error in the same values, so the error
        cancels out in the differences that members get back, and members that agree keep their values. If members have
        little in common (gradients, for example), own values count exactly. If all members take one result, own values
        always count as if they had been sent, so that the result does not depend on which member reduces them.
        """
        if isinstance(part.codec, Relayed):
            return as_bytes(part.compress(values))
        if part.codec.for_averages is not None:
            return part.codec.compress_and_decode(values, part.info)[1]
        if not part.codec.lossy or not state.values or part.info.role is TensorRole.GRADIENT:
            return values
        others = [sent for i, sent in sorted(state.values.items()) if sent is not None and self.weights[i] > 0]
        if not others or not values.is_floating_point():
            return values
        # Tensor by tensor, so that the average of one does not depend on which others are cut together with it.
        own, sent = (each.split_with_sizes(part.lengths) for each in (values, others[0]))
        similar = [_are_similar(*pair) for pair in zip(own, sent, strict=True)]
        if not any(similar):
            return values
        decoded = part.codec.compress_and_decode(values, part.info)[1]
        if not all(similar):
            state.similar = similar
            decoded = _choose(similar, decoded, values, part.lengths)
        state.values[self._local_index] = decoded
        return decoded
