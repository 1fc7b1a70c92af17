"""One averaging step as its caller sees it (a future with settings and a trigger), and the result of a round."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from shoal.base.clock import get_dht_time
from shoal.base.reactor import AwaitableFuture
from shoal.base.tasks import first_completed
from shoal.net.transport import MOST
from shoal.p2p import PeerID

logger = logging.getLogger(__name__)

Gathered = dict[PeerID, Any]
"""By member, the value that it gave as ``gather``."""


# Chosen: 160 random bits never repeat by chance.
GROUP_ID_BYTES = 20


class AveragingMode(IntEnum):
    """The role of a member in the group."""

    NODE = 0
    """Sends its tensors and reduces a share."""
    CLIENT = 1
    """Sends only, because no peer can connect to it."""
    AUX = 2
    """Reduces only, because it has no data of its own."""


class Absence(Enum):
    """Why a peer that this one has seen or expected is not in its group."""

    DID_NOT_COME = "was not seen looking for a group"
    DID_NOT_JOIN = "looked for a group and did not join this one in time"
    NOT_LOOKING = "does not look for a group, or is in another one"
    FOLLOWS_ANOTHER = "follows another leader"
    FULL = "its group was full"
    DISBANDED = "its group did not come about"
    LEFT = "gave up its step"
    SILENT = "did not answer"
    BROKEN = "the connection to it broke"
    UNREACHABLE = "could not be reached"
    BACKED_OFF = "rested after failures"
    OTHER_SETTINGS = "has other settings"
    REFUSES = "refuses this peer"
    REFUSED = "is refused by this peer"

    @property
    def key(self) -> str:
        """Its name in the metrics."""
        return self.name.lower().replace("_", " ")

    @property
    def is_usual(self) -> bool:
        """Whether this is normal when honest peers on good lines form several groups at once."""
        usual = (Absence.DID_NOT_JOIN, Absence.NOT_LOOKING, Absence.FOLLOWS_ANOTHER, Absence.FULL, Absence.DISBANDED)
        return self in usual


@dataclass(frozen=True)
class GroupInfo:
    """A group as its leader announced it; the same in all members."""

    group_id: bytes
    """A random id of this group."""
    peer_ids: tuple[PeerID, ...]
    """All members. A member's position in this order identifies it in the messages of a round."""
    gathered: tuple[bytes, ...]
    """The serialized value that each member gave as ``gather``, in the same order."""
    modes: tuple[int, ...] = ()
    """Each member's :class:`~AveragingMode`."""
    shares: tuple[int, ...] = ()
    """The number of the vector's values that each member reduces."""
    largest_weights: tuple[float, ...] = field(default=(), compare=False)
    """The largest weight of each member in the parts that this peer reduces, whatever it claims; empty: no limits."""
    leader: PeerID | None = field(default=None, compare=False)
    """The leader of the group; ``None``: this peer."""
    absent: Mapping[PeerID, Absence] = field(default_factory=dict, compare=False)
    """Peers that this one has seen or expected and that are not in the group, and why."""

    @property
    def group_size(self) -> int:
        return len(self.peer_ids)

    def limited(self, index: int, weight: float) -> float:
        """The part of a member's claimed weight that counts here."""
        return min(weight, self.largest_weights[index]) if self.largest_weights else weight

    def __contains__(self, peer_id: PeerID) -> bool:
        return peer_id in self.peer_ids


class LossCause(IntEnum):
    """Why a member of a round was lost. The names are counted in ``metrics.members_lost_by_cause``."""

    OTHER = 0
    """A cause that this version does not know."""
    REFUSED = 1
    """Its machine refuses connections: its process has ended."""
    UNREACHABLE = 2
    """It could not be dialled."""
    CONNECTION_BROKE = 3
    """Its connection broke, and it did not come back."""
    SILENT = 4
    """It sent nothing and did not answer, or did not do its part in time."""
    BROKE_PROTOCOL = 5
    """It sent something that the protocol does not allow, or its call failed."""
    BAD_VALUES = 6
    """It sent averages that are not finite."""
    LATE = 7
    """It was too late for the quorum, or came back after its parts were averaged without it."""
    LEFT = 8
    """It left the round."""
    RESIGNED = 9
    """As the coordinator it was late itself."""
    STUCK = 10
    """As the coordinator it did not end the round."""
    GAVE_UP = 11
    """It has given this peer up."""
    EARLIER = 12
    """It failed in an earlier phase."""

    @classmethod
    def _missing_(cls, value: object) -> LossCause:
        return cls.OTHER


