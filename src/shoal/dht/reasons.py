"""Why a node keeps a record or not, and why it has none to give.

Each node that a store or a get involves has one :class:`Outcome`. Reports to the user hold the outcomes, messages carry
them between nodes, and :class:`~shoal.metrics.Metrics` counts them by the value of their reason. A new reason needs a
member of :class:`Reason`, the line that gives it, and a row in ``docs/monitoring.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from shoal.base.clock import DHTExpiration
from shoal.base.logs import one_line
from shoal.errors import DialError, NotAMemberError, ProtocolError
from shoal.peers.identity import PeerID


class Reason(StrEnum):
    """What a node did with a record or a question, or what kept it from answering."""

    # The node has done what was asked.
    KEPT = "kept"
    FOUND = "found"
    # The node refused to keep the record.
    EXPIRED = "expired"
    TOO_LONG = "lives too long"
    NOT_NEWER = "not newer than what is there"
    INVALID = "invalid"
    WRONG_SIGNATURE = "wrong signature"
    OWNED = "others own entries under this key"
    MALFORMED = "malformed"
    PEER_QUOTA = "over the quota of a peer"
    HOST_QUOTA = "over the quota of a network"
    CROWDED_KEY = "one of too many of a peer or a network under one key"
    NO_ROOM = "no room"
    UNNAMED = "no reason given"
    # The node had nothing to tell.
    NOTHING = "no value"
    # The node did not answer.
    SILENT = "no answer"
    NOT_CONNECTED = "no connection"
    NOT_A_MEMBER = "not a member"
    FAILED = "failed"
    BAD_ANSWER = "answer makes no sense"
    BACKED_OFF = "not asked: it did not answer shortly before"


# A reason that only newer versions know is told as text.
_BY_NAME = {reason.value: reason for reason in Reason}
_WITHOUT_ANSWER = frozenset(
    {Reason.SILENT, Reason.NOT_CONNECTED, Reason.NOT_A_MEMBER, Reason.FAILED, Reason.BAD_ANSWER, Reason.BACKED_OFF}
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one node did. It is true if the node has done what was asked.

    Args:
        reason: one of a few.
        detail: what else there is to say, such as the validator that refuses the record.
    """

    reason: Reason
    detail: str = ""

    def __bool__(self) -> bool:
        return self.reason is Reason.KEPT or self.reason is Reason.FOUND

    @property
    def answered(self) -> bool:
        """Whether the node has answered at all."""
        return self.reason not in _WITHOUT_ANSWER

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else str(self.reason)

    @classmethod
    def named(cls, name: str, detail: str = "") -> Outcome:
        """The refusal that another node names; the texts are its own."""
        reason = _BY_NAME.get(name, Reason.UNNAMED)
        if reason is Reason.UNNAMED or cls(reason):
            return cls(Reason.UNNAMED, one_line(name if name != Reason.UNNAMED else detail))
        return cls(reason, one_line(detail))


KEPT = Outcome(Reason.KEPT)


def outcome_of_failure(error: Exception) -> Outcome:
    """Why a call to a node failed."""
    if isinstance(error, NotAMemberError):
        reason = Reason.NOT_A_MEMBER
    elif isinstance(error, DialError):
        reason = Reason.NOT_CONNECTED
    elif isinstance(error, ConnectionError | TimeoutError):
        reason = Reason.SILENT
    elif isinstance(error, ProtocolError | msgspec.MsgspecError):
        reason = Reason.BAD_ANSWER
    else:
        reason = Reason.FAILED
    return Outcome(reason, one_line(str(error)))


def _told(nodes: Mapping[PeerID, Outcome]) -> str:
    """How many nodes there are of each outcome, the most frequent first."""
    counts = Counter(str(outcome) for outcome in nodes.values()).most_common()
    return "; ".join(f"{count} of {len(nodes)} nodes: {outcome}" for outcome, count in counts)


@dataclass(frozen=True)
class StoreReport:
    """What came of a store. It is true if most of the nodes that answered keep the record.

    Args:
        nodes: the outcome at each node that was asked, on the way or to keep the record.
    """

    nodes: Mapping[PeerID, Outcome]

    def __bool__(self) -> bool:
        # Of a node that only showed the way there is no outcome unless it failed.
        votes = [bool(outcome) for outcome in self.nodes.values() if outcome.answered]
        return sum(votes) * 2 > len(votes)

    def __str__(self) -> str:
        return _told(self.nodes) or "no node was found: this peer knows nobody, and only calls others"


@dataclass(frozen=True)
class GetReport:
    """What came of a get. It is true if there is a value.

    Args:
        found: what ``get`` returns without ``explain``: the value with its expiration, or ``None``.
        nodes: the outcome at each node that was asked; this peer itself if it had the value.
    """

    found: tuple[object, DHTExpiration] | None
    nodes: Mapping[PeerID, Outcome]

    def __bool__(self) -> bool:
        return self.found is not None

    def __str__(self) -> str:
        return _told(self.nodes) or "no node was asked: this peer knows nobody"
