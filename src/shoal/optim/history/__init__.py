"""What has happened to the model. Both optimizers use it.

- :mod:`~.window` says how far apart two peers may be, and how one stands to another (behind, with, ahead, elsewhere).
- :mod:`~.journal` has the latest versions of what a peer trains, and the rounds or updates that made them.
- :mod:`~.fork_choice` chooses between branches of a run that have trained without each other.
"""
