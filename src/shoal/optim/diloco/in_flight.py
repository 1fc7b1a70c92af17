"""A round of a fragment on its way: what this peer knows of it while it lasts, and what it tells of it afterwards."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from shoal.averaging import RoundResult, StepControl
from shoal.optim.diloco.compressor import Contribution
from shoal.optim.diloco.version_history import MOST, OuterStatement, OuterVersion
from shoal.optim.diloco.weights import Effort
from shoal.p2p import PeerID

PARAMETERS = "parameters"
AVERAGES = ("pseudo_gradients", PARAMETERS)
"""What rounds may average."""

# Later than all slots.
ANY_SLOT = 2**62


class VersionRelation(enum.Enum):
    """How a member's outer parameters compare with those of its group."""

    GOOD = "good"
    BEHIND = "behind"
    """They lack updates that others have."""
    LOST = "lost"
    """They are of another lineage than those that go on, or of the same one with other bits."""


@dataclass
class Flight:
    """A round of a fragment that is under way."""

    slot: int
    effort: Effort
    """What is behind the message."""
    sent: torch.Tensor | None
    """The model's values when the message was made; ``None``: they are not needed."""
    left: int | None
    """After so many further inner steps the result is applied; ``None``: as soon as it is there."""
    is_finite: bool
    """Whether the message is."""
    weight: float
    outgoing: Contribution | None = None
    """The message with what it leaves out; ``None``: nothing of that is kept."""
    control: StepControl | None = None
    """``None``: nobody else is there."""
    steps_since: int = 0
    """Inner steps since the message was made."""
    standing: VersionRelation = VersionRelation.GOOD
    samples: int = 0
    """Of all members."""
    done: tuple[int, ...] = ()
    """What each member has done in the slot, as it says."""
    began_at: float = field(default_factory=time.monotonic)
    base: OuterVersion | None = None
    """The outer parameters that the round updates."""
    counting: tuple[int, ...] = ()
    """The positions of the members whose messages can count, as they say; the same at all members."""
    factor: float | None = None
    """By which the message was made smaller; ``None``: it is not decided yet."""
    attempts: set[bytes] = field(default_factory=set)
    """The ids of the groups in which the message may have counted."""
    known: OuterVersion | None = None
    """The newest version that members of its groups had and this peer lacked; ``None``: it lacked none."""
    saved_result: RoundResult | None = None
    """The result, from a checkpoint."""
    own: PeerID | None = None
    """With a result from a checkpoint: this peer's id in the round, for it may have another one by now."""

    def hear(self, statements: Sequence[OuterStatement | None]) -> None:
        """Note what the members of its group have done, as they say."""
        self.samples = min(MOST, sum(each.samples for each in statements if each is not None))
        self.done = tuple(0 if each is None else each.done for each in statements)

    def begin_from(self, base: OuterVersion, statements: Sequence[OuterStatement | None]) -> None:
        """Note what the round updates, and which messages can count."""
        self.base = base
        can_count = [each is not None and each.samples > 0 and each.links[-1] == base for each in statements]
        self.counting = tuple(n for n, can in enumerate(can_count) if can)

    def has_most(self, weights: Sequence[float]) -> bool:
        """Whether the messages of most members have counted; of two halves, the one with the first member.

        A round may be split, so that each side takes the other one for dead. Only one of them may make an update. Where
        parameters are averaged, each peer has its own, and this is not asked.
        """
        counted = [n for n in self.counting if weights[n]]
        return not self.counting or 2 * len(counted) + (tuple(counted[:1]) == self.counting[:1]) > len(self.counting)

    @property
    def has_arrived(self) -> bool:
        """Whether there is a result: the round is over and has not failed, or nobody else is there."""
        return self.control is None or (self.control.done() and self.control.round is not None)

    @property
    def result(self) -> RoundResult | None:
        """The result of the round, if there is one; ``None``: nobody else is there."""
        return self.saved_result if self.control is None else self.control.round


@dataclass(frozen=True)
class ExpectedMembers:
    """Whom a peer expects in the round at the end of a slot."""

    slot: int
    peers: Collection[PeerID]
    since: float
    """DHT time at which it begins to wait."""
    patience: float
    """For so many seconds training may stand still for these peers."""


@dataclass(frozen=True)
class OuterRound:
    """What a round has done, as this peer saw it."""

    slot: int
    fragment: int
    version: int
    """Of the outer parameters after it."""
    peers: tuple[PeerID, ...]
    weights: tuple[float, ...]
    staleness: int
    """By how many versions this peer's contribution was old."""
    contributed: bool
    """Whether this peer's contribution counted."""
    share: float
    """Of the vector that was averaged."""
    seconds: float
    norm: float
    """Of the mean pseudo-gradient."""
    bytes_sent: int = 0
    """Of the encoded values that this peer has sent to the others."""
    bytes_received: int = 0
    samples: int = 0
    """Of all members, since the last round of this fragment."""
