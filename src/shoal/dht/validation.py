"""Rules about records, and the reasons why a node keeps a record or not.

Validators are rules about records. Every node applies them to records that it is asked to store or that it reads. The
writer signs a value. Every node that keeps the value checks it before passing it on, and so does the reader. Signatures
are stripped only when the application gets the value.

Each node that takes part in a store or a get has one :class:`Outcome`. Reports to the user hold the outcomes, messages
carry them between nodes, and :class:`~shoal.metrics.Metrics` counts them by the value of their reason. A new reason
needs a member of :class:`Reason`, the line that gives it, and a row in ``docs/monitoring.md``.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from shoal.base.bounded import MOST, Bounded
from shoal.base.clock import TOLERANCE_SECONDS, DHTExpiration, get_dht_time
from shoal.base.logs import one_line, quoted
from shoal.base.serializer import MSGPackSerializer
from shoal.dht.storage import StoredValue, Subkey
from shoal.errors import DialError, NotAMemberError, ProtocolError
from shoal.peers.identity import PeerID

# --- reasons ----------------------------------------------------------------------------------------------------------


class Reason(StrEnum):
    """What a node did with a record or a question, or why it did not answer."""

    # The node has done what was asked.
    KEPT = "kept"
    FOUND = "found"
    # The node refused to keep the record.
    EXPIRED = "expired"
    TOO_LONG = "lives too long"
    NOT_NEWER = "not newer than what is there"
    OTHER_KIND = "a value of the other kind is there"
    INVALID = "invalid"
    WRONG_SIGNATURE = "wrong signature"
    OWNED = "others own entries under this key"
    MALFORMED = "malformed"
    PEER_QUOTA = "over the quota of a peer"
    HOST_QUOTA = "over the quota of a network"
    CROWDED_KEY = "one of too many of a peer or a network under one key"
    NO_ROOM = "no room"
    UNNAMED = "no reason given"
    # The node had no value.
    NOTHING = "no value"
    # The node did not answer.
    SILENT = "no answer"
    NOT_CONNECTED = "no connection"
    NOT_A_MEMBER = "not a member"
    FAILED = "failed"
    BAD_ANSWER = "answer makes no sense"
    BACKED_OFF = "not asked: it did not answer shortly before"


# A reason that only newer versions know travels as text.
_BY_NAME = {reason.value: reason for reason in Reason}
_WITHOUT_ANSWER = frozenset(
    {Reason.SILENT, Reason.NOT_CONNECTED, Reason.NOT_A_MEMBER, Reason.FAILED, Reason.BAD_ANSWER, Reason.BACKED_OFF}
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one node did. It is true if the node has done what was asked.

    Args:
        reason: the kind of outcome.
        detail: more about it, such as the validator that refuses the record.
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
        """The refusal that another node names, in its own words."""
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
    """The number of nodes with each outcome, most frequent first."""
    counts = Counter(str(outcome) for outcome in nodes.values()).most_common()
    return "; ".join(f"{count} of {len(nodes)} nodes: {outcome}" for outcome, count in counts)


@dataclass(frozen=True)
class StoreReport:
    """The result of a store. It is true if most of the nodes that answered keep the record.

    Args:
        nodes: the outcome at each node that was asked, on the way or to keep the record.
    """

    nodes: Mapping[PeerID, Outcome]

    def __bool__(self) -> bool:
        # A node that was only asked on the way has no outcome unless it failed.
        votes = [bool(outcome) for outcome in self.nodes.values() if outcome.answered]
        return sum(votes) * 2 > len(votes)

    def __str__(self) -> str:
        return _told(self.nodes) or "no node was found: this peer knows no other, and only calls others"


@dataclass(frozen=True)
class GetReport:
    """The result of a get. It is true if there is a value.

    Args:
        found: the result of ``get`` without ``explain``: the value with its expiration, or ``None``.
        nodes: the outcome at each node that was asked; this peer itself if it had the value.
    """

    found: tuple[object, DHTExpiration] | None
    nodes: Mapping[PeerID, Outcome]

    def __bool__(self) -> bool:
        return self.found is not None

    def __str__(self) -> str:
        return _told(self.nodes) or "no node was asked: this peer knows no other"


# --- rules ------------------------------------------------------------------------------------------------------------

# In place of the subkey in the record of a plain value, which is not an entry of a dictionary.
PLAIN_VALUE = MSGPackSerializer.dumps(None)

# In place of the subkey when all entries of a dictionary travel at once.
WHOLE_DICTIONARY = b""


# In packed form. Chosen: names and keys take tens of bytes, an owner tag 90.
MAX_SUBKEY_BYTES = 2**12

# The DHT is for facts that are true now, so a record lives at most a day, even one that a liar stored. As in Kademlia's
# paper.
MAX_LIFETIME_SECONDS = 86400.0
# shoal's own records (progress, averagers, donors) live at most an hour. Chosen: they are renewed every few seconds or
# minutes.
SHORT_LIFETIME_SECONDS = 3600.0


class RecordError(ValueError):
    """A record that no node may keep, with the reason."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class DHTRecord:
    """One record in the form that validators get: everything is bytes."""

    key: bytes
    """The id of the key, 20 bytes."""
    subkey: bytes
    """The subkey in msgpack form, or ``PLAIN_VALUE``."""
    value: bytes
    expiration_time: DHTExpiration


