"""Everything that is not about peers: the background loop, time, logs, and small tools that every package uses.

- :mod:`~.reactor` has the one background thread with its event loop; :mod:`~.tasks` helps to run coroutines.
- :mod:`~.clock` is the time by which everything expires, the same on all machines of a swarm.
- :mod:`~.closeable` is the base class of all objects that users hold: they are shut down, and explain mistakes in a
  sentence.
- :mod:`~.bounded` limits the size of memories; :mod:`~.backoff` limits how often something may be done.
- :mod:`~.logs`, :mod:`~.signs` and :mod:`~.local_names` are about output; :mod:`~.serializer` turns plain values into
  msgpack and back.
- :mod:`~.standby` lets the optimizers of a waiting thread take part in rounds.
- :mod:`~.inherited` is the table of import paths that existing programs use; :mod:`~.extras` has helpers for them, and
  :mod:`~.needs_torch` the error where torch is missing.
"""

VERSION = "0.1.0"
