"""Streams and calls between two peers that know each other's address.

- :mod:`~.addresses` knows which addresses of other peers work, :mod:`~.own_addresses` those of this machine;
  :mod:`~.pasted` reads addresses as people paste them.
- A transport makes streams of bytes (:mod:`~.transport`): :mod:`~.tcp` with TLS, and :mod:`~.memory` within a process.
- An :mod:`~.endpoint` is one end of all this: a peer with its identity, its connections and its handlers.
- A message on a stream is a small header and a payload that goes straight to where it belongs. A :mod:`~.connection`
  carries one call at a time; a :mod:`~.connection_pool` dials connections, keeps them and reuses them.
- A :mod:`~.resumable` call survives broken connections: the work of two peers on one task, such as a round.
- A :mod:`~.service` is a class whose ``rpc_`` methods others call; :mod:`~.server` runs them, within :mod:`~.limits`.
"""
