"""Names of peers, under the import path that users know."""

from shoal.p2p.peer_id import PeerID, PeerInfo

__all__ = ["PeerID", "PeerInfo"]
