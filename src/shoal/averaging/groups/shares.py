"""How much of the vector each member of a group should reduce.

In a butterfly all-reduce of n peers, a peer with a share w of the vector (Σw = 1) sends and receives its own vector
once and serves n - 1 others for its share: in units of the vector its traffic each way is 1 - w + (n - 1)·w = 1 +
(n - 2)·w. With bandwidth b it needs (1 + (n - 2)·w) / b. The slowest peer that has a share is as fast as it can be
when all of them need the same time T, which gives w = max(0, (T·b - 1) / (n - 2)): peers fill up like water over an
uneven ground.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def load_balance_peers(vector_size: int, bandwidths: Sequence[float | None], min_size: int = 0) -> tuple[int, ...]:
    """Split a vector among peers so that the slowest one is done as early as possible.

    Args:
        vector_size: number of values.
        bandwidths: of each peer, in any unit; 0 = must not reduce; ``None`` = unknown, taken as the mean of the others.
        min_size: a peer that would get fewer values gets none, unless that leaves nobody.

    Returns:
        Number of values for each peer; their sum is ``vector_size``.

    Raises:
        AssertionError: nobody may reduce.
    """
    known = [b for b in bandwidths if b]
    default = sum(known) / len(known) if known else 1.0
    speeds = [default if b is None else float(b) for b in bandwidths]
    assert any(speed > 0 for speed in speeds), f"at least one peer must have a bandwidth above 0, got {bandwidths}"
    shares = _drop_small(_fill(speeds), min_size / max(vector_size, 1))
    return _to_integers(shares, vector_size)


def rescale_shares(shares: Sequence[int], vector_size: int) -> tuple[int, ...]:
    """The same split for a vector of another size, in exact arithmetic: all members get the same.

    Args:
        shares: number of values for each peer, as agreed for the whole vector.
        vector_size: number of values to split now.
    """
    total = sum(shares)
    if total == vector_size:
        return tuple(shares)
    if total == 0:
        raise ValueError(f"cannot split {vector_size} values in the proportion {tuple(shares)}")
    result, remainders = zip(*[divmod(share * vector_size, total) for share in shares], strict=True)
    most = sorted(range(len(shares)), key=lambda i: (-remainders[i], i))[: vector_size - sum(result)]
    return tuple(share + (i in most) for i, share in enumerate(result))


def _fill(speeds: Sequence[float]) -> list[float]:
    """Shares that give every peer with a share the same time."""
    count = len(speeds)
    if count <= 2:  # the time does not depend on the shares: split evenly
        able = sum(speed > 0 for speed in speeds)
        return [1 / able if speed > 0 else 0.0 for speed in speeds]
    active = sorted((speed for speed in speeds if speed > 0), reverse=True)
    while True:
        time = (count - 2 + len(active)) / sum(active)
        if time * active[-1] >= 1 or len(active) == 1:
            break
        # This peer would need longer for its own vector alone: the others reduce for it.
        active.pop()
    slowest = active[-1]
    return [max(0.0, (time * speed - 1) / (count - 2)) if speed >= slowest else 0.0 for speed in speeds]


def _drop_small(shares: list[float], min_share: float) -> list[float]:
    if max(shares) < min_share:
        return shares
    kept = [share if share >= min_share else 0.0 for share in shares]
    total = sum(kept)
    return [share / total for share in kept]


def _to_integers(shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Round down, then give the rest one by one to whoever is furthest below its share (Jefferson's rule)."""
    result = [math.floor(share * total) for share in shares]
    for _ in range(total - sum(result)):
        best = max(
            range(len(shares)),
            key=lambda i: (round(shares[i] / (result[i] + 1), 12), -result[i], -i) if shares[i] else (-1.0, 0, 0),
        )
        result[best] += 1
    return tuple(result)
