"""A peer on the network (no daemon is behind it), under the import path that users know."""

from shoal.p2p.p2p import P2P
from shoal.p2p.servicer import P2PContext

__all__ = ["P2P", "P2PContext"]
