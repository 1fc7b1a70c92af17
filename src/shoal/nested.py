"""Lists, tuples, named tuples and dictionaries inside each other, as flat sequences of what they hold.

Dictionaries are walked in the order of their sorted keys, so that equal ones give equal sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def _children(structure: Any) -> list[Any] | None:
    """What a structure holds, in order; ``None`` for a value that is no structure."""
    if isinstance(structure, (list, tuple)):
        return list(structure)
    if isinstance(structure, dict):
        return [structure[key] for key in sorted(structure)]
    return None


def _rebuild(structure: Any, children: list[Any]) -> Any:
    if isinstance(structure, dict):
        by_key = dict(zip(sorted(structure), children, strict=True))
        return {key: by_key[key] for key in structure}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*children)
    return tuple(children) if isinstance(structure, tuple) else children


def nested_flatten(structure: Any) -> Iterator[Any]:
    """The values of a nested structure, one after another."""
    children = _children(structure)
    if children is None:
        yield structure
        return
    for child in children:
        yield from nested_flatten(child)


def nested_pack(flat: Iterable[Any], structure: Any) -> Any:
    """The opposite of :func:`nested_flatten`: put values into a structure like the given one.

    Raises:
        ValueError: too few or too many values.
    """
    values = iter(flat)
    packed = _pack(values, structure)
    if next(values, values) is not values:
        raise ValueError("more values than the structure has places")
    return packed


def _pack(values: Iterator[Any], structure: Any) -> Any:
    children = _children(structure)
    if children is not None:
        return _rebuild(structure, [_pack(values, child) for child in children])
    for value in values:
        return value
    raise ValueError("fewer values than the structure has places")


def nested_compare(first: Any, second: Any) -> bool:
    """Whether two structures have the same form: equal types, lengths and keys at every depth. Values do not count."""
    ours, theirs = _children(first), _children(second)
    if ours is None or theirs is None:
        return ours is theirs
    if _kind(first) is not _kind(second) or len(ours) != len(theirs):
        return False
    if isinstance(first, dict) and first.keys() != second.keys():
        return False
    return all(map(nested_compare, ours, theirs))


def _kind(structure: Any) -> type:
    if isinstance(structure, dict):
        return dict
    return type(structure) if hasattr(structure, "_fields") else tuple if isinstance(structure, tuple) else list


def nested_map(function: Callable[..., Any], *structures: Any) -> Any:
    """Apply a function to the values at the same place of several structures; the results form such a structure.

    Raises:
        ValueError: no structure, or structures of different form.
    """
    if not structures:
        raise ValueError("nested_map needs at least one structure")
    first, *others = structures
    for number, other in enumerate(others, start=2):
        if not nested_compare(first, other):
            raise ValueError(f"structure {number} has another form than the first one: {other!r}, {first!r}")
    return nested_pack(map(function, *map(nested_flatten, structures)), first)
