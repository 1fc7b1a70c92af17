"""Low-communication training: peers make many inner steps of their own between two exchanges.

What all peers agree on are the *outer* parameters. Every so many inner steps each peer tells by how much its own
parameters have moved away from them; the mean of that is a gradient for an outer optimizer, which all peers step alike.

- :mod:`~.diloco` has what users hold. :mod:`~.inner` makes inner steps, and :mod:`~.schedule` says when an exchange is
  due; with steps instead of samples, :mod:`~.slot_tracker` finds out when that is for all.
- :mod:`~.fragments` divides the parameters. A fragment has outer parameters (:mod:`~.outer_state`), and what this peer
  has done for their next update (:mod:`~.fragment_updates`, :mod:`~.weights`).
- :mod:`~.rounds` begins exchanges (each a :mod:`~.in_flight`), and brings their results into the model
  (:mod:`~.merge_policy`). Before they average, the members find out who lacks updates or trains another model
  (:mod:`~.outer_averager`, :mod:`~.version_history`). What each brings limits what it may claim
  (:mod:`~.contributions`).
- :mod:`~.catching_up` gets what this peer lacks: the whole state, or single updates that others have kept
  (:mod:`~.update_log`). :mod:`~.checkpoint` saves all this.
- :mod:`~.extra` has tensors that are averaged as they are. A peer may be several processes (:mod:`~.multi_process`).
"""

from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import strided_fragments
from shoal.optim.diloco.multi_process import MultiProcessDiLoCo

__all__ = ["DiLoCo", "MultiProcessDiLoCo", "strided_fragments"]
