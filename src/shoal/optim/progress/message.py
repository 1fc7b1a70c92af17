"""The message that progress trackers exchange: each call carries the caller's progress, each reply the callee's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from shoal.base.clock import MAX_DHT_TIME_DISCREPANCY_SECONDS
from shoal.net.transport import Count, Moment
from shoal.optim.history.journal import MAX_LINEAGE_BYTES
from shoal.optim.progress.records import LocalTrainingProgress, Speed
from shoal.optim.progress.run_settings import DIGEST_BYTES
from shoal.p2p import Header, PeerID


class ProgressMessage(Header, array_like=True):
    """A peer's progress, told in a call. Every peer tells it to every other one, so it is an array, without names."""

    epoch: Count
    samples_accumulated: Count
    samples_per_second: Speed
    time: Moment
    client_mode: bool
    taking_part: bool = True
    """False while the sender has no samples: its numbers then say nothing about the swarm."""
    ends_in: Annotated[float, msgspec.Meta(ge=0.0, le=1e15)] | None = None
    """The sender has declared its epoch over and begins no more batches. By its estimate the others may go on for this
    many seconds; ``None`` if it still trains."""
    leaving: bool = False
    rounds: Annotated[bytes, msgspec.Meta(max_length=MAX_LINEAGE_BYTES)] | None = None
    """The rounds behind the sender's parameters; ``None`` to the members of its last round, which know them."""
    is_donor: bool = False
    """The sender only has a state for others, and comes to no round."""
    settings: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] | None = None
    """A hash of the sender's settings, for a receiver whose own it does not know; see
    :mod:`~shoal.optim.progress.run_settings`."""
    in_advance: bool = False
    """The sender waits elsewhere, and has contributed to the round of gradients that ends its epoch in advance. It does
    not end the epoch before it is back."""

    @classmethod
    def of(cls, progress: LocalTrainingProgress, **more: Any) -> ProgressMessage:
        """A message with this progress; ``more`` are the remaining fields."""
        return cls(
            progress.epoch,
            progress.samples_accumulated,
            progress.samples_per_second,
            progress.time,
            progress.client_mode,
            is_donor=progress.is_donor,
            **more,
        )

    def progress_of(self, peer: PeerID) -> LocalTrainingProgress:
        """The progress of the sender, whom the connection names: nobody can speak for another peer."""
        return LocalTrainingProgress(
            peer.to_bytes(),
            self.epoch,
            self.samples_accumulated,
            self.samples_per_second,
            self.time,
            self.client_mode,
            self.is_donor,
        )


FROM_THE_FUTURE = "progress from the future"
"""Says why progress is refused; the sender looks for it in the answer."""
CLOCK_IS_AHEAD = "peer %s does not count this one, whose clock is ahead of its own. Turn on NTP here (%s), or there"
"""What the sender's user is told: the peer, and how to set the clock."""


def check_time(progress: LocalTrainingProgress, now: float) -> None:
    """Refuse a record from the future: no honest record could replace it.

    Raises:
        ValueError: it is from the future, by more than clocks may differ.
    """
    if progress.time > now + MAX_DHT_TIME_DISCREPANCY_SECONDS:
        raise ValueError(f"{FROM_THE_FUTURE}, by {progress.time - now:.1f} s")
