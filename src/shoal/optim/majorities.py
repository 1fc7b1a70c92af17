"""Votes among peers some of which lie: each host has one vote, and up to a fifth of the hosts may be liars."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

PEERS_PER_LIAR = 5
"""One of this many may lie."""


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


def cut_to_the_rest(weights: Mapping[bytes, float]) -> dict[bytes, float]:
    """Weights of peers, none of which counts for more than half of what all bring but for the largest fifth.

    A peer may claim twice as much the next time, so it can be half of the whole. Of fewer than five peers each counts
    in full: nobody can tell a liar from a fast machine.
    """
    if len(weights) < PEERS_PER_LIAR:
        return dict(weights)
    ordered = sorted(weights.values())
    rest = sum(ordered[: len(ordered) - len(ordered) // PEERS_PER_LIAR])
    return {peer: min(weight, rest / 2) for peer, weight in weights.items()}