class AveragingStage(IntEnum):
    """The progress of a step."""

    IDLE = 0
    LOOKING_FOR_GROUP = 1
    AWAITING_TRIGGER = 2
    RUNNING_ALLREDUCE = 3
    FINISHED = 4


@dataclass(frozen=True)
class MemberTraffic:
    """The traffic between this peer and another member of a round."""

    bytes_sent: int = 0
    """The size of encoded parts and averages. Includes retransmissions after a connection broke."""
    bytes_received: int = 0
    seconds: float = 0.0
    """From the trigger to the last part or average that came from it; 0 if none came."""

    def __add__(self, other: MemberTraffic) -> MemberTraffic:
        return MemberTraffic(
            self.bytes_sent + other.bytes_sent, self.bytes_received + other.bytes_received, self.seconds + other.seconds
        )


@dataclass(frozen=True)
class RoundResult:
    """The result of one all-reduce, as this peer saw it."""

    group_id: bytes
    peers: tuple[PeerID, ...]
    """All members of the group, in the order that they agree on."""
    failed_peers: tuple[PeerID, ...]
    """Members that did not deliver everything in time, or whose results did not arrive."""
    weights: tuple[float, ...]
    """Each member's weight in the average, in the order of ``peers``. It is 0 for members that only helped, failed, or
    were late. Parts that a failed or late member had delivered in time may still be in the average."""
    share_averaged: float
    """The share of the vector that now holds the group's average, from 0 to 1; the rest kept its local values."""
    auxiliaries: tuple[PeerID, ...]
    """Members that only helped."""
    late: bool
    """The group did not wait for this peer. It has the result, but has not contributed all of its values."""
    duration: float
    """Seconds from the trigger to the result."""
    not_finite_peers: tuple[PeerID, ...] = ()
    """Members that have sent NaN or infinite values, which were left out, as far as this peer has seen or heard. A
    member that noticed such values itself and took part with weight 0 is not listed."""
    left_out_peers: tuple[PeerID, ...] = ()
    """Members that stayed to the end, but whose values are missing from some averages, because a reducer had lost its
    connection to them and did not get it back. As far as this peer has heard."""
    bytes_sent: int = 0
    """The size of encoded parts and averages that this peer has sent to other members. What is sent again after a death
    is not counted, nor is protocol overhead."""
    bytes_received: int = 0
    """The same for received parts and averages."""
    seen_failing: tuple[PeerID, ...] = ()
    """Those of ``failed_peers`` whose failure this peer has seen itself; others have reported the rest."""
    causes: Mapping[PeerID, LossCause] = field(default_factory=dict)
    """Why each of ``failed_peers`` was lost, as far as this peer has seen or heard."""
    traffic: Mapping[PeerID, MemberTraffic] = field(default_factory=dict)
    """Bytes and seconds of the exchange with each other member. The bytes add up to those above."""
    absent: Mapping[PeerID, Absence] = field(default_factory=dict, compare=False)
    """Peers that this one has seen or expected while it looked for the group and that are not in it, and why."""
    waits: Mapping[PeerID, float] = field(default_factory=dict, compare=False)
    """By member: the seconds that the others waited for it alone. The same in all members; waits of less than a second
    are left out."""

    @classmethod
    def of_phases(cls, phases: Sequence[RoundResult], weights: Sequence[tuple[float, ...]]) -> RoundResult:
        """The result of several all-reduces in one group, with the smallest of the weights and averaged shares.

        A member that failed in one phase counts as failed.

        Args:
            weights: the weights of all members, for each phase that uses the weights of the step.
        """
        first = phases[0]

        def together(lists: Iterable[tuple[PeerID, ...]]) -> tuple[PeerID, ...]:
            found = set(itertools.chain.from_iterable(lists))
            return tuple(peer for peer in first.peers if peer in found)

        return cls(
            group_id=first.group_id,
            peers=first.peers,
            failed_peers=together(phase.failed_peers for phase in phases),
            weights=tuple(map(min, zip(*weights, strict=True))),
            share_averaged=min(phase.share_averaged for phase in phases),
            auxiliaries=first.auxiliaries,
            late=any(phase.late for phase in phases),
            duration=sum(phase.duration for phase in phases),
            not_finite_peers=together(phase.not_finite_peers for phase in phases),
            left_out_peers=together(phase.left_out_peers for phase in phases),
            bytes_sent=sum(phase.bytes_sent for phase in phases),
            bytes_received=sum(phase.bytes_received for phase in phases),
            seen_failing=together(phase.seen_failing for phase in phases),
            traffic={peer: sum((phase.traffic[peer] for phase in phases), MemberTraffic()) for peer in first.traffic},
            causes={peer: cause for phase in reversed(phases) for peer, cause in phase.causes.items()},
            waits={peer: waited for peer in first.peers if (waited := sum(p.waits.get(peer, 0.0) for p in phases))},
        )


