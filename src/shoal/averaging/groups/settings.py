"""How one averager looks for groups, and what of that changes with its network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.averaging.control import AveragingMode
from shoal.p2p import P2P
from shoal.p2p.reachability import Reach


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
    """Bytes per second that its relays carry for all; 0: they set no limit, or there are none."""

    @property
    def leads(self) -> bool:
        """Whether this peer can lead, because others can call it."""
        return self.mode is not AveragingMode.CLIENT

    def at_this_step(self, p2p: P2P) -> MatchmakingSettings:
        """The settings as they are now: whether others can call this peer changes with its network."""
        mode = present_mode(self.mode, p2p)
        return replace(self, mode=mode, reach=p2p.outlook.reach, relay_rate=p2p.outlook.relay_rate)


def present_mode(wanted: AveragingMode, p2p: P2P) -> AveragingMode:
    """How a peer takes part now: whom nobody can call is a client for the time being."""
    return wanted if wanted is not AveragingMode.NODE or p2p.is_callable else AveragingMode.CLIENT
