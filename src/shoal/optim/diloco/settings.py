"""The options of :class:`~shoal.optim.diloco.diloco.DiLoCo`: fills in defaults, and refuses contradictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.averaging.message_means import check_sparse_mean
from shoal.compression import (
    BFloat16Compression,
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
    TopKCompression,
)
from shoal.compression.base import check_codec
from shoal.compression.one_result import OneResult, Relayed
from shoal.optim.diloco.fragments import MergePolicy
from shoal.optim.diloco.messages import (
    AVERAGES,
    PARAMETERS,
    WEIGHTINGS,
    Staleness,
    default_feedback,
    usual_staleness,
)
from shoal.optim.options import SwarmOptions, resolve_shared
from shoal.optim.recovery.adopt import CheckState

# All machines decode the messages of these codecs to the same bits. The fine ones keep these bits if they encode them
# again. The coarse ones have short messages, which reducers may pass on, and need error feedback.
_FINE = (NoCompression, Float16Compression, BFloat16Compression, BlockwiseQuantization)
_COARSE = (Blockwise4BitQuantization, TopKCompression)


@dataclass(frozen=True, kw_only=True)
class OuterSettings(SwarmOptions):
    """The options, resolved."""

    straggler_patience: float
    """How long the first peer that is ready waits for stragglers, in seconds."""
    fragment_sync_delay: int | None
    """Inner steps between sending and applying; ``None``: as many as the round takes."""
    merge: MergePolicy
    average: str
    """One of :data:`~shoal.optim.diloco.messages.AVERAGES`."""
    weighting: str
    """See :meth:`~shoal.optim.diloco.messages.Effort.weight`."""
    staleness: Staleness
    """The discount of old contributions."""
    max_staleness: int
    """Contributions older than this many versions do not count."""
    check_every: int
    """Members compare the bits of their outer parameters once in this many updates."""
    share_inner_state: bool
    """Newcomers also take over the statistics of another peer's inner optimizers."""
    check_state: CheckState | None
    """May refuse a downloaded state."""
    codec: CompressionBase
    """The codec of rounds: of messages and averages."""
    messages: CompressionBase
    """The codec of what peers send."""
    error_feedback: float
    """The share of what a message has left out that is added to the next one."""

    @classmethod
    def resolve(cls, **given: Any) -> OuterSettings:
        """Resolve the arguments of the :class:`~shoal.optim.diloco.diloco.DiLoCo`.

        Raises:
            TypeError, ValueError: options contradict each other.
        """
        shared = resolve_shared(given)
        average, averager_opts = given["average"], given["averager_opts"] or {}
        if average not in AVERAGES:
            raise ValueError(f"average must be one of {AVERAGES}, got {average!r}")
        if average != PARAMETERS and averager_opts.get("target_group_size"):
            raise ValueError(
                "target_group_size makes several groups, and with average='pseudo_gradients' each of them would get "
                "outer parameters of its own: leave it out, or use average='parameters'"
            )
        if given["auxiliary"]:
            _check_auxiliary(given, averager_opts)
        delay, every = given["fragment_sync_delay"], given["sync_every"]
        for name, steps in {"sync_every": every, "fragment_sync_delay": delay}.items():
            if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool)):
                raise TypeError(f"{name} must be a whole number of inner steps, got {steps!r}")
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
        for name in ("matchmaking_time", "averaging_timeout", "straggler_patience"):
            if (seconds := given[name]) is not None and not seconds >= 0:
                raise ValueError(f"{name} must be a number of seconds from 0, got {seconds}")
        check_every = given["check_every"]
        if not isinstance(check_every, int) or isinstance(check_every, bool) or check_every < 1:
            raise ValueError(f"check_every must be a number of updates from 1, got {check_every!r}")
        if given["weighting"] not in WEIGHTINGS:
            raise ValueError(f"weighting must be one of {WEIGHTINGS}, got {given['weighting']!r}")
        patience = given["straggler_patience"]
        messages, back = given["compression"] or NoCompression(), given["return_compression"]
        codec = _codec(messages, back, given["sparse_mean"])
        return cls(
            **shared,
            fragment_sync_delay=delay,
            average=average,
            straggler_patience=given["matchmaking_time"] if patience is None else patience,
            merge=MergePolicy.choose(given["fragment_update_alpha"], delay),
            weighting=given["weighting"],
            staleness=given["staleness"] or usual_staleness,
            max_staleness=given["max_staleness"],
            check_every=check_every,
            share_inner_state=given["share_inner_state"],
            check_state=given["check_state"],
            codec=codec,
            messages=messages,
            error_feedback=_feedback(messages, given["error_feedback"], average),
        )

    @property
    def overlaps(self) -> bool:
        """Whether peers train on while a round is under way."""
        return self.fragment_sync_delay != 0

    @property
    def others_may_be_ahead(self) -> bool:
        """Whether others may be a slot ahead although this peer has missed nothing.

        Either their round is still in flight, or they have finished it in a group of their own.
        """
        return self.overlaps or self.average == PARAMETERS

    @property
    def is_sparse(self) -> bool:
        """Whether messages leave most values out."""
        return self.messages.sparse


def _check_auxiliary(given: Mapping[str, Any], averager_opts: Mapping[str, Any]) -> None:
    if given["client_mode"]:
        raise ValueError("an auxiliary peer must accept connections: client_mode=True excludes auxiliary=True")
    if given["batch_size_per_step"]:
        raise ValueError(
            f"an auxiliary peer has no batches: leave batch_size_per_step={given['batch_size_per_step']} out"
        )
    if averager_opts.get("target_group_size"):
        raise ValueError(
            "with target_group_size groups are drawn among the peers that train, so that an auxiliary peer has nobody "
            "to help: leave auxiliary=True out"
        )


def _codec(out: CompressionBase, back: CompressionBase | None, sparse_mean: str) -> CompressionBase:
    check_sparse_mean(sparse_mean)
    for name, codec, allowed in (
        ("compression", out, (*_FINE, *_COARSE)),
        ("return_compression", back, _FINE),
    ):
        check_codec(name, codec)
        if codec is not None and type(codec) not in allowed:
            raise ValueError(
                f"{name}={type(codec).__name__}() is not among the codecs that all machines decode to the same bits: "
                f"use {_names(allowed)}"
            )
    if type(out) in _COARSE:
        return Relayed(out, back or BlockwiseQuantization(), sparse_mean)
    return OneResult(out, back)


def _feedback(codec: CompressionBase, given: float | None, average: str) -> float:
    if average != PARAMETERS:
        feedback = default_feedback(codec) if given is None else given
        if not 0 <= feedback <= 1:
            raise ValueError(f"error_feedback must be from 0 to 1, got {feedback}")
        return feedback
    if given or type(codec) in _COARSE:
        raise ValueError(
            "average='parameters' knows no error feedback, because parameters are sent and not what is added to them, "
            f"and {type(codec).__name__} loses too much of them without: use Float16Compression or "
            "BlockwiseQuantization, and leave error_feedback out"
        )
    return 0.0


def _names(kinds: Sequence[type]) -> str:
    *first, last = [kind.__name__ for kind in kinds]
    return f"{', '.join(first)} or {last}"
