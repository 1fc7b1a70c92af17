"""The options that users give an averager, checked and with defaults filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from shoal.averaging.aggregation import Aggregation, check_aggregation
from shoal.averaging.control import AveragingMode
from shoal.averaging.messages import MAX_BANDWIDTH
from shoal.compression import CompressionBase
from shoal.compression.one_result import Relayed

# A member is given up after this many seconds of silence, unless the user has set a limit. Chosen: TCP recovers a lossy
# line sooner.
DEFAULT_STALL_TIMEOUT = 30.0
# The most settings of the user's own. Chosen: peers refuse a peer that names more than ``MAX_SETTINGS`` in total.
MOST_AGREED = 16


@dataclass
class AveragerConfig:
    """The options of an averager with defaults filled in. All times are in seconds."""

    prefix: str
    target_group_size: int | None
    """A group is closed at this size; ``None``: no limit."""
    min_group_size: int
    initial_group_bits: str
    min_matchmaking_time: float
    request_timeout: float
    allreduce_timeout: float | None
    """Seconds for one whole all-reduce; ``None``: as long as it makes progress."""
    sender_timeout: float
    """A sender is given up after this many seconds without the next part."""
    reducer_timeout: float
    """A reducer is given up after this many seconds without the next average."""
    chunk_timeout: float
    averaging_alpha: float
    """Local values move by this fraction of the way to the average."""
    part_size_bytes: int
    compression: CompressionBase
    state_compression: CompressionBase
    bandwidth: float | None
    min_vector_size: int
    mode: AveragingMode
    declare_state_period: float
    quorum: int | None = None
    """When this many members have delivered, the round waits ``quorum_grace`` seconds for the others, and no longer."""
    quorum_grace: float = 3.0
    phases: str = "one"
    """The phases of a step, in words; the same in all members."""
    tags: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By tag, the indices of the tensors that are averaged under it; empty: all tensors, without a tag."""
    aggregation: Aggregation | None = None
    """The rule that combines the values of several members; ``None``: their mean."""
    agreement: Mapping[str, str] = field(default_factory=dict)
    """Further settings that must be the same in all peers, by name."""
    state_download_rate: float = math.inf
    """The most bytes of a state that are downloaded in a second."""

    def __post_init__(self) -> None:
        if self.quorum is not None and (self.quorum < 1 or self.quorum_grace < 0 or self.averaging_alpha != 1):
            raise ValueError(
                "a quorum is a number of members from 1, with a grace of 0 seconds or more and averaging_alpha=1: got "
                f"quorum={self.quorum}, quorum_grace={self.quorum_grace}, averaging_alpha={self.averaging_alpha}"
            )
        check_aggregation("aggregation", self.aggregation)
        check_state_download_rate(self.state_download_rate)
        for name, value in self.agreement.items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise TypeError(f"agreement must have texts by name, got {name!r}: {value!r}")
        if len(self.agreement) > MOST_AGREED:
            raise ValueError(f"agreement takes at most {MOST_AGREED} settings, got {len(self.agreement)}: hash them")
        if self.aggregation is not None and isinstance(self.compression, Relayed):
            raise ValueError(
                f"aggregation={self.aggregation.fingerprint} needs the values of members, but with this compression "
                f"({self.compression.fingerprint}) their messages are passed on: use Float16Compression"
            )

    def lane_prefix(self, tag: str) -> str:
        """The prefix of the keys under which averagers look for groups for this tag."""
        return f"{self.prefix}:{tag}" if tag else self.prefix


def check_tags(tags: Mapping[str, Sequence[int]], count: int) -> dict[str, tuple[int, ...]]:
    """Check tags, and return them.

    Args:
        tags: by name of a tag, the indices of its tensors.
        count: the number of averaged tensors.

    Raises:
        ValueError: a name or an index is not valid, or a tensor has two tags.
    """
    owner: dict[int, str] = {}
    for tag, indices in tags.items():
        if not tag or "." in tag or ":" in tag:
            raise ValueError(f"a tag is a name without dots and colons, got {tag!r}")
        for index in indices:
            if not 0 <= index < count:
                raise ValueError(f"tag {tag!r} names tensor {index}, but there are {count} averaged tensors")
            if index in owner:
                raise ValueError(f"tensor {index} has two tags, {owner[index]!r} and {tag!r}: give it one")
            owner[index] = tag
    return {tag: tuple(indices) for tag, indices in tags.items()}


def resolve_timeouts(chunk: float | None, sender: float | None, reducer: float | None) -> tuple[float, float]:
    """The time limits for senders and for reducers, in seconds, with defaults filled in.

    Args:
        chunk: the limit for state downloads, which is the default for senders.
        sender: the limit for senders.
        reducer: the limit for reducers; default: twice that for senders.

    Raises:
        ValueError: they contradict each other.
    """
    sender = chunk if sender is None else sender
    if reducer is not None and (sender is None or reducer <= sender):
        raise ValueError(
            f"reducer_timeout {reducer} must be longer than sender_timeout {sender}: a reducer may wait that long for "
            "senders itself"
        )
    sender = DEFAULT_STALL_TIMEOUT if sender is None else sender
    return sender, 2 * sender if reducer is None else reducer


def check_state_download_rate(rate: object) -> None:
    """Check how many bytes of a state may be downloaded in a second.

    Raises:
        ValueError: it is not a positive number.
    """
    if not isinstance(rate, Real) or not float(rate) > 0:
        raise ValueError(
            f"state_download_rate must be a number of bytes per second above 0, got {rate!r}: leave it out for no limit"
        )


def check_names(prefix: object, initial_group_bits: str, bandwidth: float | None) -> None:
    """Check arguments of an averager that others see."""
    if not isinstance(prefix, str) or not prefix:
        raise ValueError(f"prefix must be the name of a run, got {prefix!r}")
    assert "." not in prefix, f"prefix must not contain dots, got {prefix!r}: use '_' instead"
    assert all(c in "01" for c in initial_group_bits), f"initial_group_bits are 0 and 1, got {initial_group_bits!r}"
    assert bandwidth is None or 0 <= bandwidth <= MAX_BANDWIDTH, (
        f"bandwidth must be a number from 0 to {MAX_BANDWIDTH:g} or None, got {bandwidth!r}"
    )
