"""Nested structures: walked in one order, rebuilt as they were."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.extras import nested_compare, nested_flatten, nested_map, nested_pack

pytestmark = pytest.mark.oldest

Pair = namedtuple("Pair", ["first", "second"])

structures: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.lists(inside, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inside, max_size=4)
        | st.builds(Pair, inside, inside)
    ),
    max_leaves=20,
)


def test_values_come_in_order_with_dictionaries_by_sorted_key() -> None:
    assert list(nested_flatten([1, (2, {"b": 4, "a": 3}), Pair(5, [6])])) == [1, 2, 3, 4, 5, 6]
    assert list(nested_flatten("text")) == ["text"]
    assert list(nested_flatten([])) == []


@given(structures)
def test_packing_is_the_opposite_of_flattening(structure: Any) -> None:
    packed = nested_pack(nested_flatten(structure), structure)
    assert packed == structure
    assert repr(packed) == repr(structure)  # types and the order of keys too


@pytest.mark.parametrize(("values", "message"), [([1], "fewer values"), ([1, 2, 3], "more values")])
def test_the_number_of_values_must_fit(values: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nested_pack(values, {"a": 0, "b": 0})


def test_mapping_several_structures() -> None:
    one, two = {"x": [1, 2], "y": Pair(3, ())}, {"y": Pair(30, ()), "x": [10, 20]}
    assert nested_map(lambda a, b: a + b, one, two) == {"x": [11, 22], "y": Pair(33, ())}
    assert nested_map(str, (1, [2])) == ("1", ["2"])
    with pytest.raises(ValueError, match="at least one"):
        nested_map(str)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2], [1]),
        ([1], (1,)),
        ([1], 1),
        (1, [1]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, [1]),
        (Pair(1, 2), (1, 2)),
        ([[1]], [[1, 2]]),
    ],
)
def test_another_form_is_noticed(first: Any, second: Any) -> None:
    assert not nested_compare(first, second)
    with pytest.raises(ValueError, match="structure 2 has another form"):
        nested_map(lambda a, b: None, first, second)


@given(structures)
def test_values_do_not_count_for_the_form(structure: Any) -> None:
    assert nested_compare(structure, nested_map(lambda value: "other", structure))
