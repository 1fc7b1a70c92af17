"""Orders of samples: a permutation that needs no memory, and a different order on each peer without communication."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler

from shoal.dht import DHT
from shoal.p2p import PeerID


def shuffler(size: int, key: str) -> Callable[[int], int]:
    """A permutation of ``range(size)`` that takes no memory and is the same everywhere.

    It is a Feistel network of four rounds over the next larger power of four; numbers outside the range are permuted
    again (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    seeds = [
        int.from_bytes(hashlib.blake2b(f"{key}/{turn}".encode(), digest_size=8).digest(), "little") for turn in range(4)
    ]

    def once(index: int) -> int:
        left, right = index >> half, index & mask
        for seed in seeds:
            left, right = right, left ^ (_mixed(right ^ seed) & mask)
        return left << half | right

    def permuted(index: int) -> int:
        index = once(index)
        while index >= size:
            index = once(index)
        return index

    return permuted


def _mixed(value: int) -> int:
    """Mix bits so that each depends on all (the finalizer of SplitMix64)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


class Shuffled(Sampler[int]):
    """Indices of a data set in this peer's own order, a new one in each iteration.

    Args:
        samples: size of the data set.
        key: decides the order.
    """

    def __init__(self, samples: int, key: str) -> None:
        self.samples, self.key = samples, key
        self.number = 0
        """The number of iterations that have begun."""

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        place = shuffler(self.samples, f"{self.key}/{self.number}")
        self.number += 1
        return map(place, range(self.samples))


def shuffled(dataset: Any, peer: DHT | PeerID | str | int, *, seed: int = 0) -> Any:
    """Shuffle a data set differently on each peer: the simple way to give peers different samples at any time.

    In one pass of all peers, some samples occur several times and others never, as in sampling with replacement.
    :class:`~shoal.data.SharedPass` avoids that, at the cost of some communication.

    Args:
        dataset: map-style, with ``len()``: the result is a sampler for a ``DataLoader``; or a stream with
            ``shuffle(seed=...)``, as in the package ``datasets``: the result is another stream.
        peer: identifies this peer: its DHT, its peer id, or any number or text that no other peer has.
        seed: changes the order.

    Raises:
        TypeError: the data set can be shuffled in neither way.
    """
    name = str(peer.peer_id if isinstance(peer, DHT) else peer)
    key = f"{name}/{seed}"
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return Shuffled(len(dataset), key)
    if hasattr(dataset, "shuffle"):
        return dataset.shuffle(seed=int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little"))
    raise TypeError(
        f"a {type(dataset).__name__} has neither len() and [], nor shuffle(seed=...): shuffle it by {key!r} yourself"
    )
