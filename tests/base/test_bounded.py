"""Memories of limited size and age."""

from __future__ import annotations

import pytest

from shoal.base.bounded import Bounded


def test_the_oldest_entry_leaves_when_there_are_too_many() -> None:
    evicted: list[tuple[str, int]] = []
    table: Bounded[str, int] = Bounded(2, on_evict=lambda key, value: evicted.append((key, value)))
    table["a"], table["b"], table["a"], table["c"] = 1, 2, 3, 4
    assert dict(table) == {"a": 3, "c": 4}
    assert evicted == [("b", 2)]


def test_touch_makes_an_entry_the_newest() -> None:
    table: Bounded[str, int] = Bounded(2)
    table.update({"a": 1, "b": 2})
    assert table["a"] == table.get("a") == 1  # reading does not
    assert list(table) == ["a", "b"]
    table.touch("a")
    assert list(table) == ["b", "a"]
    with pytest.raises(KeyError):
        table.touch("c")


def test_setdefault_leaves_an_entry_in_its_place() -> None:
    table: Bounded[str, int] = Bounded(2)
    table.update({"a": 1, "b": 2})
    assert table.setdefault("a", 5) == 1
    assert list(table) == ["a", "b"]


def test_an_entry_expires_at_an_age() -> None:
    now, evicted = 0.0, list[str]()
    table: Bounded[str, int] = Bounded(9, seconds=10, now=lambda: now, on_evict=lambda key, _: evicted.append(key))
    table["a"] = 1
    now = 5.0
    table["b"] = 2
    now = 10.0
    assert "a" not in table
    assert table.get("a", -1) == -1
    assert evicted == ["a"]
    table.touch("b")
    now = 19.0
    assert list(table.items()) == [("b", 2)]
    now = 20.0
    assert not table
    assert table.pop("b", None) is None


@pytest.mark.parametrize(("most", "seconds", "now"), [(0, None, None), (1, 5.0, None), (1, None, lambda: 0.0)])
def test_a_table_without_sense_is_refused(most: int, seconds: float | None, now: object) -> None:
    arguments = {"now": now} if seconds is None else {"seconds": seconds, "now": now}
    with pytest.raises(ValueError, match="give a size"):
        Bounded(most, **arguments)  # type: ignore[arg-type]
