"""Getting the state of the others, for newcomers and for peers that have fallen behind or are on a losing branch.

- :mod:`~.when` decides whether a peer needs a state, and paces the attempts.
- :mod:`~.adopt` tries the states of donors, one after another, until one can be taken over. For
  :class:`~shoal.Optimizer` it also holds the training state: takes it apart, puts another one in its place, and
  restores the old one.
"""
