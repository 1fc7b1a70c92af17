"""The messages that averagers send each other, how their calls fail, and how several tasks share one call.

Each group of messages belongs to one kind of call: joining a group, sending parts to a reducer, completing a round, and
downloading a state. Types and ranges are checked while a message is decoded.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from shoal.averaging.control import LossCause
from shoal.base.logs import words_of
from shoal.compression.base import SerializedTensor, TensorMetadata
from shoal.errors import (
    DialError,
    P2PDaemonError,
    P2PHandlerError,
    ProtocolError,
    RefusedDialError,
    StreamClosedError,
)
from shoal.net.resumable import ALIVE_PER_TIMEOUT, GaveUpError, PeerLeftError
from shoal.net.transport import Amount, Buffer, Count, Moment, PeerIDBytes
from shoal.p2p import Call, Header

# The errors with which a call to another peer fails.
CALL_FAILURES = (P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError)
# The errors that another member can cause here. None of them may end the round. The last two come from codecs that get
# bad bytes.
PEER_FAILURES = (*CALL_FAILURES, ValueError, RuntimeError)

PartKey = tuple[int, int]
"""A reducer and the index of one of its parts."""


class Code(IntEnum):
    """Answer to a request to join a group."""

    ACCEPTED = 1
    GROUP_STARTS = 2
    GROUP_DISBANDED = 3
    NOT_LOOKING_FOR_GROUP = 4
    SETTINGS_DIFFER = 5
    BAD_EXPIRATION_TIME = 6
    NOT_A_LEADER = 7
    DUPLICATE_PEER_ID = 8
    GROUP_IS_FULL = 9
    PROTOCOL_VIOLATION = 10
    REFUSED = 11
    OTHER_MODEL = 12


# The largest gathered value of a member (chosen). The leader sends those of all members in one message.
MAX_GATHERED_BYTES = 2**16
# Chosen: the id of a group and the number of a phase take 21 bytes today, and later versions may need more.
MAX_ROUND_ID_BYTES = 64
# Chosen: far more than any line has, in any unit.
MAX_BANDWIDTH = 1e12

# Derived: a digest of 32 bytes and a signature of 64.
STATEMENT_BYTES = 96

RoundID = Annotated[bytes, Meta(max_length=MAX_ROUND_ID_BYTES)]
Mode = Annotated[int, Meta(ge=0, le=2)]
"""A number of :class:`~shoal.averaging.control.AveragingMode`."""
Gathered = Annotated[bytes, Meta(max_length=MAX_GATHERED_BYTES)]
Norm = Annotated[float, Meta(ge=0.0, le=1e300)]
Statement = Annotated[bytes, Meta(max_length=STATEMENT_BYTES)]
"""A member's signed statement about its norms, see :mod:`shoal.averaging.round.combining`."""
Bandwidth = Annotated[float, Meta(ge=0.0, le=MAX_BANDWIDTH)]
"""Relative to that of the other members; 0: the others reduce."""


class PeerAddresses(Header):
    """A peer and the addresses under which it can be dialled."""

    peer_id: PeerIDBytes
    addresses: list[str] = msgspec.field(default_factory=list)


class JoinRequest(Header):
    """A follower asks a leader to let it join the group."""

    group_key: str
    settings: dict[str, str]
    """The settings that must be the same in all members, in readable form."""
    expiration: Moment
    """DHT time until which the follower waits for the group to start."""
    mode: Mode
    gathered: Gathered = b""
    bandwidth: Bandwidth | None = None
    expected_group_size: Count | None = None
    """The number of members that the follower expects. It counts if the leader does not know how many to expect."""
    reach: Annotated[int, Meta(ge=0, le=255)] = 0
    """How others call the follower, see :class:`shoal.reach.reachability.Reach`."""
    relay_rate: Amount = 0.0
    """Bytes per second that its relays carry in total; 0: they set no limit, or it has none."""
    search: Count = 0
    """The number of the follower's search. Two requests of a client may differ in nothing else."""


class Leave(Header):
    """A follower leaves the group."""


class Member(Header):
    """One member of a group that starts."""

    peer: PeerAddresses
    mode: Mode
    share: Count
    """The number of the vector's values that this member reduces."""
    gathered: Gathered = b""


