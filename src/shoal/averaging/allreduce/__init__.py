"""The exchange: what a group does from the moment in which it is complete.

====================  =============================================================================================
:mod:`~.session`      a group at work: its rounds one after another; and all rounds of an averager, by id
:mod:`~.members`      the roster: who takes part, has failed, is late or gone; every decision about that
:mod:`~.exchange`     the first half of a round: parts to those that reduce them, averages back
:mod:`~.finish`       the second half: everybody has everything, or hears why not
:mod:`~.coordinator`  the same for the member that leads it; what the dead have left undone is done again
:mod:`~.sending`      what travels, in which order, in which pieces; nobody gets ahead over a long link
:mod:`~.reducer`      means of what the senders have sent
:mod:`~.parts`        the tensors as parts, and how much each member reduces
====================  =============================================================================================

::

    sender                     reducer                     coordinator
      ├─ begin, parts ────────────►│ mean of each part            │
      │◄──────────────── averages ─┤                              │
      ├─ end: holds all averages ─►│                              │
      ├─ hello, delivered, what it holds ────────────────────────►│ who lives, what is missing
      │◄──────────────────────────────────────── assignments ─────┤ after a death
      │◄──────────────────────────────── commit: the weights ─────┤
"""

from shoal.averaging.control import AveragingMode
from shoal.errors import BannedException

__all__ = ["AveragingMode", "BannedException"]
