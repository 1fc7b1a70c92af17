"""Checks the types of records: a pydantic model describes a set of keys, one field for each.

A field of type ``dict[K, V]`` describes a key whose value is a dictionary with subkeys ``K``. Values must have exactly
the given type: a value that pydantic would have to convert is refused. Models of ``pydantic.v1`` work as well.
"""

from __future__ import annotations

import copy
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pydantic
from pydantic import AfterValidator, Field

from shoal.base.serializer import MSGPackSerializer
from shoal.dht.routing import DHTID
from shoal.dht.validation import PLAIN_VALUE, AcceptedRecords, DHTRecord, RecordValidatorBase

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, v1
    from pydantic_core import CoreSchema
    from typing_extensions import TypeIs

    Schema = type[pydantic.BaseModel] | type[v1.BaseModel]


class SchemaValidator(RecordValidatorBase):
    """Refuses records that do not fit a pydantic model.

    Args:
        schema: one field per DHT key.
        allow_extra_keys: whether keys may be stored that are not a field of any schema.
        prefix: the keys are ``{prefix}_{field}`` instead of ``{field}``.
    """

    def __init__(self, schema: Schema, allow_extra_keys: bool = True, prefix: str | None = None) -> None:
        if not (isinstance(schema, type) and (issubclass(schema, pydantic.BaseModel) or _is_v1(schema))):
            raise TypeError(f"schema must be a subclass of pydantic.BaseModel or pydantic.v1.BaseModel, got {schema!r}")
        self.schemas: list[tuple[Schema, str | None]] = [(schema, prefix)]
        """Each schema with its prefix."""
        self._allow_extra_keys = allow_extra_keys
        self.fields_by_key: dict[bytes, list[tuple[Schema, str]]] = {}
        """By key: the fields whose values may be stored there."""
        self._accepted = AcceptedRecords()  # remains valid when more schemas are merged in
        self._index(schema, prefix)

    def _index(self, schema: Schema, prefix: str | None) -> None:
        relaxed = _v1_with_optional_fields(schema) if _is_v1(schema) else _with_optional_fields(schema)
        for field in schema.__fields__ if _is_v1(schema) else schema.model_fields:
            key = DHTID.generate(field if prefix is None else f"{prefix}_{field}").to_bytes()
            self.fields_by_key.setdefault(key, []).append((relaxed, field))

    def validate(self, record: DHTRecord) -> bool:
        candidates = self.fields_by_key.get(record.key)
        if candidates is None:
            return self._allow_extra_keys
        if record in self._accepted:
            return True
        try:
            content = _decode(record)
        except (ValueError, TypeError):
            return False
        is_accepted = any(fits(schema, field, content) for schema, field in candidates)
        if is_accepted:
            self._accepted.add(record)
        return is_accepted

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Adopt the other's keys. If both describe a key, its records must fit one of the two."""
        if not isinstance(other, SchemaValidator):
            return False
        for schema, prefix in other.schemas:
            if (schema, prefix) not in self.schemas:
                self.schemas.append((schema, prefix))
                self._index(schema, prefix)
        self._allow_extra_keys = self._allow_extra_keys or other._allow_extra_keys
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {"schemas": self.schemas, "_allow_extra_keys": self._allow_extra_keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.fields_by_key = {}
        self._accepted = AcceptedRecords()
        for schema, prefix in self.schemas:
            self._index(schema, prefix)


def _is_v1(schema: type) -> TypeIs[type[v1.BaseModel]]:
    """Whether it is a model of ``pydantic.v1``. In that case the module is loaded already; loading it takes time."""
    loaded = sys.modules.get("pydantic.v1.main")
    return loaded is not None and issubclass(schema, loaded.BaseModel)


def _v1_with_optional_fields(schema: type[v1.BaseModel]) -> type[v1.BaseModel]:
    """Like :func:`_with_optional_fields`, for a model of ``pydantic.v1``."""
    relaxed: type[v1.BaseModel] = types.new_class(f"{schema.__name__}Record", (schema,))
    for field in relaxed.__fields__.values():  # a subclass has copies of its own
        field.required = field.validate_always = False
        field.default, field.default_factory = None, None
    return relaxed


def _with_optional_fields(schema: type[pydantic.BaseModel]) -> type[pydantic.BaseModel]:
    """A new model with the same fields and checks, but no required field: a record holds only one of them."""
    fields: dict[str, Any] = {}
    for name, info in schema.model_fields.items():
        optional = copy.copy(info)
        optional.default, optional.default_factory = None, None
        fields[name] = (info.annotation, optional)
    return pydantic.create_model(f"{schema.__name__}Record", __base__=schema, **fields)


def _decode(record: DHTRecord) -> Any:
    value = MSGPackSerializer.loads(record.value)
    if record.subkey != PLAIN_VALUE:
        return {MSGPackSerializer.loads(record.subkey): value}
    if isinstance(value, dict):
        raise ValueError("a dictionary must be stored entry by entry, with subkeys")
    return value


def fits(schema: Schema, field: str, content: Any) -> bool:
    """Whether a value is one of that field."""
    try:
        if _is_v1(schema):
            parsed = schema.parse_obj({field: content}).dict(include={field}, exclude_unset=True)
        else:
            parsed = schema.model_validate({field: content}).model_dump(include={field}, exclude_unset=True)
    except Exception:  # validators are the user's code, and the content may be hostile
        return False
    return _is_same(parsed.get(field), content)


def _is_same(parsed: Any, content: Any) -> bool:
    """Equality that distinguishes 1 from True and 1.0, and a list from a tuple, at every depth."""
    if type(parsed) is not type(content):
        return False
    if isinstance(content, dict):
        if parsed.keys() != content.keys():
            return False
        parsed_keys = {key: key for key in parsed}
        return all(_is_same(parsed_keys[key], key) and _is_same(parsed[key], content[key]) for key in content)
    if isinstance(content, (list, tuple)):
        return len(parsed) == len(content) and all(map(_is_same, parsed, content))
    return bool(parsed == content)


class _CheckedBytes(bytes):
    """A field type for plain ``bytes`` of a certain kind; it works in models of both versions of pydantic."""

    _kind: ClassVar[Any] = bytes

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(cls._kind)

    @classmethod
    def __get_validators__(cls) -> Iterator[Callable[[Any], bytes]]:
        """For models of ``pydantic.v1``."""
        adapter = pydantic.TypeAdapter(cls._kind)
        yield lambda value: adapter.validate_python(value)


def conbytes(*, regex: bytes | str | None = None, **constraints: Any) -> Any:
    """A type for ``bytes`` that must match a pattern.

    Args:
        regex: pattern that must match at the beginning of the bytes.
        constraints: as for ``pydantic.Field``: ``strict``, ``min_length``, ``max_length``.
    """
    checks: list[Any] = [Field(**constraints)] if constraints else []
    if regex is not None:
        checks.append(AfterValidator(_pattern_check(regex)))
    return type("ConstrainedBytes", (_CheckedBytes,), {"_kind": Annotated[(bytes, *checks)]}) if checks else bytes


def _pattern_check(regex: bytes | str) -> Callable[[bytes], bytes]:
    pattern = re.compile(regex.encode() if isinstance(regex, str) else regex, re.DOTALL)

    def check(value: bytes) -> bytes:
        if not pattern.match(value):
            raise ValueError(f"does not match {pattern.pattern!r}")
        return value

    return check


class BytesWithPublicKey(_CheckedBytes):
    """``bytes`` with an owner tag. Only the owner of the key in the tag can write to a subkey of this type."""

    _kind = Annotated[bytes, Field(strict=True), AfterValidator(_pattern_check(rb".*\[owner:.+\]"))]
