"""One averaging step as its caller sees it: a future with a few settings and a trigger."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from shoal.clock import get_dht_time
from shoal.p2p import PeerID
from shoal.p2p.transport import MOST
from shoal.reactor import AwaitableFuture

logger = logging.getLogger(__name__)

Gathered = dict[PeerID, Any]
"""What each member of the group gave for the others to read, by member."""


GROUP_ID_BYTES = 20


class AveragingMode(IntEnum):
    """What a member does in the group."""

    NODE = 0
    """Sends its tensors and reduces a share."""
    CLIENT = 1
    """Sends only: nobody can connect to it."""
    AUX = 2
    """Reduces only: it has no data of its own."""


@dataclass(frozen=True)
class GroupInfo:
    """A group as its leader published it: the same for all members."""

    group_id: bytes
    """Random bytes that name this group and nothing else."""
    peer_ids: tuple[PeerID, ...]
    """All members; the order counts."""
    gathered: tuple[bytes, ...]
    """What each member gave for the others, in the same order."""
    modes: tuple[int, ...] = ()
    """Each member's :class:`~AveragingMode`."""
    shares: tuple[int, ...] = ()
    """How many of the vector's values each member reduces."""
    largest_weights: tuple[float, ...] = ()
    """What each member's weight is at most, whatever it says; empty: nobody's is limited."""

    @property
    def group_size(self) -> int:
        return len(self.peer_ids)

    def limited(self, index: int, weight: float) -> float:
        """What counts of the weight that a member claims. It is the same at all who reduce its values."""
        return min(weight, self.largest_weights[index]) if self.largest_weights else weight

    def __contains__(self, peer_id: PeerID) -> bool:
        return peer_id in self.peer_ids


class AveragingStage(IntEnum):
    """How far a step has come."""

    IDLE = 0
    LOOKING_FOR_GROUP = 1
    AWAITING_TRIGGER = 2
    RUNNING_ALLREDUCE = 3
    FINISHED = 4


@dataclass(frozen=True)
class RoundResult:
    """What came of one all-reduce, as this peer saw it."""

    group_id: bytes
    peers: tuple[PeerID, ...]
    """Everybody in the group, in the order that all members agree on."""
    failed_peers: tuple[PeerID, ...]
    """Members that did not deliver everything in time, or whose results did not arrive."""
    weights: tuple[float, ...]
    """Of each member's values in the average, in the order of ``peers``; 0 for those that only helped, failed, or were
    late: of these there is what they had delivered in time, and no more."""
    share_averaged: float
    """Which share of the vector now holds the group's average, from 0 to 1; the rest kept its local values."""
    auxiliaries: tuple[PeerID, ...]
    """Members that only helped."""
    late: bool
    """The group did not wait for this peer: it has the result, without having contributed everything."""
    duration: float
    """Seconds from the trigger to the result."""
    not_finite_peers: tuple[PeerID, ...] = ()
    """Members that have sent NaN or infinite values, which were left out, as far as this peer has seen it or heard of
    it in time. Not those that noticed it themselves and took part with weight 0."""


def check_weight(weight: float) -> float:
    """Weights are numbers from 0 to 2**53.

    Raises:
        AssertionError: this one is not.
    """
    is_valid = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight <= MOST
    assert is_valid, f"weight must be a number from 0 to 2**53, got {weight!r}"
    return float(weight)


class StepControl(AwaitableFuture[Gathered]):
    """Handle of an averaging step: wait for it, trigger it, change it, cancel it. Safe to use from any thread.

    Args:
        scheduled_time: DHT time at which the group should start, if it is not complete before.
        deadline: DHT time after which the step gives up looking for a group.
        allow_retries: look for another group when a round fails before the deadline.
        weight: of this peer's tensors in the average.
        data_for_gather: given to the other members, already serialized.
        tag: which of the averager's tensors are averaged.
    """

    def __init__(
        self,
        scheduled_time: float,
        deadline: float = math.inf,
        allow_retries: bool = True,
        weight: float = 1.0,
        data_for_gather: bytes = b"",
        *,
        expected_group_size: int | None = None,
        tag: str = "",
    ) -> None:
        super().__init__()
        self._scheduled_time = scheduled_time
        self._weight = check_weight(weight)
        self._expected_group_size = expected_group_size
        self.deadline = deadline
        self.allow_retries = allow_retries
        self.data_for_gather = data_for_gather
        self.tag = tag
        self._keep_open = False
        self.released_at: float | None = None
        """DHT time at which ``keep_open`` ended, if it was set."""
        self.stage = AveragingStage.IDLE
        self.began_allreduce = False
        self.triggered = False
        self.round: RoundResult | None = None
        """What came of the all-reduce; set before the result."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called once by the averager, inside its loop, before it starts working on the step."""
        self._loop, self._changed = loop, asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set, inside the loop, whenever a setting changes that matchmaking looks at."""
        assert self._changed is not None, "the step has not been picked up yet"
        return self._changed

    def _notify(self) -> None:
        if self._loop is not None and self._changed is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    @property
    def scheduled_time(self) -> float:
        """DHT time at which the group should start; may be moved while looking for a group."""
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, scheduled_time: float) -> None:
        if self.began_allreduce:
            logger.warning("the scheduled time was changed after the all-reduce began: it has no effect any more")
        if scheduled_time >= self.deadline:
            logger.warning("the scheduled time was moved beyond the deadline of the step")
        self._scheduled_time = scheduled_time
        self._notify()

    @property
    def weight(self) -> float:
        """Weight of this peer's tensors; read when the all-reduce begins."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = check_weight(weight)
        if self.began_allreduce:
            logger.warning("the weight was changed after the all-reduce began: it has no effect any more")

    @property
    def expected_group_size(self) -> int | None:
        """The group starts as soon as it has this many members, before the scheduled time; ``None`` = unknown.

        Auxiliaries are not counted: nobody knows how many there are.
        """
        return self._expected_group_size

    @expected_group_size.setter
    def expected_group_size(self, expected: int | None) -> None:
        if expected != self._expected_group_size:
            self._expected_group_size = expected
            self._notify()

    @property
    def keep_open(self) -> bool:
        """While this is set the group waits until it is complete, also beyond the scheduled time.

        For steps that are scheduled in advance: until the round is known to be due there is time for more members.
        """
        return self._keep_open

    @keep_open.setter
    def keep_open(self, keep_open: bool) -> None:
        if self._keep_open and not keep_open:
            self.released_at = get_dht_time()
        self._keep_open = keep_open
        self._notify()

    def get_timeout(self) -> float | None:
        """Seconds left until the deadline, or ``None`` if there is none."""
        return None if math.isinf(self.deadline) else max(0.0, self.deadline - get_dht_time())

    def allow_allreduce(self) -> None:
        """Trigger the step: its tensors and weight are final, the all-reduce may begin."""
        if self.triggered:
            logger.warning("this step was triggered before: the second call has no effect")
            return
        self.triggered = True
        self._notify()

    async def wait_for_trigger(self) -> None:
        """Wait, inside the loop, until :meth:`allow_allreduce` has been called."""
        while not self.triggered:
            self.changed.clear()
            if not self.triggered:
                await self.changed.wait()

    def __del__(self) -> None:
        # getattr: the constructor may have refused its arguments
        if not getattr(self, "triggered", True) and not self.done() and self.stage > AveragingStage.IDLE:
            logger.warning("an averaging step was dropped without being triggered: its group has to wait for nothing")
