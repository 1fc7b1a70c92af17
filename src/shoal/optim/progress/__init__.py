"""How far each peer is, and when all together have enough samples for a step.

Each peer publishes a record of its progress in the DHT, and calls other peers directly when it has news. All peers
extrapolate the records that they have to the present, so they agree on when the epoch ends. In reading order:

- :mod:`~.records` has the records, the estimate of a peer's speed, and the functions that sum records up.
- :mod:`~.board` holds what this peer knows, and predicts when an epoch ends and which peers will come.
- :mod:`~.exchange` keeps the board up to date, through the DHT and by direct calls.
- :mod:`~.schema` has the checks that DHT nodes make of records.
- :mod:`~.run_settings` compares the settings of peers, and :mod:`~.run_list` names other runs of the swarm.
"""