class GroupStart(Header):
    """A complete group, as its leader announces it."""

    group_id: bytes
    members: list[Member]


class JoinReply(Header):
    """The leader's first answer, and later the outcome."""

    code: int
    text: str = ""
    expiration: Moment = 0.0
    """DHT time at which the leader will start."""
    better_leader: PeerAddresses | None = None
    group: GroupStart | None = None


class Invitation(Header):
    """A peer that may lead invites a peer that may follow it."""

    group_key: str
    expiration: Moment


class InvitationReply(Header):
    """The answer of an invited peer. With no field set: it does not join, or it has asked to join already."""

    request: JoinRequest | None = None
    """The invited peer joins. The call continues as after a request to join."""
    better_leader: PeerAddresses | None = None
    """The invited peer does not join, because it follows this leader; or it names itself, because it leads."""
    expiration: Moment = 0.0
    """DHT time at which that leader will start."""


# Chosen: parts travel in order, so there are few gaps at a time, about one for each connection.
MAX_GAPS = 256

Gaps = Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_GAPS)]
"""Ranges of missing parts, in order: for each one the first index, and the index after the last one."""


class Resume(Header, omit_defaults=True):
    """The parts and averages that a member lacks when an exchange restarts."""

    missing_parts: Gaps = msgspec.field(default_factory=list)
    missing_averages: Gaps = msgspec.field(default_factory=list)


class BeginReduce(Header, omit_defaults=True):
    """First message of a sender to a reducer."""

    round_id: RoundID
    weight: Amount
    stripe: Count = 0
    """The number of this call among those of the sender, from 0."""
    stripes: Count = 1
    """The number of calls over which the sender spreads its parts."""
    norms: list[Norm] = msgspec.field(default_factory=list)
    """The norm of each reducer's share of the sender's vector, if the group's aggregation rule needs it."""
    statement: Statement = b""
    resume: Count = 0
    """How often the exchange of these two members has restarted because a connection broke. Above 0, the reducer
    answers with :class:`Resume`, and the next field counts."""
    lacks: Resume = msgspec.field(default_factory=Resume)
    """What the sender still lacks: averages from the reducer and, if it also reduces, parts."""


class PartStatus(IntEnum):
    VALUES = 1
    """The payload holds a sender's values, or the average."""
    DELTA = 2
    """The payload holds the difference between the average and the sender's values as the reducer has decoded them."""
    UNCHANGED = 3
    """No payload. From a reducer: all weights were 0, keep the local values. From a sender: some values of this part
    are not finite."""
    MESSAGES = 4
    """From a reducer: the payload holds what the members have sent, see :mod:`shoal.averaging.message_means`."""


class PartHeader(msgspec.Struct, array_like=True):
    """The description of one part that is needed to read its bytes."""

    status: int
    metadata: TensorMetadata | None = None
    nbytes: Count = 0
    """The size of the whole part on the wire."""


class PartMessage(Header, array_like=True):
    """Parts or averages; their bytes follow as the payload.

    There are many of these messages, so they are encoded as arrays, without field names.
    """

    index: Count = 0
    """The index of the first part, among those of the reducer."""
    parts: list[PartHeader] = msgspec.field(default_factory=list)
    """One part (the payload may be a slice of it), or several small parts in a row. Empty: no more parts come on this
    call."""
    is_average: bool = False
    """Whether these are averages from the reducer, rather than the values of one member for the reducer."""
    offset: Count = 0
    """The offset of the payload within the part, in bytes, if it is a slice."""
    held: Count = 0
    """How many averages of the receiver the sender holds, from the first one on. The receiver need no longer keep them
    for the case that a connection breaks."""
    left_out: list[Count] = msgspec.field(default_factory=list)
    """If these are averages: members whose values are missing in these averages, or in earlier ones."""


Ranges = list[tuple[Count, Count, Count]]
"""Ranges of parts: the reducer, the first index, and the index after the last one."""


class RoundMessage(Header, tag=0):
    """A message between a member and the coordinator of a round. Each kind is a subclass with a tag of its own."""


