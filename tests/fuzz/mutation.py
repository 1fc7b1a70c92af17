"""Turns valid messages into hostile ones: bytes are changed, and so is what the bytes mean."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack

from shoal.net.transport import PREFIX_BYTES

T = TypeVar("T")

BYTES = [
    b"",
    b"\0",
    b"\xff",
    b"\x80",
    b"\x7f",
    b"[owner:",
    b"]",
    b"[signature:",
    b"\x91" * 60,
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
]
TEXTS = ["", "\0", "/", "p2p", "12D3KooW", "\N{SNOWMAN}", "x" * 300, "-1", "99999999999999999999", "..", "%", "::1"]
NUMBERS = [0, 1, -1, 2**7, 2**8 - 1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1]
FLOATS = [0.0, -0.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 5e-324, 1e18]
MAX_CHANGES = 4
MAX_BYTES = 2**17


class Mutator:
    """Changes things by chance; the same random numbers make the same changes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def one_of(self, seeds: Sequence[T]) -> T:
        return seeds[int(self.rng.random() * len(seeds))]

    # --- bytes --------------------------------------------------------------------------------------------------------

    def bytes(self, seed: bytes, others: Sequence[bytes] = ()) -> bytes:
        """Some changes; now and then none, or nothing of the seed is left.

        Args:
            others: material to take pieces from.
        """
        data = bytearray(seed)
        for _ in range(int(self.rng.random() * (MAX_CHANGES + 1))):
            self._change(data, others)
        return bytes(data[:MAX_BYTES])

    def _change(self, data: bytearray, others: Sequence[bytes]) -> None:
        rng = self.rng
        at = int(rng.random() * (len(data) + 1))
        until = min(len(data), at + 1 + int(rng.random() ** 3 * 40))
        kind = int(rng.random() * 9)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << int(rng.random() * 8)
        elif kind == 1 and at < len(data):
            data[at] = int(rng.random() * 256)
        elif kind == 2:
            del data[at:until]
        elif kind == 3:
            data[at:at] = rng.randbytes(int(rng.random() * 9))
        elif kind == 4:
            data[at:at] = data[at:until] * int(rng.random() ** 4 * 50)
        elif kind == 5:
            self._overwrite_number(data, at)
        elif kind == 6:
            data[at:until] = self.one_of(BYTES)
        elif kind == 7 and others:
            other = self.one_of(others)
            start = int(rng.random() * (len(other) + 1))
            data[at:until] = other[start : start + int(rng.random() * 60)]
        else:
            del data[at:]

    def _overwrite_number(self, data: bytearray, at: int) -> None:
        form, size = self.one_of([(">B", 1), (">H", 2), (">I", 4), ("<I", 4), (">Q", 8)])
        number = self.one_of(NUMBERS) & (256**size - 1)
        data[at : at + size] = struct.pack(form, number)

    def text(self, seed: str) -> str:
        """Some changes of a text."""
        rng = self.rng
        for _ in range(int(rng.random() * (MAX_CHANGES + 1))):
            at = int(rng.random() * (len(seed) + 1))
            until = at + int(rng.random() ** 2 * 20)
            middle = self.one_of([self.one_of(TEXTS), chr(int(rng.random() ** 3 * 0xD7FF)), seed[at:until] * 3, ""])
            seed = seed[:at] + middle + seed[until:]
        return seed

    # --- what bytes mean ----------------------------------------------------------------------------------------------

    def packed(self, seed: bytes, others: Sequence[bytes] = ()) -> bytes:
        """Changes of a msgpack value: of its bytes, or of something inside so that it is msgpack still."""
        if self.rng.random() < 0.5:
            return self.bytes(seed, others)
        try:
            value = msgpack.unpackb(seed, strict_map_key=False)
        except ValueError:
            return self.bytes(seed, others)
        for _ in range(1 + int(self.rng.random() * 2)):
            value = self.value(value)
        return msgpack.packb(value, unicode_errors="surrogatepass")

    def value(self, value: Any) -> Any:
        """Another value of the same type, or of another one, here or somewhere inside."""
        rng = self.rng
        if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
            return self._inside(value)
        if rng.random() < 0.25:
            return self._anything()
        if isinstance(value, bytes):
            return self.bytes(value)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bool) or value is None:
            return self.one_of([True, False, None])
        if isinstance(value, int):
            return self.one_of(NUMBERS)
        if isinstance(value, float):
            return self.one_of([*FLOATS, value + 1e-6, value * 2, -value])
        return self._anything()

    def _inside(self, value: dict[Any, Any] | list[Any]) -> Any:
        at = int(self.rng.random() * len(value))
        kind = self.rng.random()
        if isinstance(value, list):
            if kind < 0.1:
                return value[:at] + value[at + 1 :]
            if kind < 0.2:
                return value + value[at : at + 1] * int(self.rng.random() ** 3 * 400)
            return [*value[:at], self.value(value[at]), *value[at + 1 :]]
        key = list(value)[at]
        if kind < 0.1:
            return {name: value[name] for name in value if name != key}
        if kind < 0.2:
            return {(self.text(name) if name == key and isinstance(name, str) else name): value[name] for name in value}
        return value | {key: self.value(value[key])}

    def _anything(self) -> Any:
        kind = int(self.rng.random() * 9)
        if kind == 0:
            return self._nested()
        simple = [
            None,
            True,
            [],
            {},
            msgpack.ExtType(0x40, b"\x93\x01"),
            msgpack.ExtType(self.rng.randrange(128), b"\x90"),
        ]
        return [self.one_of(BYTES), self.one_of(TEXTS), self.one_of(NUMBERS), self.one_of(FLOATS), self.one_of(simple)][
            kind % 5
        ]

    def _nested(self) -> Any:
        value: Any = None
        for _ in range(int(self.rng.random() * 200)):
            value = {"x": value} if self.rng.random() < 0.3 else [value]
        return value

    # --- messages -----------------------------------------------------------------------------------------------------

    def messages(self, seeds: Sequence[bytes], count: int = 4) -> bytes:
        """A conversation: messages in any order, some with other headers of which the lengths are right."""
        chosen = [self.one_of(seeds) for _ in range(1 + int(self.rng.random() * count))]
        if self.rng.random() < 0.5:
            at = int(self.rng.random() * len(chosen))
            chosen[at] = self.message(chosen[at], seeds)
            return b"".join(chosen)
        return self.bytes(b"".join(chosen), seeds)

    def message(self, message: bytes, seeds: Sequence[bytes]) -> bytes:
        """A message with another header, of which the length is right."""
        prefix, body = message[:PREFIX_BYTES], message[PREFIX_BYTES:]
        header_bytes = int.from_bytes(prefix[4:8], "big")
        header = self.packed(body[:header_bytes], seeds)
        return prefix[:4] + len(header).to_bytes(4, "big") + prefix[8:] + header + body[header_bytes:]