class AcceptedRecords:
    """Remembers the records that last passed an expensive check, because replicas send the same ones repeatedly.

    It keeps hashes, because records may be large and their memory is not charged here.

    Args:
        size: number of records.
    """

    def __init__(self, size: int = MOST) -> None:
        self._records: Bounded[bytes, None] = Bounded(size)

    def add(self, record: DHTRecord) -> None:
        """Note that this record has passed."""
        self._records[_fingerprint(record)] = None

    def __contains__(self, record: DHTRecord) -> bool:
        fingerprint = _fingerprint(record)
        if fingerprint not in self._records:
            return False
        self._records.touch(fingerprint)
        return True

    def __len__(self) -> int:
        return len(self._records)


def _fingerprint(record: DHTRecord) -> bytes:
    lengths = struct.pack("<IId", len(record.key), len(record.subkey), record.expiration_time)
    return hashlib.sha256(b"".join((lengths, record.key, record.subkey, record.value))).digest()


class RecordValidatorBase(ABC):
    """A rule about records, the same at every node of the swarm."""

    reason: ClassVar[Reason] = Reason.INVALID
    """The reason for the writer of a record that breaks the rule."""

    @abstractmethod
    def validate(self, record: DHTRecord) -> bool:
        """Whether the record may be stored and trusted. Must not raise, whatever the record holds."""

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with everything that this validator requires, such as a signature."""
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value without what :meth:`sign_value` added."""
        return record.value

    def is_forged(self, record: DHTRecord) -> bool:
        """Whether the record breaks a rule that every node of every run applies, so that passing it on is a lie."""
        return False

    def is_owned(self, record: DHTRecord) -> bool:
        """Whether only one owner may write this record. Then others cannot replace its dictionary by a plain value."""
        return False

    def is_proven_by_peer(self, record: DHTRecord, peer: PeerID) -> bool:
        """Whether it is proof enough for the record that this peer itself has brought it."""
        return False

    @property
    def priority(self) -> int:
        """Validators sign in ascending and validate in descending order of this number."""
        return 0

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Adopt the rules of another validator, which stays unchanged; False if that is not possible."""
        return False


def _with_value(record: DHTRecord, value: bytes) -> DHTRecord:
    if value is record.value:
        return record
    return DHTRecord(record.key, record.subkey, value, record.expiration_time)


class CompositeValidator(RecordValidatorBase):
    """Several validators as one: all of them must accept a record.

    Args:
        validators: merged with each other where possible.
    """

    def __init__(self, validators: Iterable[RecordValidatorBase] = ()) -> None:
        self.validators: list[RecordValidatorBase] = []
        """In the order of their priorities."""
        self.extend(validators)

    @classmethod
    def of(cls, validator: RecordValidatorBase | None) -> CompositeValidator:
        """The given composite itself, or a new composite with the given validator, if any."""
        if isinstance(validator, CompositeValidator):
            return validator
        return cls([] if validator is None else [validator])

    def extend(self, validators: Iterable[RecordValidatorBase]) -> None:
        """Add validators. Each is merged into an existing one if possible, otherwise inserted by its priority."""
        extended = list(self.validators)
        for validator in validators:
            if not isinstance(validator, RecordValidatorBase):
                raise TypeError(f"a record validator must derive from RecordValidatorBase, got {validator!r}")
            if not any(present.merge_with(validator) for present in extended):
                extended.append(validator)
        self.validators = sorted(extended, key=lambda validator: validator.priority)

    def sign_value(self, record: DHTRecord) -> bytes:
        for validator in self.validators:
            record = _with_value(record, validator.sign_value(record))
        return record.value

    def validate(self, record: DHTRecord) -> bool:
        return self.refused_by(record) is None

    def refused_by(self, record: DHTRecord, brought_by: PeerID | None = None) -> RecordValidatorBase | None:
        """The first validator that refuses the record, if any.

        Args:
            brought_by: the peer that has brought it, if that is proof enough for validators with ``is_proven_by_peer``.
        """
        for position in reversed(range(len(self.validators))):
            validator = self.validators[position]
            is_proven = brought_by is not None and validator.is_proven_by_peer(record, brought_by)
            if not is_proven and not validator.validate(record):
                return validator
            if position:  # the rest after the last one is not needed
                record = _with_value(record, validator.strip_value(record))
        return None

    def strip_value(self, record: DHTRecord) -> bytes:
        for validator in reversed(self.validators):
            record = _with_value(record, validator.strip_value(record))
        return record.value

    def is_forged(self, record: DHTRecord) -> bool:
        return any(validator.is_forged(record) for validator in self.validators)

    def is_proven_by_peer(self, record: DHTRecord, peer: PeerID) -> bool:
        return any(validator.is_proven_by_peer(record, peer) for validator in self.validators)

    def is_owned(self, record: DHTRecord) -> bool:
        return any(validator.is_owned(record) for validator in self.validators)


def has_owned_entries(validator: RecordValidatorBase, key: bytes, value: StoredValue) -> bool:
    """Whether a value is a dictionary with an entry that has an owner."""
    if isinstance(value, bytes):
        return False
    return any(
        validator.is_owned(DHTRecord(key, MSGPackSerializer.dumps(subkey), item.value, item.expiration_time))
        for subkey, item in value.items()
    )


def check_expiration(expiration_time: Any) -> float:
    """Check an expiration, and return it as a float.

    Raises:
        ValueError: it is negative or not finite.
        TypeError: it is not a number.
    """
    if type(expiration_time) is float and 0 <= expiration_time < math.inf:
        return expiration_time
    if isinstance(expiration_time, bool) or not isinstance(expiration_time, numbers.Real):
        raise TypeError(f"an expiration must be a number of seconds since 1970, got {quoted(expiration_time)}")
    try:
        seconds = float(expiration_time)
    except OverflowError:  # an integer that is too large
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"an expiration must be a finite number of seconds since 1970, got {seconds}")
    return seconds


def check_lifetime(expiration_time: Any, *, is_kept: bool = False) -> float:
    """Check the expiration of another peer's record, and return it as a float.

    Args:
        is_kept: another node already keeps the record. Its clock may be ahead of this one's, too.

    Raises:
        ValueError: it is negative, or not finite.
        RecordError: it is too far in the future.
        TypeError: it is not a number.
    """
    seconds = check_expiration(expiration_time)
    left = seconds - get_dht_time()
    if left > MAX_LIFETIME_SECONDS + (1 + is_kept) * TOLERANCE_SECONDS:
        raise RecordError(
            Reason.TOO_LONG, f"a record that lives {left:.0f} s longer; the limit is {MAX_LIFETIME_SECONDS:.0f}"
        )
    return seconds


def is_short_lived(expiration_time: float) -> bool:
    """Whether one of shoal's own records may expire then; others are ignored."""
    return expiration_time - get_dht_time() <= SHORT_LIFETIME_SECONDS + TOLERANCE_SECONDS


def check_subkey(subkey: Subkey, packed: bytes) -> None:
    """Refuse subkeys that could not be found again.

    Raises:
        ValueError: it is too long, not hashable, or not equal to itself after packing and unpacking, such as NaN.
    """
    if len(packed) > MAX_SUBKEY_BYTES:
        raise ValueError(f"a subkey of {len(packed)} bytes is over the limit of {MAX_SUBKEY_BYTES}")
    if type(subkey) in (bytes, str):  # the usual case
        return
    try:
        hash(subkey)
        is_plain = subkey is not None and MSGPackSerializer.loads(packed) == subkey
    except TypeError:
        is_plain = False
    if not is_plain:
        raise ValueError(f"{quoted(subkey)} cannot be a subkey: use str, bytes, numbers or tuples of them")
