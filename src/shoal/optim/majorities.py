"""Votes among peers some of which lie: each host has one vote, and up to a fifth of the hosts may be liars."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

PEERS_PER_LIAR = 5
"""One of this many may lie."""
MOST_AT_FIRST = 8


def largest_but_for_liars(values: Iterable[float]) -> float:
    """The largest value after the largest fifth is left out; of fewer than five values, simply the largest."""
    ordered = sorted(values, reverse=True)
    return ordered[len(ordered) // PEERS_PER_LIAR]


def votes_by_host(epochs: Mapping[bytes, int], host_of: Callable[[bytes], Hashable]) -> list[int]:
    """The epoch that each host votes for, the lowest first. The vote of a host is the lower median of its peers.

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


def cut_at_first(weights: Mapping[bytes, float]) -> dict[bytes, float]:
    """Weights in the first round that a peer knows of, when everybody could claim what it likes.

    None of them counts for more than eight times the largest but for the largest fifth. A machine that is faster than
    that counts in full after some more rounds, in each of which it may bring twice as much as before. Of fewer than
    five peers each counts in full: nobody can tell a liar from a fast machine.
    """
    if len(weights) < PEERS_PER_LIAR:
        return dict(weights)
    most = MOST_AT_FIRST * largest_but_for_liars(weights.values())
    return {peer: min(weight, most) for peer, weight in weights.items()}
