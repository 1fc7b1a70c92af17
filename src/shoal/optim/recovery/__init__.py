"""Getting the state of the others, for newcomers and for peers that have fallen behind or are on a losing branch.

A peer compares its epoch with that of the swarm. If it is too far behind, it downloads the state of a donor and tries
it. It keeps its own state until it has trained an epoch with the new one. Failed downloads are retried with a backoff.

- :mod:`~.when` decides whether a peer needs a state, and paces the attempts.
- :mod:`~.adopt` tries the states of donors, one after another, until one is accepted. For :class:`~shoal.Optimizer` it
  also holds the training state: gives it to newcomers, replaces it, and restores the old one.
"""
