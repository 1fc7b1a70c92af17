"""How one averager looks for groups, which peers it trusts, and which settings all members must share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.averaging.control import AveragingMode
from shoal.p2p import P2P, PeerID
from shoal.reach.reachability import Reach

# The most settings that a peer may name. Chosen: more than any version has, with room for the user's own.
MAX_SETTINGS = 32
FROZEN_BASE = "frozen base"
"""The setting that tells which frozen model the trained parameters belong to."""
# By setting: what to do if it differs.
_ADVICE = {FROZEN_BASE: "load the same checkpoint in both, or if it is the same, give both the same name for it"}


@dataclass
class MatchmakingSettings:
    """How this averager looks for groups."""

    target_group_size: int | None
    min_group_size: int
    min_matchmaking_time: float
    """Seconds for which a group stays open, unless it is complete earlier."""
    request_timeout: float
    """Seconds within which a leader must answer a request to join."""
    mode: AveragingMode
    bandwidth: float | None
    min_vector_size: int
    total_size: int
    """Number of values in the averaged vector."""
    agreed: dict[str, str]
    """The settings that must be the same in all members of a group, in readable form."""

    reach: Reach = Reach.PUBLIC
    """How others call this peer."""
    relay_rate: float = 0.0
    """Bytes per second that its relays carry in total; 0: they set no limit, or it has none."""

    @property
    def leads(self) -> bool:
        """Whether this peer can lead, because others can call it."""
        return self.mode is not AveragingMode.CLIENT

    def at_this_step(self, p2p: P2P) -> MatchmakingSettings:
        """The settings as they are now: whether others can call this peer changes with its network."""
        mode = present_mode(self.mode, p2p)
        return replace(self, mode=mode, reach=p2p.outlook.reach, relay_rate=p2p.outlook.relay_rate)


class Trust:
    """How far an averager trusts other peers. This class trusts them all; subclasses may change their answers."""

    async def admits(self, peer: PeerID) -> bool:
        """Whether a peer may join a group that this averager leads: it trains the same model."""
        return True

    def is_proven(self, peer: PeerID) -> bool:
        """Whether a peer has taken part in rounds. An unproven one reduces nothing, and no peer waits past its promise
        for it."""
        return True

    def has_time_for(self, peer: PeerID) -> bool:
        """Whether a peer may join or lead. Unknown peers may not after unknown peers have held up too many rounds."""
        return True

    def note_waste(self, leader: PeerID, seconds: float) -> None:
        """Note a leader that did not start its group, and the seconds that this cost."""

    def largest_weight(self, peer: PeerID) -> float:
        """How much a member may weigh in what this peer reduces."""
        return math.inf

    def rank_donors(self, donors: Mapping[PeerID, float]) -> Mapping[PeerID, float]:
        """Rank donors of a state: a higher number is better, and donors that are left out are not asked.

        Args:
            donors: the priorities that they claim, which decide if nothing else is known.
        """
        return donors

    def depth(self) -> int:
        """The depth of the progress keys, which decides the number of bits in group keys and donor keys.

        One key is enough for a few dozen donors.
        """
        return 0


def present_mode(wanted: AveragingMode, p2p: P2P) -> AveragingMode:
    """How a peer takes part now: one that cannot be dialled takes part as a client."""
    return wanted if wanted is not AveragingMode.NODE or p2p.is_callable else AveragingMode.CLIENT


def advice_on(name: str) -> str:
    """What to do if a setting differs; empty if there is nothing special."""
    return _ADVICE.get(name, "")


def difference_of(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The settings that differ, in words for the other side; empty if none differs.

    Settings that the other side did not name are not shown to it, so that no peer can learn them by asking.
    """
    if len(other) > MAX_SETTINGS:
        return f"it names {len(other)} settings, more than there are"
    names = [name for name, value in sorted(other.items()) if name in own and own[name] != value]
    differences = [f"{name} is {own[name][:100]!r} there and {other[name][:100]!r} here" for name in names]
    differences += [f"{name[:100]} is not known there" for name in sorted(other.keys() - own.keys())]
    if own.keys() - other.keys():
        differences.append("there are settings there that this peer does not have: is its shoal older?")
    return "; ".join([*differences, *(_ADVICE[name] for name in names if name in _ADVICE)])


def contradiction_of(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """As :func:`difference_of`, but only for settings that both sides have."""
    common = own.keys() & other.keys()
    return difference_of({name: own[name] for name in common}, {name: other[name] for name in common})
