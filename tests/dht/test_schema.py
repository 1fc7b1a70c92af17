"""Records that must have a certain type."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from textwrap import dedent
from typing import Any

import pydantic
import pytest
from pydantic import BaseModel, StrictFloat, StrictInt, field_validator

from shoal.base.serializer import MSGPackSerializer
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.routing import DHTID
from shoal.dht.schema import BytesWithPublicKey, SchemaValidator, conbytes
from shoal.dht.validation import PLAIN_VALUE, CompositeValidator, DHTRecord

pytestmark = pytest.mark.oldest


class Status(BaseModel):
    epoch: StrictInt
    speed: StrictFloat


class SampleSchema(BaseModel):
    experiment_name: bytes
    n_batches: dict[bytes, StrictInt]
    signed_data: dict[BytesWithPublicKey, bytes]
    status: dict[str, Status | None]
    pair: tuple[StrictInt, str]
    even: StrictInt

    @field_validator("even")
    @classmethod
    def check_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value


class Constrained(BaseModel):
    name: conbytes(strict=True, regex=rb"[a-z]+\Z", max_length=3)  # type: ignore[valid-type]
    anything: conbytes()  # type: ignore[valid-type]


needs_v1 = pytest.mark.skipif(sys.version_info >= (3, 14), reason="pydantic.v1 does not work with this Python")


@pytest.fixture(params=["v2", pytest.param("v1", marks=needs_v1)])
def models(request: pytest.FixtureRequest) -> Any:
    """A module with these models, for either pydantic."""
    return importlib.import_module("tests.dht.schema_v1") if request.param == "v1" else sys.modules[__name__]


@pytest.fixture
def validator(models) -> SchemaValidator:
    return SchemaValidator(models.SampleSchema, allow_extra_keys=False)


def record(key, value, subkey=None) -> DHTRecord:
    packed_subkey = PLAIN_VALUE if subkey is None else MSGPackSerializer.dumps(subkey)
    return DHTRecord(DHTID.generate(key).to_bytes(), packed_subkey, MSGPackSerializer.dumps(value), 1.0)


OWNED = b"x" + SignatureValidator(PrivateKey()).local_public_key


@pytest.mark.parametrize(
    ("key", "value", "subkey"),
    [
        ("experiment_name", b"foo", None),
        ("experiment_name", b"", None),
        ("n_batches", 777, b"uid1"),
        ("n_batches", 0, b""),
        pytest.param("signed_data", b"x", OWNED, id="signed_data-owned"),
        ("status", {"epoch": 1, "speed": 2.5}, "peer"),
        ("status", None, "peer"),
        ("pair", (1, "a"), None),
        ("even", 4, None),
    ],
)
def test_fitting_records(validator, key, value, subkey):
    assert validator.validate(record(key, value, subkey))


@pytest.mark.parametrize(
    ("key", "value", "subkey"),
    [
        ("experiment_name", "foo", None),
        ("experiment_name", 666, None),
        ("experiment_name", True, None),
        ("experiment_name", None, None),
        ("experiment_name", [], None),
        ("experiment_name", {}, None),
        ("experiment_name", [b"foo"], None),
        ("experiment_name", b"foo", b"uid1"),
        ("n_batches", 777, None),
        ("n_batches", b"uid1", None),
        ("n_batches", {b"uid1": 777}, None),
        ("n_batches", {}, None),
        ("n_batches", [], None),
        ("n_batches", "", None),
        ("n_batches", 3.0, b"uid1"),
        ("n_batches", True, b"uid1"),
        ("n_batches", "3", b"uid1"),
        ("n_batches", 777, "uid1"),
        ("n_batches", 777, 5),
        ("n_batches", {"uid1": 777}, b"uid1"),
        ("signed_data", b"x", b"without owner"),
        ("status", {"epoch": 1}, "peer"),
        ("status", {"epoch": 1, "speed": 2.5, "extra": 0}, "peer"),
        ("status", {"epoch": 1, "speed": 2}, "peer"),
        ("status", {"epoch": 1.0, "speed": 2.5}, "peer"),
        ("status", {"epoch": "1", "speed": 2.5}, "peer"),
        ("status", [("epoch", 1), ("speed", 2.5)], "peer"),
        ("pair", [1, "a"], None),
        ("pair", (1, "a", 2), None),
        ("pair", (True, "a"), None),
        ("even", 3, None),
        ("unknown", b"foo", None),
        ("unknown", b"foo", b"sub"),
    ],
)
def test_records_that_do_not_fit(validator, key, value, subkey):
    assert not validator.validate(record(key, value, subkey))


def test_lax_schemas_do_not_change_values():
    class Lax(BaseModel):
        number: int
        numbers: list[float]

    lax = SchemaValidator(Lax)
    assert lax.validate(record("number", 3))
    assert not lax.validate(record("number", 3.0))
    assert not lax.validate(record("number", "3"))
    assert not lax.validate(record("number", True))
    assert lax.validate(record("numbers", [1.0, 2.0]))
    assert not lax.validate(record("numbers", [1.0, 2]))
    assert not lax.validate(record("numbers", (1.0, 2.0)))


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\xff\xff", b"\x93\x01", b"\x81\x90\x01", b"\x00\x00"])
def test_undecodable_bytes_do_not_fit(validator, raw):
    key = DHTID.generate("n_batches").to_bytes()
    assert not validator.validate(DHTRecord(key, MSGPackSerializer.dumps(b"uid"), raw, 1.0))
    assert not validator.validate(DHTRecord(key, raw, MSGPackSerializer.dumps(1), 1.0))


def test_an_unhashable_subkey_does_not_fit(validator):
    key = DHTID.generate("n_batches").to_bytes()
    assert not validator.validate(DHTRecord(key, MSGPackSerializer.dumps([1]), MSGPackSerializer.dumps(1), 1.0))


def test_extra_keys_may_be_allowed():
    assert SchemaValidator(SampleSchema).validate(record("unknown", object.__name__))
    assert not SchemaValidator(SampleSchema).validate(record("experiment_name", 1))


def test_a_prefix_makes_other_keys():
    prefixed = SchemaValidator(SampleSchema, allow_extra_keys=False, prefix="run")
    assert prefixed.validate(record("run_experiment_name", b"foo"))
    assert not prefixed.validate(record("experiment_name", b"foo"))


def test_merged_schemas_know_the_fields_of_both():
    class Other(BaseModel):
        experiment_name: StrictInt
        some_field: StrictInt

    merged = SchemaValidator(SampleSchema, allow_extra_keys=False)
    assert merged.merge_with(SchemaValidator(Other, allow_extra_keys=False))
    assert merged.merge_with(SchemaValidator(Other, allow_extra_keys=False, prefix="p"))
    for key, value, fits in [
        ("experiment_name", b"foo", True),
        ("experiment_name", 5, True),  # any schema with this field will do
        ("experiment_name", "foo", False),
        ("some_field", 5, True),
        ("some_field", b"foo", False),
        ("p_some_field", 5, True),
        ("p_n_batches", 5, False),
    ]:
        assert merged.validate(record(key, value)) == fits, (key, value)
    assert merged.merge_with(SchemaValidator(Other, allow_extra_keys=True))
    assert merged.validate(record("unknown", 1))


def test_merging_the_same_schema_again_costs_nothing():
    merged = SchemaValidator(SampleSchema)
    for _ in range(100):
        merged.merge_with(SchemaValidator(SampleSchema))
    assert len(merged.schemas) == 1
    assert all(len(fields) == 1 for fields in merged.fields_by_key.values())
    assert not merged.merge_with(SignatureValidator(PrivateKey()))


def test_checked_records_are_not_checked_again(monkeypatch):
    validator = SchemaValidator(SampleSchema)
    assert validator.validate(record("even", 4))
    assert not validator.validate(record("even", 5))
    monkeypatch.setattr("shoal.dht.schema.fits", lambda *args: pytest.fail("checked again"))
    assert validator.validate(record("even", 4))


def test_the_users_model_is_left_alone():
    before = {name: field.is_required() for name, field in SampleSchema.model_fields.items()}
    SchemaValidator(SampleSchema)
    assert {name: field.is_required() for name, field in SampleSchema.model_fields.items()} == before
    with pytest.raises(pydantic.ValidationError):
        SampleSchema(experiment_name=b"only this")  # type: ignore[call-arg]


@needs_v1
def test_the_users_old_model_is_left_alone():
    from tests.dht.schema_v1 import SampleSchema as Old

    before = {name: (field.required, field.default) for name, field in Old.__fields__.items()}
    SchemaValidator(Old)
    assert {name: (field.required, field.default) for name, field in Old.__fields__.items()} == before


@needs_v1
def test_models_of_both_kinds_are_merged():
    from tests.dht.schema_v1 import SampleSchema as Old

    merged = SchemaValidator(SampleSchema, allow_extra_keys=False)
    assert merged.merge_with(SchemaValidator(Old, allow_extra_keys=False, prefix="old"))
    assert merged.validate(record("even", 4))
    assert merged.validate(record("old_even", 4))
    assert not merged.validate(record("old_even", 3))


def test_pydantic_v1_is_loaded_only_if_used():
    script = """
        import sys
        import pydantic
        from shoal.dht.schema import BytesWithPublicKey, SchemaValidator

        class Schema(pydantic.BaseModel):
            key: dict[BytesWithPublicKey, int]

        SchemaValidator(Schema)
        assert "pydantic.v1.main" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", dedent(script)], check=True, timeout=60)


