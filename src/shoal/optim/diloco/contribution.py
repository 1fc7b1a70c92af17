"""What a peer contributes to a round, and how much that counts.

A lossy codec sends less than the peer wants to. With *error feedback* the rest is kept, shrinks by a factor, and is
added to what the peer wants to send next time:

    wanted = feedback * error + difference
    sent = what others decode of the codec's bytes of ``wanted``
    error = wanted - sent, but only where the message has counted

Codecs work on a fixed grid of blocks, so the peer knows before a round begins what others will read, whichever group it
finds, and however the group divides the vector. A round that fails changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.compression import Blockwise4BitQuantization, CompressionBase, CompressionInfo, SerializedTensor, TensorRole

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


@dataclass(frozen=True)
class Encoded:
    """A message as the codec makes it."""

    wanted: torch.Tensor
    """What would be sent if nothing were lost. Encoded in parts cut between blocks, it reads like the message."""
    message: SerializedTensor | None
    """The whole of it, encoded. It may share memory with ``wanted``. ``None``: it was sent before a restart."""
    left: torch.Tensor | None
    """``wanted`` minus what others decode; ``None`` without error feedback."""


class Compressor:
    """The codec and the error feedback of one fragment.

    Args:
        codec: how differences are sent.
        length: of the fragment's vector.
        error_feedback: from 0, the error is forgotten, to 1, all of it is kept; ``None``: what suits the codec.

    Raises:
        ValueError: what the codec sends of a value depends on more than its block, or the factor is not possible.
    """

    def __init__(self, codec: CompressionBase, length: int, error_feedback: float | None = None) -> None:
        if codec.block is None:
            raise ValueError(
                f"{type(codec).__name__} has no blocks, so that nobody knows in advance what it makes of a value: "
                "use Float16Compression(), BlockwiseQuantization(), Blockwise4BitQuantization() or TopKCompression()"
            )
        self.codec, self.length = codec, length
        self.feedback = default_feedback(codec) if error_feedback is None else error_feedback
        if not 0 <= self.feedback <= 1:
            raise ValueError(f"error_feedback must be from 0 to 1, got {error_feedback}")
        self._error: torch.Tensor | None = None

    @property
    def error(self) -> torch.Tensor | None:
        """What this peer has not sent yet; ``None``: nothing."""
        return self._error

    @torch.no_grad()
    def prepare(self, difference: torch.Tensor) -> Encoded:
        """What to send of a difference. Nothing changes until :meth:`counted` or :meth:`alone` is called.

        Args:
            difference: finite float32 values on the CPU. They are overwritten: this memory becomes ``wanted``.
        """
        self._check("difference", difference)
        rest = torch.empty_like(difference) if self.feedback else None
        if rest is not None and self._error is not None:
            # Rounded twice, as everywhere in rounds: fused operations differ between machines.
            difference.add_(torch.mul(self._error, self.feedback, out=rest))
        info = CompressionInfo.from_tensor(difference, role=TensorRole.GRADIENT)
        if rest is None:
            return Encoded(difference, self.codec.compress(difference, info), None)
        message, sent = self.codec.compress_and_decode(difference, info)
        return Encoded(difference, message, torch.sub(difference, sent, out=rest))

    @torch.no_grad()
    def reduced(self, outgoing: Encoded, factor: float) -> Encoded:
        """What is sent instead if the message counts only in part, because it is old. The vector is made smaller.

        The codec encodes smaller values, and rounds them otherwise. What the others decode of them counts as ``factor``
        times what was sent.

        Args:
            factor: above 0 and up to 1.
        """
        if outgoing.left is None or factor == 0:
            outgoing.wanted.mul_(factor)
            return outgoing
        left = outgoing.wanted.clone()
        smaller = outgoing.wanted.mul_(factor)
        info = CompressionInfo.from_tensor(smaller, role=TensorRole.GRADIENT)
        message, sent = self.codec.compress_and_decode(smaller, info)
        return Encoded(smaller, message, left.sub_(sent.div(factor)))

    def counted(self, outgoing: Encoded) -> None:
        """Note that a message has counted in the result of its round. It is used up."""
        if outgoing.left is not None:
            self._error = outgoing.left

    def alone(self, outgoing: Encoded) -> torch.Tensor:
        """The result of a round without others: all that the peer wanted to send, so that no error is left."""
        self.forget()
        return outgoing.wanted

    def forget(self) -> None:
        """Drop the error: what it refers to is gone."""
        self._error = None

    def state_dict(self) -> dict[str, Any]:
        """The error, for a checkpoint."""
        return {"error": self._error}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the error from a checkpoint.

        Raises:
            ValueError: it is that of another fragment.
        """
        error = state["error"]
        if error is not None:
            error = error.detach().to(device="cpu", dtype=torch.float32, copy=True)
            self._check("error", error)
        self._error = error if self.feedback else None

    def _check(self, what: str, vector: torch.Tensor) -> None:
        if vector.shape != (self.length,) or vector.dtype != torch.float32 or vector.device.type != "cpu":
            raise ValueError(
                f"the {what} must be {self.length} float32 values on the CPU, "
                f"got {tuple(vector.shape)} of {vector.dtype} on {vector.device}"
            )


@dataclass
class Contribution:
    """What this peer has done for the next update of a fragment, since its last message that has counted."""

    compressor: Compressor | None = None
    """Keeps what messages leave out; ``None``: that is lost."""
    effort: Effort = Effort()
    age: int = 0
    """By how many versions the outer parameters have moved meanwhile."""
    is_fresh: bool = False
    """This peer has just joined, and has not been in a slot of this fragment from the beginning."""

    def count(self, samples: int) -> None:
        """An inner step has been made with this many samples; 0: it has not moved the model."""
        if samples:
            self.effort += Effort(1, samples)

    def prepare(self, difference: torch.Tensor) -> Encoded | None:
        """See :meth:`Compressor.prepare`."""
        return None if self.compressor is None else self.compressor.prepare(difference)

    def note_left_out(self, encoded: Encoded | None, *, is_alone: bool = False) -> None:
        """A message has counted: what it has left out is part of the next one; alone, nothing is."""
        if self.compressor is None or encoded is None:
            return
        if is_alone:
            self.compressor.alone(encoded)
        else:
            self.compressor.counted(encoded)

    def forget(self) -> None:
        """What this peer has done is lost."""
        self.effort, self.age = Effort(), 0
        if self.compressor is not None:
            self.compressor.forget()


@dataclass
class Outgoing:
    """The message of this peer in a round."""

    effort: Effort
    """What is behind it."""
    weight: float
    is_finite: bool = True
    sent: torch.Tensor | None = None
    """The model's values when it was made; ``None``: they are not needed."""
    encoded: Encoded | None = None
    """With what it leaves out; ``None``: nothing of that is kept."""
    factor: float | None = None
    """It was made smaller by this factor; ``None``: that is not decided yet."""
