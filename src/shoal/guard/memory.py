"""A memory of peers that cannot grow without limit."""

from __future__ import annotations

from typing import Any, TypeVar

Key = TypeVar("Key")

# Identities are free, memory is not.
_MAX_REMEMBERED = 4096


def remember(known: dict[Key, Any], key: Key, what: Any) -> None:
    """Keep something about a peer. When the memory is full, its oldest entry goes."""
    known[key] = what
    if len(known) > _MAX_REMEMBERED:
        del known[next(iter(known))]
