"""Votes of many peers, some of which lie: each host has one vote, and up to a fifth of the hosts may be liars."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

PEERS_PER_LIAR = 5
"""One of this many peers may lie (chosen)."""


def largest_but_for_liars(values: Iterable[float]) -> float:
    """The largest value without the largest fifth of the values; with fewer than five values, simply the largest."""
    ordered = sorted(values, reverse=True)
    return ordered[len(ordered) // PEERS_PER_LIAR]


def votes_by_host(epochs: Mapping[bytes, int], host_of: Callable[[bytes], Hashable]) -> list[int]:
    """The epoch that each host votes for, lowest first. The vote of a host is the lower median of its peers' epochs.

    Args:
        epochs: the epoch that each peer claims.
        host_of: the host of a peer.
    """
    by_host: dict[Hashable, list[int]] = {}
    for peer, epoch in epochs.items():
        by_host.setdefault(host_of(peer), []).append(epoch)
    # Most hosts have one peer.
    return sorted(
        claimed[0] if len(claimed) == 1 else sorted(claimed)[(len(claimed) - 1) // 2] for claimed in by_host.values()
    )


Key = TypeVar("Key", bound=Hashable)


def cut_to_others(weights: Mapping[Key, float], times: float) -> dict[Key, float]:
    """Clip each peer's weight to ``times`` × the largest weight without the largest fifth.

    With fewer than five peers nothing is clipped, because a liar cannot be told from a fast machine.
    """
    heavy = [weight for weight in weights.values() if weight > 0]
    most = times * largest_but_for_liars(heavy) if len(heavy) >= PEERS_PER_LIAR else math.inf
    return {peer: min(weight, most) for peer, weight in weights.items()}
