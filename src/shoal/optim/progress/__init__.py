"""How far each peer is, and when all together have enough samples for a step.

Each peer tells others how far it is (:mod:`~.exchange`) and keeps what it hears as :mod:`~.records`. :mod:`~.board`
predicts from them when an epoch ends, and which peers will come. :mod:`~.run_settings` compares the settings of peers;
:mod:`~.run_list` names other runs of the swarm. :mod:`~.schema` is what the DHT checks.
"""
