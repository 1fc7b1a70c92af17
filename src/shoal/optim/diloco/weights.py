"""How much a peer's pseudo-gradient counts: by what the peer has done for it, and by how old it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Staleness = Callable[[int], float]
"""By how many versions a pseudo-gradient is old, the factor by which it is made smaller."""

WEIGHTINGS = ("batch", "samples")


@dataclass(frozen=True)
class Effort:
    """The inner steps behind a pseudo-gradient that have moved the model, and their samples."""

    steps: int = 0
    samples: int = 0

    def __add__(self, other: Effort) -> Effort:
        return Effort(self.steps + other.steps, self.samples + other.samples)

    def __sub__(self, other: Effort) -> Effort:
        return Effort(self.steps - other.steps, self.samples - other.samples)

    def weight(self, weighting: str) -> float:
        """The weight in the mean.

        A pseudo-gradient is a sum over steps. So every sample counts the same if the weight is the mean batch: samples
        by steps. ``"samples"`` favours fast peers twice, as it is usual in federated averaging.
        """
        if self.steps == 0:
            return 0.0
        return self.samples / self.steps if weighting == "batch" else float(self.samples)


def check_weighting(weighting: object) -> str:
    """Check the name of a way to weight.

    Raises:
        ValueError: there is no such way.
    """
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting must be one of {WEIGHTINGS}, got {weighting!r}")
    return str(weighting)


def usual_staleness(versions: int) -> float:
    """The discount unless the user has another one: one by the square root of one more than the age."""
    return 1 / math.sqrt(1 + versions)


def discount(staleness: Staleness, versions: int) -> float:
    """The factor for a pseudo-gradient that is so many versions old; 1 for a fresh one.

    Raises:
        ValueError: the user's function returns no number from 0 to 1.
    """
    if versions == 0:
        return 1.0
    factor = float(staleness(versions))
    if not 0 <= factor <= 1:
        raise ValueError(f"staleness must return a factor from 0 to 1, but for {versions} versions it gave {factor}")
    return factor
