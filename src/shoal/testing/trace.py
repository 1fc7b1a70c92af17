"""What happened in a simulated network, as one hash: two runs that agree on it did the same."""

from __future__ import annotations

import hashlib
import struct

_MOMENT = struct.Struct("<dq")


class Trace:
    """Takes down everything that reaches a host, with its time and its bytes.

    Args:
        keep_lines: remember one readable line for each event, to find out where two runs part.
    """

    def __init__(self, *, keep_lines: bool = False) -> None:
        self.events = 0
        self.lines: list[str] = []
        self._keep_lines = keep_lines
        self._hash = hashlib.blake2b(digest_size=16)

    def record(self, moment: float, connection: int, event: bytes, data: bytes | memoryview = b"") -> None:
        """Take down an event.

        Args:
            moment: when, in seconds of the loop.
            connection: the number of the connection that it concerns.
            event: what happened, in one word.
            data: the bytes that arrived.
        """
        self.events += 1
        self._hash.update(_MOMENT.pack(moment, connection))
        self._hash.update(event)
        self._hash.update(data)
        if self._keep_lines:
            self.lines.append(f"{moment:.9f} #{connection} {event.decode()} {bytes(data).hex()}")

    def digest(self) -> str:
        """The hash of all events so far, in hexadecimal."""
        return self._hash.hexdigest()
