"""What averagers send each other, how their calls fail, and how several tasks share one call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.compression.base import SerializedTensor, TensorMetadata
from shoal.errors import DialError, InterruptedDialError, P2PDaemonError, P2PHandlerError, ProtocolError
from shoal.p2p import Call, Header
from shoal.p2p.transport import Amount, Buffer, Count, Moment, PeerIDBytes

# How a call to another peer fails.
CALL_FAILURES = (P2PDaemonError, P2PHandlerError, ProtocolError, TimeoutError)
# What another member can do to this one; none of it may end the round.
PEER_FAILURES = (*CALL_FAILURES, ValueError, RuntimeError)

MAX_DIALS = 3
# Seconds before a dial is repeated the first time.
REDIAL_PAUSE = 0.1
# Seconds after which it is not repeated any more: who answers nothing has been waited for long enough.
REDIAL_WITHIN = 2.0
# Both limits are so many times as large if something has answered and the connection broke, which is mostly chance.
ANSWERED_FACTOR = 2
# How often a member shows that it lives within the time after which it would be given up.
ALIVE_PER_TIMEOUT = 3

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


# What each member may tell the others; the leader publishes that of all of them in one message.
MAX_GATHERED_BYTES = 2**16
# The id of a group and the number of a phase take 21 today.
MAX_ROUND_ID_BYTES = 64
MAX_BANDWIDTH = 1e12

RoundID = Annotated[bytes, Meta(max_length=MAX_ROUND_ID_BYTES)]
Mode = Annotated[int, Meta(ge=0, le=2)]
"""A number of :class:`~shoal.averaging.control.AveragingMode`."""
Gathered = Annotated[bytes, Meta(max_length=MAX_GATHERED_BYTES)]
Bandwidth = Annotated[float, Meta(ge=0.0, le=MAX_BANDWIDTH)]
"""Relative to that of other members; 0: others shall reduce."""


class PeerRecord(Header):
    """A peer and where to dial it."""

    peer_id: PeerIDBytes
    addresses: list[str] = msgspec.field(default_factory=list)


class JoinRequest(Header):
    """A follower asks to be led."""

    group_key: str
    settings: dict[str, str]
    """Everything that must be equal in all members, readable."""
    expiration: Moment
    """DHT time after which the follower does not want to wait any more."""
    mode: Mode
    gathered: Gathered = b""
    bandwidth: Bandwidth | None = None
    expected_group_size: Count | None = None


class Expectation(Header):
    """A follower has changed its mind about the group."""

    expected_group_size: Count | None = None
    leaves: bool = False
    """It does not want to be in it any more."""


class Member(Header):
    """One member of a group that starts."""

    peer: PeerRecord
    mode: Mode
    share: Count
    """How many values of the vector this member reduces."""
    gathered: Gathered = b""
    largest_weight: Amount | None = None
    """What its weight is at most, whatever it says."""


class GroupStart(Header):
    """A complete group, as its leader publishes it."""

    group_id: bytes
    members: list[Member]


class JoinReply(Header):
    """The leader's first answer, and later the outcome."""

    code: int
    text: str = ""
    expiration: Moment = 0.0
    """When the leader will start, in DHT time."""
    better_leader: PeerRecord | None = None
    group: GroupStart | None = None


class Invitation(Header):
    """A peer that may lead tells one that may follow that it looks for a group, too."""

    group_key: str
    expiration: Moment


class InvitationReply(Header):
    """Whether it comes. Without any of the fields: it does not, or has asked to join already."""

    request: JoinRequest | None = None
    """It comes; what follows is what follows a request to join."""
    better_leader: PeerRecord | None = None
    """It does not, because it follows this one, or leads itself."""
    expiration: Moment = 0.0
    """When that one will start, in DHT time."""


class BeginReduce(Header):
    """First message of a sender to a reducer."""

    round_id: RoundID
    weight: Amount
    stripe: Count = 0
    """Which of the sender's calls this is."""
    stripes: Count = 1
    """Over how many calls the sender spreads its parts."""


class PartStatus(IntEnum):
    VALUES = 1
    """The payload holds the values: a sender's, or the average."""
    DELTA = 2
    """The payload holds the difference between the average and what the sender sent, as it was decoded."""
    UNCHANGED = 3
    """There is no average (all weights were 0): keep the local values. From a sender: it has no finite values. No
    bytes."""


class PartHeader(msgspec.Struct, array_like=True):
    """What has to be known of one part to read its bytes."""

    status: int
    metadata: TensorMetadata | None = None
    nbytes: Count = 0
    """Of the whole part, as it travels."""


class PartMessage(Header, array_like=True):
    """Parts, either way; their bytes follow as the payload.

    There are many of them: on the wire they are as short as can be, fields have no names.
    """

    index: Count = 0
    """Of the first part, among those that this reducer reduces."""
    parts: list[PartHeader] = msgspec.field(default_factory=list)
    """One, of which the payload may be a slice, or several small ones in a row. None: the sender has no more for this
    call."""
    is_average: bool = False
    """Of all members' values, from the reducer; otherwise the values of one, for the reducer."""
    offset: Count = 0
    """Where the payload begins within the part, if it is a slice."""


