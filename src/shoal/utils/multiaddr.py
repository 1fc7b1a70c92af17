"""Network addresses, under the import path that users know."""

from shoal.p2p.multiaddr import Multiaddr, ProtocolLookupError

__all__ = ["Multiaddr", "ProtocolLookupError"]
