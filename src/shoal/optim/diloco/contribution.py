"""What a peer contributes to a round, and how much that counts.

A lossy codec sends less than the peer wants to. With *error feedback* the rest is kept, shrinks by a factor, and is
added to what the peer wants to send next time::

    wanted = feedback * error + difference
    sent = what others decode of the codec's bytes of ``wanted``
    error = wanted - sent, but only where the message has counted

Codecs work on a fixed grid of blocks, so the peer knows before a round begins what others will read, whichever group it
finds, and however the group divides the vector. A round that fails changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.compression import Blockwise4BitQuantization, CompressionBase, CompressionInfo, TensorRole

Staleness = Callable[[int], float]
"""By how many versions a pseudo-gradient is old, the factor by which it is made smaller."""

WEIGHTINGS = ("batch", "samples")

PARAMETERS = "parameters"
AVERAGES = ("pseudo_gradients", PARAMETERS)
"""What rounds may average."""


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


def usual_staleness(versions: int) -> float:
    """The discount unless the user has another one: one by the square root of one more than the age."""
    return 1 / math.sqrt(1 + versions)


def discount(staleness: Staleness, versions: int) -> float:
    """The factor for a pseudo-gradient that is this many versions old; 1 for a fresh one.

    Raises:
        ValueError: the user's function returns no number from 0 to 1.
    """
    if versions == 0:
        return 1.0
    factor = float(staleness(versions))
    if not 0 <= factor <= 1:
        raise ValueError(f"staleness must return a factor from 0 to 1, but for {versions} versions it gave {factor}")
    return factor


def default_feedback(codec: CompressionBase) -> float:
    """The factor that suits a codec. The fewer values it sends, the older grows what is left."""
    if codec.sparse:
        return 0.95
    return 1.0 if isinstance(codec, Blockwise4BitQuantization) else 0.0


@dataclass
class Contribution:
    """What this peer has done for the next update of a fragment, since its last message that has counted."""

    codec: CompressionBase
    """Of messages."""
    feedback: float = 0.0
    """The share of :attr:`error` that is added to the next message; 0: no error is kept."""
    effort: Effort = Effort()
    age: int = 0
    """By how many versions the outer parameters have moved meanwhile."""
    is_fresh: bool = False
    """This peer has just joined, and has not been in a slot of this fragment from the beginning."""
    error: torch.Tensor | None = None
    """What messages that have counted have left out; ``None``: nothing."""

    def count(self, samples: int) -> None:
        """An inner step has been made with this many samples; 0: it has not moved the model."""
        if samples:
            self.effort += Effort(1, samples)

    @torch.no_grad()
    def write(self, vector: torch.Tensor, factor: float = 1.0) -> torch.Tensor | None:
        """Make a message of a difference. Nothing else changes until the message has counted.

        Args:
            vector: the difference, finite float32 values on the CPU. It becomes the message.
            factor: the message is made smaller by this, because it is old. What others decode of it counts as the whole
                of what is sent.

        Returns:
            What the message leaves out, to become :attr:`error` if it counts; ``None``: no error is kept.
        """
        if not self.feedback:
            if factor != 1:
                vector.mul_(factor)
            return None
        if self.error is not None:
            # Rounded twice, as everywhere in rounds: fused operations differ between machines.
            vector.add_(self.error * self.feedback)
        left = vector.clone()
        if factor != 1:
            vector.mul_(factor)
        _, sent = self.codec.compress_and_decode(vector, CompressionInfo.from_tensor(vector, role=TensorRole.GRADIENT))
        return left.sub_(sent if factor in (0, 1) else sent.div(factor))

    def forget(self) -> None:
        """What this peer has done is lost."""
        self.effort, self.age, self.error = Effort(), 0, None
