"""What has nothing to do with peers: the background loop, time, logs, and small tools that every room uses.

- :mod:`~.reactor` is the one background thread with its event loop, and :mod:`~.tasks` runs coroutines in it.
- :mod:`~.clock` is the time by which everything expires, the same on all machines of a swarm.
- :mod:`~.closeable` is what all objects in the user's hands share: they end, and explain mistakes in a sentence.
- :mod:`~.bounded` limits memories, and :mod:`~.backoff` says how often something may be done.
- :mod:`~.logs` and :mod:`~.signs` write readable lines; :mod:`~.serializer` turns plain values into msgpack and back.
- :mod:`~.standby` lets the optimizers of a waiting thread take part in rounds.
- :mod:`~.inherited` is the table of import paths that programs know; :mod:`~.extras` has what such programs use.
"""

VERSION = "0.1.0"
