"""Other samples on each peer, without any talk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from shoal.data.chunks import shuffler
from shoal.dht import DHT
from shoal.p2p import PeerID


class Shuffled(Sampler[int]):
    """Indices of a data set in an order of this peer's own, another one in each iteration.

    Args:
        samples: size of the data set.
        key: decides the order.
    """

    def __init__(self, samples: int, key: str) -> None:
        self.samples, self.key = samples, key
        self.number = 0
        """How many iterations have begun."""

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        place = shuffler(self.samples, f"{self.key}/{self.number}")
        self.number += 1
        return map(place, range(self.samples))


def shuffled(dataset: Any, peer: DHT | PeerID | str | int, *, seed: int = 0) -> Any:
    """Shuffle a data set differently on each peer: the simple way to give them other samples at any time.

    Over one pass of all peers some samples come several times and some do not come at all, as in sampling with
    replacement. :class:`~shoal.data.SharedPass` does better, and talks for it.

    Args:
        dataset: map-style, with ``len()``: the result is a sampler for a ``DataLoader``; or a stream that has
            ``shuffle(seed=...)``, as those of the package ``datasets`` have: the result is another stream.
        peer: who this is: its DHT, its peer id, or any number or text that no other peer has.
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
