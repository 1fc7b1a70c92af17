"""Validators, alone and together."""

from __future__ import annotations

import pytest

from shoal.dht.validation import AcceptedRecords, CompositeValidator, DHTRecord, RecordValidatorBase

pytestmark = pytest.mark.oldest

RECORD = DHTRecord(key=b"k" * 20, subkey=b"s", value=b"value", expiration_time=1.0)


class Stamp(RecordValidatorBase):
    """Signs by appending its name, and notes who did what."""

    def __init__(self, name: str, priority: int, journal: list[str], accepts: bool = True) -> None:
        self.name, self._priority, self.journal, self.accepts = name, priority, journal, accepts

    @property
    def priority(self) -> int:
        return self._priority

    def validate(self, record: DHTRecord) -> bool:
        self.journal.append(f"validate {self.name} {record.value.decode()}")
        return self.accepts and record.value.endswith(self.name.encode())

    def sign_value(self, record: DHTRecord) -> bytes:
        self.journal.append(f"sign {self.name}")
        return record.value + self.name.encode()

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value.removesuffix(self.name.encode())


class Mergeable(Stamp):
    def merge_with(self, other: RecordValidatorBase) -> bool:
        if isinstance(other, Mergeable):
            self.journal.append(f"merge {other.name}")
            return True
        return False


def test_signing_ascends_and_validation_descends():
    journal: list[str] = []
    composite = CompositeValidator([Stamp("B", 2, journal), Stamp("A", 1, journal), Stamp("C", 3, journal)])
    signed = composite.sign_value(RECORD)
    assert signed == b"valueABC"
    record = DHTRecord(RECORD.key, RECORD.subkey, signed, RECORD.expiration_time)
    assert composite.validate(record)
    assert composite.strip_value(record) == b"value"
    assert journal == [
        "sign A",
        "sign B",
        "sign C",
        "validate C valueABC",
        "validate B valueAB",
        "validate A valueA",
    ]


def test_first_refusal_ends_validation():
    journal: list[str] = []
    composite = CompositeValidator([Stamp("", 1, journal), Stamp("", 2, journal, accepts=False)])
    assert not composite.validate(RECORD)
    assert len(journal) == 1


def test_validators_merge_or_sort_by_priority():
    journal: list[str] = []
    composite = CompositeValidator([Mergeable("first", 5, journal)])
    composite.extend([Mergeable("second", 1, journal), Stamp("low", 0, journal)])
    assert [validator.name for validator in composite.validators] == ["low", "first"]  # type: ignore[attr-defined]
    assert journal == ["merge second"]


def test_an_empty_composite_accepts_everything_as_it_is():
    composite = CompositeValidator()
    assert composite.validate(RECORD)
    assert composite.sign_value(RECORD) == composite.strip_value(RECORD) == b"value"


def test_other_objects_are_refused_as_validators():
    composite = CompositeValidator()
    with pytest.raises(TypeError, match="must derive from RecordValidatorBase"):
        composite.extend([Stamp("", 0, []), "validator"])  # type: ignore[list-item]
    assert composite.validators == []


def test_the_base_class_merges_with_nobody():
    assert not Stamp("", 0, []).merge_with(Stamp("", 0, []))


def test_memory_of_accepted_records_is_bounded():
    records = [DHTRecord(b"k", b"s", b"%d" % number, 1.0) for number in range(10)]
    accepted = AcceptedRecords(size=3)
    for record in records:
        assert record not in accepted
        accepted.add(record)
        assert records[0] in accepted
    assert len(accepted) == 3
    assert [record in accepted for record in records] == [True, *[False] * 7, True, True]
