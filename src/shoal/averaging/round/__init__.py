"""The all-reduce: what a group does as soon as it is complete.

====================  =============================================================================================
:mod:`~.session`      the rounds of one group, one after another; and all rounds of an averager, by id
:mod:`~.state`        the pure state machine: each member's status, and how the round ends; the shells below act on it
:mod:`~.exchange`     the first half of a round: parts go to their reducers, averages come back
:mod:`~.traffic`      what two members send each other, and the calls between them
:mod:`~.finish`       the second half: every member gets every average, or learns why not
:mod:`~.coordinator`  the second half at the coordinator; recovers averages that a dead member has not delivered
:mod:`~.sending`      the order of the data and how it is cut into messages; flow control on long links
:mod:`~.reducer`      averages the parts that the senders have sent
:mod:`~.combining`    rules other than the mean, and the norms that they need
:mod:`~.parts`        cuts the tensors into parts, and decides how much each member reduces
:mod:`~.waits`        measures how long the group waits for each member alone
====================  =============================================================================================

::

    sender                     reducer                     coordinator
      ├─ begin, parts ────────────►│ mean of each part            │
      │◄──────────────── averages ─┤                              │
      ├─ end: holds all averages ─►│                              │
      ├─ hello, delivered, what it holds ────────────────────────►│ which members are alive, what is missing
      │◄──────────────────────────────────────── assignments ─────┤ after a death
      │◄──────────────────────────────── commit: the weights ─────┤
"""

from shoal.averaging.control import AveragingMode
from shoal.errors import AllreduceException, BannedException

__all__ = ["AllreduceException", "AveragingMode", "BannedException"]
