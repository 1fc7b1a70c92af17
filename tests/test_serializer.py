"""Plain values to msgpack and back."""

from __future__ import annotations

import contextlib
import logging
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base import serializer
from shoal.base.logs import Seldom
from shoal.base.serializer import MSGPackSerializer

pytestmark = pytest.mark.oldest

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner), max_leaves=4)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    """Equality that tells types apart at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        assert isinstance(b, (list, tuple))
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(values)
def test_values_survive_with_their_types(value):
    assert same(MSGPackSerializer.loads(MSGPackSerializer.dumps(value)), value)


@given(values, values)
def test_different_values_have_different_bytes(a, b):
    assert (MSGPackSerializer.dumps(a) == MSGPackSerializer.dumps(b)) == same(a, b)


@pytest.mark.parametrize("group", [(1, True, 1.0, "1"), ([1], (1,), {1: None}), (b"a", "a"), ((), [], "", b"", None)])
def test_similar_values_are_told_apart(group):
    assert len({MSGPackSerializer.dumps(value) for value in group}) == len(group)


@pytest.mark.parametrize("value", [object(), {1, 2}, print, 1j, [object()], {"a": {1}}])
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(TypeError, match="cannot serialize"):
        MSGPackSerializer.dumps(value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_value_error(data):
    with contextlib.suppress(ValueError):
        MSGPackSerializer.loads(data)


@pytest.mark.parametrize("cut", range(1, 20))
def test_truncated_bytes_are_refused(cut):
    packed = MSGPackSerializer.dumps({"key": [1, 2.5, (b"x", "y")], "other": None})
    with pytest.raises(ValueError, match="not a valid msgpack value"):
        MSGPackSerializer.loads(packed[:-cut])


def test_bytes_after_the_value_are_refused():
    with pytest.raises(ValueError, match="not a valid msgpack value"):
        MSGPackSerializer.loads(MSGPackSerializer.dumps(1) + b"\x00")


def test_nesting_is_limited():
    packed = MSGPackSerializer.dumps(())
    for _ in range(100):
        packed = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + packed))
    with pytest.raises(ValueError, match="deep"):
        MSGPackSerializer.loads(packed)


@pytest.fixture
def point_type():
    class Point:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def packb(self):
            return bytes([self.x, self.y])

        @classmethod
        def unpackb(cls, data):
            return cls(*data)

    MSGPackSerializer.ext_serializable(0x21)(Point)
    yield Point
    del MSGPackSerializer._ext_types[Point]
    del MSGPackSerializer._ext_type_codes[0x21]


def test_registered_classes_travel(point_type):
    restored = MSGPackSerializer.loads(MSGPackSerializer.dumps([point_type(1, 2), (point_type(3, 4),)]))
    assert [(p.x, p.y) for p in (restored[0], restored[1][0])] == [(1, 2), (3, 4)]


def test_unknown_extensions_stay_bytes_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(serializer, "warn_seldom", Seldom(serializer.logger.warning))
    with caplog.at_level(logging.WARNING, logger="shoal.base.serializer"):
        assert MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(0x22, b"raw"))) == b"raw"
        for _ in range(1000):
            MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(0x23, b"raw")))
    assert "0x22" in caplog.text
    assert len(caplog.records) == 1  # nobody fills a disk with them


def test_a_message_of_unknown_extensions_is_refused():
    """Each costs a call of Python and takes three bytes: a message would keep a loop busy for a tenth of a second."""
    few, many = ([msgpack.ExtType(0x22, b"") for _ in range(count)] for count in (1024, 1025))
    assert len(MSGPackSerializer.loads(msgpack.packb(few))) == 1024
    with pytest.raises(ValueError, match="unknown extension types"):
        MSGPackSerializer.loads(msgpack.packb(many))
    with pytest.raises(ValueError, match="unknown extension types"):
        MSGPackSerializer.loads(MSGPackSerializer.dumps([(each,) for each in many]))


def colliding_keys(count):
    """Tuples of one hash, which everybody can find: that of a tuple depends on the hashes of its items alone."""
    modulus = 2**61 - 1  # integers that differ by this have the same hash
    return [
        tuple(i + modulus * (number >> position & 1) for position, i in enumerate(range(1, 8)))
        for number in range(count)
    ]


def test_keys_that_were_chosen_to_collide_are_refused():
    keys = colliding_keys(100)
    assert len(set(keys)) == 100
    assert len(set(map(hash, keys))) == 1
    packed = MSGPackSerializer.dumps(dict.fromkeys(keys, 0))
    with pytest.raises(ValueError, match="100 keys have the same hash"):
        MSGPackSerializer.loads(packed)
    assert len(MSGPackSerializer.loads(MSGPackSerializer.dumps({i: i for i in range(10_000)}))) == 10_000


@pytest.mark.parametrize("code", [-1, 128, 0x40, "1"])
def test_codes_out_of_range_are_refused(code):
    with pytest.raises(ValueError, match="type_code must be"):
        MSGPackSerializer.ext_serializable(code)


def test_a_code_cannot_be_taken_twice(point_type):
    class Other:
        packb = unpackb = lambda self: b""

    with pytest.raises(ValueError, match="is taken by"):
        MSGPackSerializer.ext_serializable(0x21)(Other)


def test_a_class_without_packb_is_refused():
    with pytest.raises(TypeError, match="must define packb"):
        MSGPackSerializer.ext_serializable(0x23)(int)
