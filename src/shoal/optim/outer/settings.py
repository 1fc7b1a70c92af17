"""The options of :class:`~shoal.optim.outer.diloco.DiLoCo`: defaults, and contradictions that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
)
from shoal.compression.base import check_codec
from shoal.compression.one_result import OneResult
from shoal.facade import options_from
from shoal.optim.outer.fragment_updates import AVERAGES, PARAMETERS
from shoal.optim.outer.mixing import Mixing
from shoal.optim.outer.schedule import Schedule
from shoal.optim.outer.weights import Staleness, check_weighting, usual_staleness
from shoal.optim.progress import count_of_samples

# Codecs whose messages all machines decode to the same bits, and that need no memory of what they have lost.
_CODECS = (NoCompression, Float16Compression, BFloat16Compression, BlockwiseQuantization)


@dataclass(frozen=True)
class OuterSettings:
    """The resolved options."""

    batch_size_per_step: int | None
    averaging_timeout: float
    straggler_patience: float
    """For so many seconds the first peer that is ready waits for others."""
    fragment_sync_delay: int | None
    """Inner steps between sending and applying; ``None``: as many as the round takes."""
    mixing: Mixing
    codec: CompressionBase
    average: str
    weighting: str
    staleness: Staleness
    max_staleness: int

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> OuterSettings:
        """Resolve the user's options.

        Args:
            given: the arguments of the constructor.

        Raises:
            TypeError, ValueError: options contradict each other.
        """
        average, averager_opts = given["average"], given["averager_opts"] or {}
        if average not in AVERAGES:
            raise ValueError(f"average must be one of {AVERAGES}, got {average!r}")
        if average != PARAMETERS and averager_opts.get("target_group_size"):
            raise ValueError(
                "target_group_size makes several groups, and with average='pseudo_gradients' each of them would get "
                "outer parameters of its own: leave it out, or use average='parameters'"
            )
        delay, every = given["fragment_sync_delay"], given["sync_every"]
        if delay is not None and (delay < 0 or (every is not None and delay >= every)):
            raise ValueError(
                f"fragment_sync_delay must be from 0 to less than sync_every={every} inner steps, or None: got {delay}"
            )
        if average != PARAMETERS and type(given["load_state_compression"]) not in (type(None), NoCompression):
            raise ValueError(
                f"load_state_compression={type(given['load_state_compression']).__name__}(): newcomers must get the "
                "same bits as all others have: leave it out, or use average='parameters'"
            )
        if given["max_staleness"] < 0:
            raise ValueError(f"max_staleness must be 0 or more versions, got {given['max_staleness']}")
        batch_size, patience = given["batch_size_per_step"], given["straggler_patience"]
        return options_from(
            cls,
            given,
            batch_size_per_step=None if batch_size is None else count_of_samples("batch_size_per_step", batch_size),
            straggler_patience=given["matchmaking_time"] if patience is None else patience,
            mixing=Mixing.choose(given["fragment_update_alpha"], delay),
            codec=_codec(given["compression"], given["return_compression"]),
            weighting=check_weighting(given["weighting"]),
            staleness=given["staleness"] or usual_staleness,
        )

    @property
    def overlaps(self) -> bool:
        """Whether peers train on while a round is under way."""
        return self.fragment_sync_delay != 0

    def batch_size(self, batch_size: int | None) -> int:
        """The number of samples of a step; 0: none.

        Raises:
            TypeError, ValueError: it is not given, or impossible.
        """
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("give batch_size to step(), or batch_size_per_step to the constructor")
        return batch_size if batch_size == 0 else count_of_samples("batch_size", batch_size)

    def agreement(self, schedule: Schedule, fragments: str) -> str:
        """What all peers of a run must have in common, in words."""
        every = schedule.sync_every
        length = f"{schedule.target_batch_size} samples per slot" if every is None else f"sync_every {every}"
        return f"{self.average} of {schedule.fragments} fragments {fragments}, {length}, weighting {self.weighting}"


def _codec(out: CompressionBase | None, back: CompressionBase | None) -> CompressionBase:
    for name, codec in (("compression", out), ("return_compression", back)):
        check_codec(name, codec)
        if codec is not None and type(codec) not in _CODECS:
            raise ValueError(
                f"{name}={type(codec).__name__}() is not among the codecs that all machines decode to the same bits "
                f"and that need no error feedback: use {_names(_CODECS)}"
            )
    return OneResult(out or NoCompression(), back)


def _names(kinds: Sequence[type]) -> str:
    *first, last = [kind.__name__ for kind in kinds]
    return f"{', '.join(first)} or {last}"
