"""One peer of several processes: :mod:`~.multi_process`, for whole models and for shards of one (:mod:`~.shards`)."""