class Greeting(RoundMessage, tag=1, omit_defaults=True):
    """From a member: its first message."""

    round_id: RoundID
    weight: Amount = 0.0
    late: bool = False
    """The member was late before."""
    missed: bool = False
    """The member knows that others have committed the round without it."""
    norms: list[Norm] = msgspec.field(default_factory=list)
    """As in :class:`BeginReduce`, and signed by the next field."""
    statement: Statement = b""


class RoundAlive(RoundMessage, tag=2):
    """Either way: a heartbeat. Also the coordinator's answer to a greeting."""


class Report(RoundMessage, tag=3, omit_defaults=True):
    """From a member whose exchange of parts is over."""

    held: list[Count]
    """The number of averages of each reducer that it holds, from the first one on."""
    not_finite: list[Count] = msgspec.field(default_factory=list)
    """Members whose values it has left out, because they are not finite."""
    left_out: list[Count] = msgspec.field(default_factory=list)
    """Members that it gave up, so that some parts were averaged without their values."""
    statements: list[Statement] = msgspec.field(default_factory=list)
    """The statement that it has got from each member, see :class:`BeginReduce`; empty: none."""
    waits: dict[Count, Amount] = msgspec.field(default_factory=dict)
    """By member: the seconds that it has waited for that one alone."""


class MembersLost(RoundMessage, tag=4):
    """From the coordinator: do not wait for these members."""

    lost: dict[Count, LossCause]


class Assignment(RoundMessage, tag=5, omit_defaults=True):
    """From the coordinator: parts to send to it, and parts that it will send."""

    send: Ranges = msgspec.field(default_factory=list)
    expect: Ranges = msgspec.field(default_factory=list)


class AssignedPart(RoundMessage, tag=6):
    """Either way: one part; its bytes follow as the payload."""

    reducer: Count
    index: Count
    part: PartHeader


class Restart(RoundMessage, tag=7):
    """From the coordinator: the assignment is void, report again."""


class Commit(RoundMessage, tag=8, omit_defaults=True):
    """From the coordinator, its last message: all members have all averages that could be recovered."""

    weights: list[Amount]
    """The weight of each member in the average."""
    lost: dict[Count, LossCause] = msgspec.field(default_factory=dict)
    not_finite: list[Count] = msgspec.field(default_factory=list)
    """The members named in all reports. The same holds for the next field."""
    left_out: list[Count] = msgspec.field(default_factory=list)
    untrue: list[Count] = msgspec.field(default_factory=list)
    """Members that have announced different norms to different members."""
    statements: list[Statement] = msgspec.field(default_factory=list)
    """Two of each member in ``untrue``."""
    waits: dict[Count, Amount] = msgspec.field(default_factory=dict)
    """By member: the seconds that the group has waited for that one alone."""


class Delivered(RoundMessage, tag=9):
    """From a member: it has sent all its parts."""


class Late(RoundMessage, tag=10):
    """From the coordinator: the others do not wait for this member, so it must stop. From the member: it has stopped,
    and wants the result when the round is over."""


class Resigns(RoundMessage, tag=11):
    """From the coordinator: it is late itself, and the next one takes over."""


class RoundOver(RoundMessage, tag=13):
    """From the coordinator, instead of an answer to a greeting: the round was committed without this member."""


class RoundStatus(IntEnum):
    UNKNOWN = 0
    RUNNING = 1
    FINISHED = 2
    LEFT = 3
    """Over for this member, without a result."""


class StatusRequest(Header, omit_defaults=True):
    """Asks a member about a round, and tells it which calls between the two have broken. It may not know yet."""

    round_id: RoundID
    resume: Count = 0
    """All calls on which the two exchange parts are broken if their exchange has restarted less often than this."""
    is_link_broken: bool = False
    """The call on which one of the two follows the other as its coordinator is broken."""


class StatusReply(Header, omit_defaults=True):
    status: int
    has_given_up: bool = False
    """The answering member has given up the asker in this round."""
    is_waiting: bool = False
    """The answering member is only waiting for its coordinator."""
    follows_another: bool = False
    """The answering member no longer follows the asker as its coordinator."""


