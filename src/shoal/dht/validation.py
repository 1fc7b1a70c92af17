"""Who may write what: validators that every node applies to what it is asked to store and to what it reads.

A value is signed where it is stored, checked at every node that is asked to keep it and at the reader, and stripped of
signatures only when it is handed to the application.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.clock import DHTExpiration, get_dht_time
from shoal.dht.storage import StoredValue, Subkey
from shoal.logs import quoted
from shoal.serializer import MSGPackSerializer

# Stands where a subkey would be in the record of a value that is not an entry of a dictionary.
PLAIN_VALUE = MSGPackSerializer.dumps(None)

# Stands where a subkey would be when all entries of a dictionary travel at once.
WHOLE_DICTIONARY = b""


# Packed.
MAX_SUBKEY_BYTES = 2**12

# The table is for what is true now: a record lives a day at most, and so does what a liar has stored.
MAX_LIFETIME_SECONDS = 86400.0
# By so much the clocks of peers may differ.
_TOLERANCE_SECONDS = 60.0


@dataclass(frozen=True)
class DHTRecord:
    """One record as validators see it: everything is bytes."""

    key: bytes
    """The key's id, 20 bytes."""
    subkey: bytes
    """The subkey in msgpack form, or ``PLAIN_VALUE``."""
    value: bytes
    expiration_time: DHTExpiration


class AcceptedRecords:
    """Remembers the last records that passed an expensive check: replicas tell the same ones again and again.

    Args:
        size: how many.
    """

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._records: OrderedDict[DHTRecord, None] = OrderedDict()

    def add(self, record: DHTRecord) -> None:
        """This record has passed."""
        self._records[record] = None
        if len(self._records) > self._size:
            self._records.popitem(last=False)

    def __contains__(self, record: DHTRecord) -> bool:
        if record not in self._records:
            return False
        self._records.move_to_end(record)
        return True

    def __len__(self) -> int:
        return len(self._records)


class RecordValidatorBase(ABC):
    """A rule about records, the same at every node of the swarm."""

    @abstractmethod
    def validate(self, record: DHTRecord) -> bool:
        """Whether the record may be stored and believed. Must not raise, whatever the record holds."""

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with whatever this validator will ask for, such as a signature."""
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value without what :meth:`sign_value` added."""
        return record.value

    def is_owned(self, record: DHTRecord) -> bool:
        """Whether somebody alone may write this record: then nobody may push it aside with a plain value either."""
        return False

    @property
    def priority(self) -> int:
        """Validators sign in ascending and validate in descending order of this number."""
        return 0

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Take over the rules of another validator, which stays as it is; False if that is not possible."""
        return False


def _with_value(record: DHTRecord, value: bytes) -> DHTRecord:
    if value is record.value:
        return record
    return DHTRecord(record.key, record.subkey, value, record.expiration_time)


class CompositeValidator(RecordValidatorBase):
    """Several validators as one: all of them must accept.

    Args:
        validators: merged with each other where they can be.
    """

    def __init__(self, validators: Iterable[RecordValidatorBase] = ()) -> None:
        self._validators: list[RecordValidatorBase] = []
        self.extend(validators)

    def extend(self, validators: Iterable[RecordValidatorBase]) -> None:
        """Add validators; each is merged into one that is here already, or else takes its place by priority."""
        extended = list(self._validators)
        for validator in validators:
            if not isinstance(validator, RecordValidatorBase):
                raise TypeError(f"a record validator must derive from RecordValidatorBase, got {validator!r}")
            if not any(present.merge_with(validator) for present in extended):
                extended.append(validator)
        self._validators = sorted(extended, key=lambda validator: validator.priority)

    def sign_value(self, record: DHTRecord) -> bytes:
        for validator in self._validators:
            record = _with_value(record, validator.sign_value(record))
        return record.value

    def validate(self, record: DHTRecord) -> bool:
        for validator in reversed(self._validators):
            if not validator.validate(record):
                return False
            record = _with_value(record, validator.strip_value(record))
        return True

    def strip_value(self, record: DHTRecord) -> bytes:
        for validator in reversed(self._validators):
            record = _with_value(record, validator.strip_value(record))
        return record.value

    def is_owned(self, record: DHTRecord) -> bool:
        return any(validator.is_owned(record) for validator in self._validators)


def has_owned_entries(validator: RecordValidatorBase | None, key: bytes, value: StoredValue) -> bool:
    """Whether a value is a dictionary of which somebody owns an entry."""
    if validator is None or isinstance(value, bytes):
        return False
    return any(
        validator.is_owned(DHTRecord(key, MSGPackSerializer.dumps(subkey), item.value, item.expiration_time))
        for subkey, item in value.items()
    )


def check_expiration(expiration_time: Any) -> float:
    """The expiration as a float.

    Raises:
        ValueError: no record can expire then.
        TypeError: not a number.
    """
    if isinstance(expiration_time, bool) or not isinstance(expiration_time, numbers.Real):
        raise TypeError(f"an expiration must be a number of seconds since 1970, got {quoted(expiration_time)}")
    seconds = float(expiration_time)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"an expiration must be a finite number of seconds since 1970, got {seconds}")
    return seconds


def check_lifetime(expiration_time: Any) -> float:
    """The expiration of a record of another peer as a float.

    Raises:
        ValueError: no record can expire then, or none may live so long.
        TypeError: not a number.
    """
    seconds = check_expiration(expiration_time)
    left = seconds - get_dht_time()
    if left > MAX_LIFETIME_SECONDS + _TOLERANCE_SECONDS:
        raise ValueError(f"a record that lives {left:.0f} s longer; the limit is {MAX_LIFETIME_SECONDS:.0f}")
    return seconds


def check_subkey(subkey: Subkey, packed: bytes) -> None:
    """Refuse subkeys that would not be found again.

    Raises:
        ValueError: too long, not hashable, or not equal to itself after the journey, as NaN.
    """
    if len(packed) > MAX_SUBKEY_BYTES:
        raise ValueError(f"a subkey of {len(packed)} bytes is over the limit of {MAX_SUBKEY_BYTES}")
    try:
        hash(subkey)
        is_plain = subkey is not None and MSGPackSerializer.loads(packed) == subkey
    except TypeError:
        is_plain = False
    if not is_plain:
        raise ValueError(f"{quoted(subkey)} cannot be a subkey: use str, bytes, numbers or tuples of them")