class RoundKind(IntEnum):
    """Messages between a member and the coordinator of a round."""

    HELLO = 1
    """From a member, first: which round, and its weight."""
    ALIVE = 2
    """Either way, now and then."""
    REPORT = 3
    """From a member: how many parts of each reducer it holds."""
    FAILED = 4
    """From the coordinator: do not wait for these members."""
    ASSIGNMENT = 5
    """From the coordinator: parts to send to it, and parts that it will send."""
    PART = 6
    """Either way: one part; its bytes follow as the payload."""
    RESTART = 7
    """From the coordinator: the assignment is void, report again."""
    COMMIT = 8
    """From the coordinator, last: everybody has everything that could be saved."""
    DELIVERED = 9
    """From a member: it has sent all its parts."""
    LATE = 10
    """From the coordinator: the others do not wait for you, stop. And back: I have; what follows is the result."""
    RESIGNED = 11
    """From the coordinator: it is late itself, the next one takes over."""


class RoundMessage(Header):
    """One message of a round's second half; which fields count depends on the kind."""

    kind: int
    round_id: RoundID = b""
    weight: Amount = 0.0
    late: bool = False
    """In a greeting: the member was late before."""
    weights: list[Amount] = msgspec.field(default_factory=list)
    """In a commit: of all members' values in the average."""
    not_finite: list[Count] = msgspec.field(default_factory=list)
    """In a report: members of which the sender has left out values, because they are not finite. In a commit: all of
    these."""
    held: list[Count] = msgspec.field(default_factory=list)
    members: list[Count] = msgspec.field(default_factory=list)
    send: list[tuple[Count, Count, Count]] = msgspec.field(default_factory=list)
    """Ranges of parts: reducer, first, end."""
    expect: list[tuple[Count, Count, Count]] = msgspec.field(default_factory=list)
    reducer: Count = 0
    index: Count = 0
    part: PartHeader | None = None


class RoundStatus(IntEnum):
    UNKNOWN = 0
    RUNNING = 1
    FINISHED = 2


class StatusRequest(Header):
    round_id: RoundID


class StatusReply(Header):
    status: int


class DownloadRequest(Header):
    """Asks for this averager's state; requests for chunks follow."""


class StateHeader(Header):
    """What state there is; the payload holds the hash of each chunk. Or a refusal."""

    allowed: bool
    busy: bool = False
    """Refused only because too many others are downloading."""
    metadata: bytes = b""
    tensors: list[TensorMetadata] = msgspec.field(default_factory=list)
    tensor_bytes: list[Count] = msgspec.field(default_factory=list)


class ChunkRequest(Header):
    """Asks for one chunk of the state."""

    index: Count


class StateChunk(Header):
    """One chunk; the payload holds its bytes."""

    index: Count


def reason_of(error: BaseException) -> str:
    """Why a member failed, in words."""
    if isinstance(error, TimeoutError):
        return "silent for too long"
    if isinstance(error, asyncio.CancelledError):
        return "the connection ended"
    return str(error) or type(error).__name__


DescribedPart = tuple[PartHeader, "tuple[Buffer, ...]"]


def describe_part(status: PartStatus, encoded: SerializedTensor | None) -> DescribedPart:
    """A part's header and its bytes; ``None`` = there is no average, the receiver keeps its values."""
    if encoded is None:
        return PartHeader(int(PartStatus.UNCHANGED)), ()
    return PartHeader(int(status), encoded.metadata, len(encoded.buffer)), (encoded.buffer,)


@asynccontextmanager
async def open_patiently(open_call: Callable[[], AbstractAsyncContextManager[Call]]) -> AsyncIterator[Call]:
    """A call to another member; a dial that fails quickly is repeated, as long as nothing has been sent."""
    now = asyncio.get_running_loop().time
    begun = now()
    async with AsyncExitStack() as stack:
        for attempt in itertools.count(1):
            try:
                call = await stack.enter_async_context(open_call())
                break
            except DialError as e:
                factor = ANSWERED_FACTOR if isinstance(e, InterruptedDialError) else 1
                if attempt >= factor * MAX_DIALS or now() - begun > factor * REDIAL_WITHIN:
                    raise
                await asyncio.sleep(attempt * REDIAL_PAUSE)
        yield call


class SharedCall:
    """A call on which several tasks send: whole messages, one after another."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._lock = asyncio.Lock()

    async def send(self, message: RoundMessage, *payload: Buffer, end: bool = False) -> None:
        async with self._lock:
            await self.call.send(message, *payload, end=end)

    async def send_part(self, key: PartKey, encoded: SerializedTensor | None) -> None:
        """Send one part; ``None`` = there is no average."""
        reducer, index = key
        part, payload = describe_part(PartStatus.VALUES, encoded)
        await self.send(RoundMessage(kind=RoundKind.PART, reducer=reducer, index=index, part=part), *payload)


async def show_life(shared: SharedCall, silence: float) -> None:
    """Show the other side that this one lives, for ever; it would be given up after so many seconds of silence."""
    while True:
        await asyncio.sleep(silence / ALIVE_PER_TIMEOUT)
        await shared.send(RoundMessage(kind=RoundKind.ALIVE))
