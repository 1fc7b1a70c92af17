"""The identity of peers, and what this peer knows about them.

- A peer is an Ed25519 key; the peer id contains the public key, and people see a name (:mod:`~.identity`).
- An address says how to get there and who must answer: ``/ip4/1.2.3.4/tcp/5678/p2p/<id>`` (:mod:`~.multiaddr`).
- :mod:`~.book` has one record of each peer that this one knows.
- :mod:`~.scores` remembers how well other peers have performed in rounds.
"""
