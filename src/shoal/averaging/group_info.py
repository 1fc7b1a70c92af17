"""What the members of a group have agreed on before any tensor moves."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.p2p import PeerID

GROUP_ID_BYTES = 20


@dataclass(frozen=True)
class GroupInfo:
    """A group as its leader published it: the same for all members."""

    group_id: bytes
    """Random bytes that name this group and nothing else."""
    peer_ids: tuple[PeerID, ...]
    """All members; the order counts."""
    gathered: tuple[bytes, ...]
    """What each member gave for the others, in the same order."""
    modes: tuple[int, ...] = ()
    """Each member's :class:`~shoal.averaging.allreduce.AveragingMode`."""
    shares: tuple[int, ...] = ()
    """How many of the vector's values each member reduces."""

    @property
    def group_size(self) -> int:
        return len(self.peer_ids)

    def __contains__(self, peer_id: PeerID) -> bool:
        return peer_id in self.peer_ids