def test_validators_can_be_pickled(models, validator):
    merged = SchemaValidator(models.SampleSchema, allow_extra_keys=False, prefix="run")
    merged.merge_with(validator)
    restored = pickle.loads(pickle.dumps(merged))
    assert restored.validate(record("run_experiment_name", b"foo"))
    assert restored.validate(record("experiment_name", b"foo"))
    assert not restored.validate(record("unknown", b"foo"))


def test_constrained_bytes(models):
    constrained = SchemaValidator(models.Constrained)
    assert constrained.validate(record("name", b"abc"))
    assert constrained.validate(record("anything", b"\xff"))
    for value in (b"abcd", b"", b"A", "abc"):
        assert not constrained.validate(record("name", value))


def test_schema_sees_values_without_signatures():
    signatures = SignatureValidator(PrivateKey())
    composite = CompositeValidator([SchemaValidator(SampleSchema, allow_extra_keys=False), signatures])
    unsigned = record("signed_data", b"x", b"peer" + signatures.local_public_key)
    assert not composite.validate(unsigned)
    value = composite.sign_value(unsigned)
    assert composite.validate(DHTRecord(unsigned.key, unsigned.subkey, value, 1.0))


@pytest.mark.parametrize("schema", [int, object(), SampleSchema.model_construct()])
def test_what_is_no_model_is_refused(schema):
    with pytest.raises(TypeError, match=r"pydantic\.BaseModel or pydantic\.v1\.BaseModel"):
        SchemaValidator(schema)
