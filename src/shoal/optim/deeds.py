"""What a peer has brought to rounds, and memories of such things that cannot grow without limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key")

# How many peers each memory holds at most: identities are free, memory is not.
_MAX_REMEMBERED = 4096


@dataclass(slots=True)
class ContributionHistory:
    """What a peer has brought to rounds."""

    weight: float
    """Samples, in the latest rounds."""
    seconds: float
    """How long the training for the latest round took."""
    missed: int = 0
    """For how many rounds in a row it did not come although this peer waited for it."""
    has_wasted: bool = False
    """It was unproven, came, and held up the round."""

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.weight / self.seconds


def remember(known: dict[Key, Any], key: Key, what: Any) -> None:
    """Keep something about a peer. When the memory is full, its oldest entry goes."""
    known[key] = what
    if len(known) > _MAX_REMEMBERED:
        del known[next(iter(known))]
