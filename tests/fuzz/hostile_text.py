"""Puts texts into valid inputs that control a terminal, forge lines of a log, or fill a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from tests.fuzz.mutation import Mutator

CODES = "\x1b[2J\r\nDec 01 00:00:00.000 [WARN] forged\x07\x00\u202e\x9b31m"
TEXTS = [CODES, CODES + "x" * 900_000, CODES * 20_000, "\ud800" * 9, "\x1b" * 150]


class Forger(Mutator):
    """Makes inputs as a :class:`Mutator` does, each with such a text somewhere."""

    def forged(self) -> str:
        return self.one_of(TEXTS)

    def text(self, seed: str) -> str:
        kind = int(self.rng.random() * 4)
        if kind == 0:
            return self.forged()
        at = int(self.rng.random() * (len(seed) + 1))
        if kind == 1:
            return seed[:at] + self.forged() + seed[at:]
        parts = seed.split("/")
        parts[int(self.rng.random() * len(parts))] = self.forged()[: 10 if kind == 2 else None]
        return "/".join(parts)

    def bytes(self, seed: bytes, others: Sequence[bytes] = ()) -> bytes:
        forged, at = self.forged().encode(errors="replace"), int(self.rng.random() * (len(seed) + 1))
        return self.one_of([forged, seed + forged, seed[:at] + forged + seed[at:], seed[:at] + forged[:9] + seed[at:]])

    def packed(self, seed: bytes, others: Sequence[bytes] = ()) -> bytes:
        try:
            value = msgpack.unpackb(seed, strict_map_key=False)
        except ValueError:
            return self.bytes(seed, others)
        return bytes(msgpack.packb(self.value(value), unicode_errors="surrogatepass"))

    def value(self, value: Any) -> Any:
        """The same with such a text in place of something inside, or as a key."""
        if isinstance(value, dict) and value and self.rng.random() < 0.9:
            key = self.one_of(list(value))
            rest = {name: value[name] for name in value if name != key}
            return (
                {**rest, self.forged(): value[key]}
                if self.rng.random() < 0.3
                else value | {key: self.value(value[key])}
            )
        if isinstance(value, list) and value and self.rng.random() < 0.9:
            at = int(self.rng.random() * len(value))
            return [*value[:at], self.value(value[at]), *value[at + 1 :]]
        return self.one_of(
            [self.forged(), self.forged().encode(errors="replace"), {self.forged(): self.forged()}, [self.forged()]]
        )
