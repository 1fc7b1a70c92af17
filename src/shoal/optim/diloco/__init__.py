"""Low-communication training: peers make many inner steps of their own between two exchanges.

What all peers agree on are the *outer* parameters. Each peer sends how far its own parameters have moved from them. The
mean of that is a gradient for an outer optimizer, which all peers step alike::

    inner steps ─► end of a slot ─► message ─► round ─► outer update ─► journal and model ─► inner steps

- :mod:`~.diloco` is what users hold, :mod:`~.settings` has its options, and :mod:`~.inner` makes inner steps.
- :mod:`~.slots`: which fragment is due when, when a slot is over, and which peers come to its round.
- :mod:`~.fragments` are the parameters as vectors, those of the model and the outer ones. :mod:`~.messages` is what
  peers send each other: messages with their error feedback, what they state before a round, and updates.
- :mod:`~.fragment_updates` brings these together: a message, what the group finds, an update, the model.
- :mod:`~.rounds` begins exchanges and applies their results; :mod:`~.outer_averager` runs them, and gives others what
  they lack. :mod:`~.catching_up` gets what this peer lacks, and :mod:`~.checkpoint` saves all this.
- A peer may be several processes (:mod:`~.multi_process`).
"""

from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import strided_fragments
from shoal.optim.diloco.multi_process import MultiProcessDiLoCo

__all__ = ["DiLoCo", "MultiProcessDiLoCo", "strided_fragments"]
