"""Peers and calls between them: everything that touches the network.

- A peer is an Ed25519 key, which its id contains (:mod:`~.identity`).
- An address says how to get there and who must answer: ``/ip4/1.2.3.4/tcp/5678/p2p/<id>`` (:mod:`~.multiaddr`). Which
  addresses a machine has, and which of the others' work, is known in :mod:`~.addresses`.
- A transport makes streams of bytes (:mod:`~.transport`): :mod:`~.tcp` with TLS, in which both sides prove who they are
  (:mod:`~.handshake`), and :mod:`~.memory` within a process.
- On a stream, messages are a small header and a payload that goes straight to where it belongs. A
  :mod:`~.connection` carries one call at a time; a :mod:`~.connection_pool` dials, keeps and reuses them.
- A :mod:`~.service` is a class whose ``rpc_`` methods others call; :mod:`~.server` runs them, within :mod:`~.limits`.
- :class:`P2P` holds it together. It starts by reaching its first peers, or says why it cannot (:mod:`~.joining`).
"""

from shoal.errors import P2PDaemonError, P2PHandlerError
from shoal.inherited import offer_modules
from shoal.p2p.connection import Call
from shoal.p2p.identity import Identity, PeerID, PeerInfo
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.p2p import P2P
from shoal.p2p.service import P2PContext, ServicerBase, StubBase
from shoal.p2p.transport import Header

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
