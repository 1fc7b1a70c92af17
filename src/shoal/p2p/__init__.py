"""Peers, streams and remote calls: identity, addresses, transports, connections, RPC."""

import importlib
from types import ModuleType

from shoal.errors import P2PDaemonError, P2PHandlerError
from shoal.p2p.connection import Call
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.p2p import P2P
from shoal.p2p.peer_id import PeerID, PeerInfo
from shoal.p2p.servicer import P2PContext, ServicerBase, StubBase
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


def __getattr__(name: str) -> ModuleType:
    """Import paths that users know; shoal itself needs none of them."""
    if name in ("p2p_daemon", "p2p_daemon_bindings"):
        return importlib.import_module(f"shoal.p2p.{name}")
    raise AttributeError(f"module 'shoal.p2p' has no attribute {name!r}")
