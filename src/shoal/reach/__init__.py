"""How others reach this peer, wherever it is.

- :mod:`~.manager` finds out whether others can call this peer, from the evidence in :mod:`~.reachability`, and acts on
  it: it maps a port (:mod:`~.nat`), or gets a reservation at a relay (:mod:`~.relay`). It holds the user's options.
- If only a relay leads to a peer, :mod:`~.punching` looks for a direct way through the routers of both sides, and
  :mod:`~.connection_upgrade` makes direct connections to replace the relayed ones.
- Peers check for each other how well they can be reached (:mod:`~.checkup`). :mod:`~.presence` greets other peers again
  when addresses change, and notices that an identity is in use elsewhere.
"""
