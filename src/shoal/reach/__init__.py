"""How others reach this peer, wherever it is.

- :mod:`~.manager` finds out whether others can call this peer, by the evidence in :mod:`~.reachability`, and decides
  what follows: a mapped port (:mod:`~.nat`), or a place at a relay (:mod:`~.relay`). It has the user's choices, too.
- Where a relay leads to a peer, :mod:`~.punching` looks for a direct way through the routers of both sides.
  :mod:`~.connection_upgrade` then replaces the relayed one.
- Peers help each other to find out how well they reach each other (:mod:`~.checkup`); :mod:`~.presence` greets others
  again when addresses change, and notices that an identity is in use elsewhere.
"""
