"""Peers, streams and remote calls: identity, addresses, transports, connections, RPC."""

from shoal.errors import P2PDaemonError, P2PHandlerError
from shoal.inherited import offer_modules
from shoal.p2p.connection import Call
from shoal.p2p.identity import Identity, PeerID, PeerInfo
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.p2p import P2P
from shoal.p2p.service import P2PContext, ServicerBase, StubBase
from shoal.p2p.wire import Header

__all__ = [
    "P2P",
    "Call",
    "Header",
    "Identity",
    "Multiaddr",
    "P2PContext",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "PeerInfo",
    "ServicerBase",
    "StubBase",
]

offer_modules("shoal.p2p")