def check_weight(weight: float) -> float:
    """Check that a weight is a number from 0 to 2**53, and return it.

    Raises:
        AssertionError: it is not.
    """
    is_valid = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight <= MOST
    assert is_valid, f"weight must be a number from 0 to 2**53, got {weight!r}"
    return float(weight)


class StepControl(AwaitableFuture[Gathered]):
    """Handle of an averaging step: wait for it, trigger it, change it, cancel it. Safe to use from any thread.

    Args:
        scheduled_time: DHT time at which the group should start, if it is not complete earlier.
        deadline: DHT time after which the step gives up looking for a group.
        allow_retries: look for another group when a round fails before the deadline.
        weight: this peer's weight in the average.
        data_for_gather: the serialized value for the other members.
        expected_group_size: the group starts early when it has this many members; ``None``: unknown.
        tag: which of the averager's tensors are averaged.

    Raises:
        AssertionError: the weight is not valid.
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
        self.awaited: frozenset[PeerID] | None = None
        """The peers that :attr:`expected_group_size` counts, besides this one; ``None``: unknown."""
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
        self.on_loss: Callable[[], object] = lambda: None
        """Called, inside the loop, when an awaited peer cannot be called, and when a round has failed and the step is
        about to look for another group: a peer may be gone."""
        self.round: RoundResult | None = None
        """The result of the all-reduce; set before the result of this future."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tie the step to the loop of its averager, which calls this once before it starts to work on the step."""
        self._loop, self._changed = loop, asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """Set, inside the loop, whenever a setting changes that matchmaking looks at."""
        assert self._changed is not None, "the step has not been picked up yet"
        return self._changed

    async def wait_until_near(self, seconds: float) -> None:
        """Wait, inside the loop, until the scheduled time is at most this many seconds ahead."""
        while (ahead := self._scheduled_time - seconds - get_dht_time()) > 0:
            self.changed.clear()
            await first_completed(self.changed.wait(), timeout=ahead)

    def _notify(self) -> None:
        if self._loop is not None and self._changed is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)

    @property
    def scheduled_time(self) -> float:
        """DHT time at which the group should start; may be changed while the step looks for a group."""
        return self._scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, scheduled_time: float) -> None:
        if self.began_allreduce:
            logger.warning("the scheduled time was changed after the all-reduce began: this has no effect")
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
            logger.warning("the weight was changed after the all-reduce began: this has no effect")

    @property
    def expected_group_size(self) -> int | None:
        """The group starts before the scheduled time if it has this many members; ``None``: unknown.

        Auxiliaries are not counted, because their number is unknown.
        """
        return self._expected_group_size

    @expected_group_size.setter
    def expected_group_size(self, expected: int | None) -> None:
        if expected != self._expected_group_size:
            self._expected_group_size = expected
            self._notify()

    def expect(self, peers: Collection[PeerID], least: int = 1) -> None:
        """Expect these peers and this one as members. Other peers that join do not replace any of them.

        Args:
            least: the least number of members, even if all of these peers join.
        """
        size = max(1 + len(peers), least)
        if (self.awaited, self._expected_group_size) != (peers, size):
            self.awaited, self._expected_group_size = frozenset(peers), size
            self._notify()

    @property
    def keep_open(self) -> bool:
        """While this is set, the group waits until it is complete, even beyond the scheduled time.

        It is for steps that are scheduled in advance: more members may join until the round is due.
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
        """Trigger the step: its tensors and weight are final, and the all-reduce may begin."""
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
        # The attribute is missing if the constructor has refused its arguments.
        if not getattr(self, "triggered", True) and not self.done() and self.stage > AveragingStage.IDLE:
            logger.warning("an averaging step was dropped without being triggered: its group waits in vain")
