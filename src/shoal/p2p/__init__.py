"""Peers and calls between them: everything that touches the network.

- A peer is an Ed25519 key; the peer id contains the public key (:mod:`~.identity`).
- An address says how to get there and who must answer: ``/ip4/1.2.3.4/tcp/5678/p2p/<id>`` (:mod:`~.multiaddr`).
  :mod:`~.addresses` knows which addresses this machine has, and which addresses of other peers work.
- A transport makes streams of bytes (:mod:`~.transport`): :mod:`~.tcp` with TLS, where both sides prove who they are
  (:mod:`~.handshake`), and :mod:`~.memory` within a process.
- A message on a stream is a small header and a payload that goes straight to where it belongs. A
  :mod:`~.connection` carries one call at a time; a :mod:`~.dialler` makes connections, and a
  :mod:`~.connection_pool` keeps and reuses them.
- A :mod:`~.service` is a class whose ``rpc_`` methods others call; :mod:`~.server` runs them, within :mod:`~.limits`.
- In a private run, peers show :mod:`~.badges`, which they make from :mod:`~.tokens`. A :mod:`~.membership` judges them,
  and :mod:`~.revocation` keeps out who was expelled.
- :mod:`~.behaviour` remembers what other peers have done, good and bad.
- :class:`P2P` holds it together. It starts by reaching its first peers, or says why it cannot (:mod:`~.joining`).
"""

from shoal.errors import P2PDaemonError, P2PHandlerError
from shoal.inherited import offer_modules
from shoal.p2p.badges import Roles
from shoal.p2p.connection import Call
from shoal.p2p.identity import Identity, PeerID, PeerInfo
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.p2p import P2P
from shoal.p2p.service import P2PContext, ServicerBase, StubBase, open_to, patient
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
    "Roles",
    "ServicerBase",
    "StubBase",
    "open_to",
    "patient",
]

offer_modules("shoal.p2p")
