"""The history of the model at each peer, by which peers see whether they train the same one. Both optimizers use it.

Each peer keeps a journal of its latest versions, and tells it to others. From two journals follows whether one peer is
behind, with or ahead of the other, or on another branch. If a run has split into branches, one wins, and the peers of
the others take over its state. In reading order:

- :mod:`~.window` says how far apart two peers may be, and how one stands to another (behind, with, ahead, elsewhere).
- :mod:`~.journal` has the latest versions of what a peer trains, and the rounds or updates that made them.
- :mod:`~.fork_choice` chooses between branches of a run that have trained without each other.
"""