class DownloadRequest(Header):
    """Asks for this averager's state; requests for chunks follow."""

    part: Annotated[bytes, Meta(max_length=1024)] = b""
    """The name of a part of the state, as averagers of one kind agree on it; empty: all of it."""
    trains: bool = True
    """Whether the asker will train with it; an archive only keeps it."""
    agreement: dict[str, str] = msgspec.field(default_factory=dict)
    """Settings that must be the same in both peers, as far as both have them."""


class StateAnswer(Header, tag=0):
    """A donor's answer to a request for its state. Each kind is a subclass with a tag of its own."""


class StateHeader(StateAnswer, tag=1):
    """The description of the state, with the hash of each chunk as the payload."""

    metadata: bytes = b""
    tensors: list[TensorMetadata] = msgspec.field(default_factory=list)
    tensor_bytes: list[Count] = msgspec.field(default_factory=list)


class StateRefused(StateAnswer, tag=2):
    """The donor does not give its state to this newcomer."""

    contradiction: str = ""
    """The settings that differ, in words; empty: it shares its state with no peer."""


class DonorBusy(StateAnswer, tag=3):
    """Too many others are downloading."""

    again_in: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """The number of seconds after which a slot may be free."""


class ChunkRequest(Header):
    """Asks for one chunk of the state."""

    index: Count


class StateChunk(Header):
    """One chunk; the payload holds its bytes."""

    index: Count


class NotFiniteError(ProtocolError):
    """A member has sent values that are not finite where there must be none."""


class ResignedError(ProtocolError):
    """The coordinator is late itself and has resigned."""


class MissedError(ProtocolError):
    """The round was committed without this member."""


class Loss(NamedTuple):
    """Why a member no longer takes part in a round."""

    cause: LossCause
    reason: str
    """The cause in words, for the log and for errors."""

    @classmethod
    def of(cls, error: BaseException) -> Loss:
        """The loss that follows from the error that a member's failure caused."""
        causes = (cause for kinds, cause in _CAUSES if isinstance(error, kinds))
        return cls(next(causes, LossCause.BROKE_PROTOCOL), reason_of(error))


_CAUSES: tuple[tuple[type[BaseException], LossCause], ...] = (
    (RefusedDialError, LossCause.REFUSED),
    (DialError, LossCause.UNREACHABLE),
    (TimeoutError, LossCause.SILENT),
    (GaveUpError, LossCause.GAVE_UP),
    (PeerLeftError, LossCause.LEFT),
    (StreamClosedError, LossCause.CONNECTION_BROKE),
    (asyncio.CancelledError, LossCause.CONNECTION_BROKE),
    (NotFiniteError, LossCause.BAD_VALUES),
    (ResignedError, LossCause.RESIGNED),
    (MissedError, LossCause.LEFT),
)


def reason_of(error: BaseException) -> str:
    """Why a member failed, in words, from the error that its failure caused."""
    if isinstance(error, TimeoutError):
        return "silent for too long"
    if isinstance(error, asyncio.CancelledError):
        return "the connection ended"
    return words_of(error)


DescribedPart = tuple[PartHeader, "tuple[Buffer, ...]"]


def describe_part(status: PartStatus, encoded: SerializedTensor | None) -> DescribedPart:
    """The header and the bytes of a part; ``None``: there are no values to send, the status becomes ``UNCHANGED``."""
    if encoded is None:
        return PartHeader(int(PartStatus.UNCHANGED)), ()
    return PartHeader(int(status), encoded.metadata, len(encoded.buffer)), (encoded.buffer,)


class SharedCall:
    """A call on which several tasks send. A lock keeps their messages apart."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._lock = asyncio.Lock()

    async def send(self, message: RoundMessage, *payload: Buffer, end: bool = False) -> None:
        async with self._lock:
            await self.call.send(message, *payload, end=end)

    async def send_part(self, key: PartKey, encoded: SerializedTensor | None) -> None:
        """Send one part; ``None``: it has no average."""
        reducer, index = key
        part, payload = describe_part(PartStatus.VALUES, encoded)
        await self.send(AssignedPart(reducer, index, part), *payload)


async def show_life(shared: SharedCall, silence: float) -> None:
    """Send heartbeats until cancelled. The other side gives this one up after ``silence`` seconds without a message."""
    while True:
        await asyncio.sleep(silence / ALIVE_PER_TIMEOUT)
        await shared.send(RoundAlive())
