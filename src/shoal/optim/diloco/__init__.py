"""Low-communication training: peers make many inner steps of their own between two exchanges.

All peers agree on the *outer* parameters. Each peer sends how far its own parameters have moved from them. The mean of
these differences is the gradient of an outer optimizer, with which all peers make the same step::

    inner steps ─► end of a slot ─► message ─► round ─► outer update ─► journal and model ─► inner steps

- :mod:`~.diloco` is the user's interface, :mod:`~.settings` has its options, and :mod:`~.inner` makes inner steps.
- :mod:`~.slots` says which fragment is due when, when a slot is over, and which peers come to its round.
- :mod:`~.fragments` has the parameters as vectors, those of the model and the outer ones. :mod:`~.messages` has what
  peers send each other: messages with error feedback, statements before a round, and updates.
- :mod:`~.fragment_updates` brings one fragment from its message through the round to the updated model.
- :mod:`~.rounds` begins exchanges and applies their results; :mod:`~.outer_averager` runs them, and gives others what
  they lack. :mod:`~.catching_up` gets what this peer lacks, and :mod:`~.checkpoint` saves and restores all of it.
- A peer may be several processes (:mod:`~.multi_process`).
"""

from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import strided_fragments
from shoal.optim.diloco.multi_process import MultiProcessDiLoCo

__all__ = ["DiLoCo", "MultiProcessDiLoCo", "strided_fragments"]
