"""How far each peer is, and when all together have enough samples for a step.

Each peer tells others how far it is (:mod:`~.exchange`, :mod:`~.message`) and keeps what it hears as :mod:`~.records`.
:mod:`~.board` predicts from them when an epoch ends, and which peers will come. :mod:`~.run_settings` and
:mod:`~.company` compare settings of the run; :mod:`~.run_list` names other runs of the swarm. :mod:`~.schema` is what
the DHT checks.
"""
