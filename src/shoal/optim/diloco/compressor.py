"""What a peer sends of its difference from the outer parameters, and what it keeps for the next time.

A lossy codec sends less than the peer wants to. With *error feedback* the rest is kept, shrinks by a factor, and is
added to what the peer wants to send next time:

    wanted = feedback * error + difference
    sent = what others decode of the codec's bytes of ``wanted``
    error = wanted - sent, but only where the message has counted

Codecs work on a fixed grid of blocks, so the peer knows before a round begins what others will read, whichever group it
finds, and however the group divides the vector. A round that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.compression import Blockwise4BitQuantization, CompressionBase, CompressionInfo, SerializedTensor, TensorRole


def default_feedback(codec: CompressionBase) -> float:
    """The factor that suits a codec. The fewer values it sends, the older grows what is left."""
    if codec.sparse:
        return 0.95
    return 1.0 if isinstance(codec, Blockwise4BitQuantization) else 0.0


@dataclass(frozen=True)
class Contribution:
    """What a peer contributes to one round."""

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
        self.codec, self.length, self.block = codec, length, codec.block
        self.feedback = default_feedback(codec) if error_feedback is None else error_feedback
        if not 0 <= self.feedback <= 1:
            raise ValueError(f"error_feedback must be from 0 to 1, got {error_feedback}")
        self._error: torch.Tensor | None = None

    @property
    def error(self) -> torch.Tensor | None:
        """What this peer has not sent yet; ``None``: nothing."""
        return self._error

    @torch.no_grad()
    def prepare(self, difference: torch.Tensor) -> Contribution:
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
            return Contribution(difference, self.codec.compress(difference, info), None)
        message, sent = self.codec.compress_and_decode(difference, info)
        return Contribution(difference, message, torch.sub(difference, sent, out=rest))

    @torch.no_grad()
    def reduced(self, outgoing: Contribution, factor: float) -> Contribution:
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
        return Contribution(smaller, message, left.sub_(sent.div(factor)))

    @torch.no_grad()
    def counted(self, outgoing: Contribution, parts: Iterable[tuple[int, int]] | None = None) -> None:
        """Note that a message has counted in the result of its round.

        Args:
            outgoing: what was sent. It is used up.
            parts: begin and end of each part in which it has counted; the error of others stays. ``None``: in all.

        Raises:
            ValueError: a part does not lie between two blocks of the vector.
        """
        spans = [(0, self.length)] if parts is None else list(parts)
        for begin, end in spans:
            is_cut = begin % self.block or (end % self.block and end != self.length)
            if is_cut or not 0 <= begin <= end <= self.length:
                raise ValueError(
                    f"values {begin} to {end} are no part of {self.length} values in blocks of {self.block}"
                )
        if outgoing.left is None:
            return
        if parts is None:
            self._error = outgoing.left
            return
        if self._error is None:
            self._error = torch.zeros(self.length, dtype=torch.float32, device="cpu")
        for begin, end in spans:
            self._error[begin:end] = outgoing.left[begin:end]

    def alone(self, outgoing: Contribution) -> torch.Tensor:
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
