"""What has happened to the model: the last rounds of each peer (:mod:`~.round_history`), and the choice between two
partitions that have both trained on (:mod:`~.fork_choice`). :mod:`~.epochs` says how many epochs peers may be apart.
"""
