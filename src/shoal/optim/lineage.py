"""What a peer tells of the rounds behind its parameters: enough to see whether two peers train the same model.

Members of a round name it by the same few bytes. Peers that train together share their latest rounds; a newcomer takes
over those of its donor with the state. When some members of a round stay away, it is kept as a *parting*: the others
may have gone on without this peer just as it does without them, and then that round is the last they had in common.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

ROUND_ID_BYTES = 4
"""A name that two rounds share by chance makes two sides of a run look like one, until the next round."""
LAST_ROUNDS = 8
"""How many rounds a peer tells. Who shares none of them trains another model."""
MAX_PARTINGS = 4
BEGINNING = bytes(ROUND_ID_BYTES)
"""In place of a round: before the first one. What was never one run has nothing else in common."""

_PARTING = struct.Struct(f">{ROUND_ID_BYTES}sH{ROUND_ID_BYTES}s")
_WHOLE = 2**16 - 1
MAX_LINEAGE_BYTES = 1 + LAST_ROUNDS * ROUND_ID_BYTES + (1 + MAX_PARTINGS) * _PARTING.size


class Parting(NamedTuple):
    """A round of which some members have stayed away since."""

    round_id: bytes
    kept: int
    """The weight that those who are still here had in it, in 1/65535 of the whole."""
    next_id: bytes
    """This peer's next round, without them: the same for all who went on with it, and for nobody else."""

    @classmethod
    def of(cls, round_id: bytes, share: float, next_id: bytes) -> Parting:
        """Args: share of the weight that is still here, from 0 to 1."""
        return cls(round_id, round(max(0.0, min(1.0, share)) * _WHOLE), next_id)


@dataclass(frozen=True)
class Lineage:
    """The rounds behind a peer's parameters, the oldest one first. Empty: a newcomer without any."""

    rounds: tuple[bytes, ...] = ()
    partings: tuple[Parting, ...] = ()

    def pack(self) -> bytes:
        """As few bytes as possible, for the records of progress."""
        if not self.rounds:
            return b""
        partings = b"".join(_PARTING.pack(*parting) for parting in self.partings)
        return bytes([len(self.rounds)]) + b"".join(self.rounds) + partings

    @classmethod
    def unpack(cls, packed: bytes) -> Lineage:
        """What :meth:`pack` gave.

        Raises:
            ValueError: it is something else.
        """
        if not packed:
            return cls()
        count, end = packed[0], 1 + packed[0] * ROUND_ID_BYTES
        is_whole = end <= len(packed) <= MAX_LINEAGE_BYTES and (len(packed) - end) % _PARTING.size == 0
        if not 1 <= count <= LAST_ROUNDS or not is_whole:
            raise ValueError(f"{len(packed)} bytes are no list of rounds")
        rounds = tuple(packed[start : start + ROUND_ID_BYTES] for start in range(1, end, ROUND_ID_BYTES))
        return cls(rounds, tuple(Parting(*fields) for fields in _PARTING.iter_unpack(packed[end:])))
