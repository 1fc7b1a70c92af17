"""A peer on the network: :class:`P2P` (:mod:`~.p2p`) puts the packages below together.

- :mod:`shoal.peers` has identities and addresses, and :mod:`shoal.access` decides who may take part in a private run.
- :mod:`shoal.net` has streams and calls between two peers, :mod:`shoal.reach` the ways to peers behind routers.
- A peer starts by reaching its first peers, or says why it cannot (:mod:`~.joining`); :mod:`~.local_network` finds
  those in the local network.
- In a private run, :mod:`~.revocation` keeps out peers that were expelled.
"""

from shoal.access.badges import Roles
from shoal.base.inherited import offer_modules
from shoal.errors import P2PDaemonError, P2PHandlerError
from shoal.net.connection import Call
from shoal.net.service import P2PContext, ServicerBase, StubBase, open_to, patient
from shoal.net.transport import Header
from shoal.p2p.p2p import P2P
from shoal.peers.identity import Identity, PeerID, PeerInfo
from shoal.peers.multiaddr import Multiaddr

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
