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
# The errors that another member can cause here. None of them may end the round. Bad bytes may make codecs raise the
# last two.
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


# The most bytes that a member may give for the others to read. The leader sends those of all members in one message.
MAX_GATHERED_BYTES = 2**16
# The id of a group and the number of a phase take 21 bytes today; later versions may need more.
MAX_ROUND_ID_BYTES = 64
MAX_BANDWIDTH = 1e12

# A digest of 32 bytes and a signature of 64.
STATEMENT_BYTES = 96

RoundID = Annotated[bytes, Meta(max_length=MAX_ROUND_ID_BYTES)]
Mode = Annotated[int, Meta(ge=0, le=2)]
"""A number of :class:`~shoal.averaging.control.AveragingMode`."""
Gathered = Annotated[bytes, Meta(max_length=MAX_GATHERED_BYTES)]
Norm = Annotated[float, Meta(ge=0.0, le=1e300)]
Statement = Annotated[bytes, Meta(max_length=STATEMENT_BYTES)]
"""A member's signed statement about its norms, see :mod:`shoal.averaging.round.combining`."""
Bandwidth = Annotated[float, Meta(ge=0.0, le=MAX_BANDWIDTH)]
"""Relative to that of the other members; 0: the others shall reduce."""


class PeerAddresses(Header):
    """A peer and the addresses under which it can be dialled."""

    peer_id: PeerIDBytes
    addresses: list[str] = msgspec.field(default_factory=list)


class JoinRequest(Header):
    """A follower asks a leader to let it join the group."""

    group_key: str
    settings: dict[str, str]
    """Everything that must be the same in all members, in readable form."""
    expiration: Moment
    """DHT time until which the follower waits for the group to start."""
    mode: Mode
    gathered: Gathered = b""
    bandwidth: Bandwidth | None = None
    expected_group_size: Count | None = None
    """For a leader that does not know how many to expect."""
    reach: Annotated[int, Meta(ge=0, le=255)] = 0
    """How others call the follower, see :class:`shoal.reach.reachability.Reach`."""
    relay_rate: Amount = 0.0
    """Bytes per second that its relays carry for all; 0: they set no limit, or there are none."""
    search: Count = 0
    """The number of the follower's search. Those of a client in no hurry do not differ in anything else."""


class Leave(Header):
    """A follower does not want to be in the group any more."""


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
    """A peer that may lead tells a peer that may follow it that it looks for a group, too."""

    group_key: str
    expiration: Moment


class InvitationReply(Header):
    """Whether the invited peer joins. With no field set: it does not, or it has asked to join already."""

    request: JoinRequest | None = None
    """The invited peer joins. The call goes on as after a request to join."""
    better_leader: PeerAddresses | None = None
    """The invited peer does not join, because it follows this leader; or it names itself, because it leads."""
    expiration: Moment = 0.0
    """DHT time at which that leader will start."""


# Parts travel in order, so few gaps are open at a time: about one for each connection.
MAX_GAPS = 256

Gaps = Annotated[list[tuple[Count, Count]], Meta(max_length=MAX_GAPS)]
"""Ranges of parts that have not come, in order: for each one the first index, and the index after the last one."""


class Resume(Header, omit_defaults=True):
    """What a member lacks when an exchange restarts."""

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
    """How often the exchange of these two members has begun anew because a connection broke. If it has, the reducer
    answers with :class:`Resume`, and the next field counts."""
    lacks: Resume = msgspec.field(default_factory=Resume)
    """What the sender still lacks: averages of the reducer, and as a reducer itself, parts."""


