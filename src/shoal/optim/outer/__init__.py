"""Low-communication training: peers make many inner steps of their own between two exchanges.

What all peers agree on are the *outer* parameters. Every so many inner steps each peer tells by how much its own
parameters have moved away from them; the mean of that is a gradient for an outer optimizer, which all peers step alike.

- :mod:`~.diloco` has what users hold. :mod:`~.inner` makes inner steps, and :mod:`~.schedule` says when an exchange is
  due; with steps instead of samples, :mod:`~.slot_tracker` finds out when that is for all.
- :mod:`~.fragments` divides the parameters. A fragment has outer parameters (:mod:`~.outer_state`), and what this peer
  has done for their next update (:mod:`~.fragment_updates`, :mod:`~.weights`).
- :mod:`~.rounds` begins exchanges (each a :mod:`~.flight`), and brings their results into the model
  (:mod:`~.mixing`). Before they average, the members find out who lacks updates or trains another model
  (:mod:`~.outer_averager`, :mod:`~.chain`). What each brings limits what it may claim (:mod:`~.deeds`).
- :mod:`~.catching_up` gets what this peer lacks: the whole state, or single updates that others have kept
  (:mod:`~.kept`). :mod:`~.checkpoint` saves all this.
- :mod:`~.extra` has tensors that are averaged as they are. A peer may be several processes (:mod:`~.multi_process`).
"""

from shoal.optim.outer.diloco import DiLoCo
from shoal.optim.outer.fragments import strided_fragments
from shoal.optim.outer.multi_process import MultiProcessDiLoCo

__all__ = ["DiLoCo", "MultiProcessDiLoCo", "strided_fragments"]