class PartStatus(IntEnum):
    VALUES = 1
    """The payload holds values: those of a sender, or the average."""
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

    There are many of these messages. So they are encoded as arrays, without the names of the fields.
    """

    index: Count = 0
    """The index of the first part, among those of the reducer."""
    parts: list[PartHeader] = msgspec.field(default_factory=list)
    """One part, of which the payload may be a slice; or several small parts in a row. Empty: no more parts come on this
    call."""
    is_average: bool = False
    """Whether these are averages from the reducer, rather than the values of one member for the reducer."""
    offset: Count = 0
    """The offset of the payload within the part, in bytes, if it is a slice."""
    held: Count = 0
    """How many averages of the receiver the sender holds, from the first one on. They need not be kept any longer for
    the case that a connection breaks."""
    left_out: list[Count] = msgspec.field(default_factory=list)
    """If these are averages: members without whose values the reducer has averaged these parts, or others so far."""


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
    """Either way, now and then: a sign of life. From the coordinator also its answer to a greeting."""


class Report(RoundMessage, tag=3, omit_defaults=True):
    """From a member that has exchanged all that it will."""

    held: list[Count]
    """The number of averages of each reducer that it holds, from the first one on."""
    not_finite: list[Count] = msgspec.field(default_factory=list)
    """Members whose values it has left out, because they are not finite."""
    left_out: list[Count] = msgspec.field(default_factory=list)
    """Members without whose values it has averaged some parts, because it had given them up."""
    statements: list[Statement] = msgspec.field(default_factory=list)
    """What it has got from each member, see :class:`BeginReduce`; empty: nothing."""
    waits: dict[Count, Amount] = msgspec.field(default_factory=dict)
    """By member: the seconds for which it has waited for that one alone."""


class MembersLost(RoundMessage, tag=4):
    """From the coordinator: do not wait for these members."""

    lost: dict[Count, LossCause]


class Assignment(RoundMessage, tag=5, omit_defaults=True):
    """From the coordinator: parts to send to it, and parts that it is going to send."""

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
    """From the coordinator, its last message: all members have all averages that could be saved."""

    weights: list[Amount]
    """The weight of each member in the average."""
    lost: dict[Count, LossCause] = msgspec.field(default_factory=dict)
    not_finite: list[Count] = msgspec.field(default_factory=list)
    """The members from all reports, as in the next field."""
    left_out: list[Count] = msgspec.field(default_factory=list)
    untrue: list[Count] = msgspec.field(default_factory=list)
    """Members that have announced different norms to different members."""
    statements: list[Statement] = msgspec.field(default_factory=list)
    """Two of each member in ``untrue``."""
    waits: dict[Count, Amount] = msgspec.field(default_factory=dict)
    """By member: the seconds for which the group has waited for that one alone."""


class Delivered(RoundMessage, tag=9):
    """From a member: it has sent all its parts."""


class Late(RoundMessage, tag=10):
    """From the coordinator: the others do not wait for this member, it must stop. From the member: it has stopped, and
    wants the result when the round is over."""


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
    """Asks a member about a round, and tells it what it may not know yet: that calls between the two have broken."""

    round_id: RoundID
    resume: Count = 0
    """All calls on which the two exchange parts are broken, if they have begun anew less often than this."""
    is_link_broken: bool = False
    """The call with which one of the two follows the other one as its coordinator is broken."""


class StatusReply(Header, omit_defaults=True):
    status: int
    has_given_up: bool = False
    """The one who answers exchanges nothing more with the asker in this round."""
    is_waiting: bool = False
    """The one who answers has nothing left to do in this round but to wait for its coordinator."""
    follows_another: bool = False
    """The one who answers does not follow the asker any more, which has coordinated the round until now."""


class DownloadRequest(Header):
    """Asks for this averager's state; requests for chunks follow."""

    part: Annotated[bytes, Meta(max_length=1024)] = b""
    """Names a part of the state, in a way that averagers of one kind agree on; empty: all of it."""
    trains: bool = True
    """Whether the asker is going to train with it; an archive only keeps it."""
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
    """The settings that differ, in words; empty: it does not share its state with anybody."""


class DonorBusy(StateAnswer, tag=3):
    """Too many others are downloading."""

    again_in: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """The number of seconds after which there may be a place."""


class ChunkRequest(Header):
    """Asks for one chunk of the state."""

    index: Count


class StateChunk(Header):
    """One chunk; the payload holds its bytes."""

    index: Count


class NotFiniteError(ProtocolError):
    """A member has sent values that are not finite where there must be none."""


class ResignedError(ProtocolError):
    """The coordinator is late itself and does not lead the round to its end."""


class MissedError(ProtocolError):
    """The round was committed without this member."""


class Loss(NamedTuple):
    """Why a member does not take part in a round any more."""

    cause: LossCause
    reason: str
    """The same in words, for the log and for errors."""

    @classmethod
    def of(cls, error: BaseException) -> Loss:
        """From the error that the failure of the member has caused."""
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
    """The reason in words why a member failed, from the error that its failure has caused."""
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
    """A call on which several tasks send. A lock keeps their messages whole, one after another."""

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
    """Send signs of life for ever; the other side gives this one up after ``silence`` seconds without a message."""
    while True:
        await asyncio.sleep(silence / ALIVE_PER_TIMEOUT)
        await shared.send(RoundAlive())
