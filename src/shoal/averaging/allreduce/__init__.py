"""The exchange: what a group does from the moment in which it is complete.

====================  =============================================================================================
:mod:`~.session`      a group at work: its rounds one after another; and all rounds of an averager, by id
:mod:`~.exchange`     the first half of a round: parts to those that reduce them, averages back
:mod:`~.finish`       the second half: everybody has everything, or hears why not
:mod:`~.coordinator`  the same for the member that leads it
:mod:`~.recovery`     what a dead member has left undone, done again by the others
:mod:`~.link`         the calls between a sender and a reducer
:mod:`~.sending`      what travels on them, in which order, in which pieces
:mod:`~.pace`         nobody gets ahead of the others over a long link
:mod:`~.reducer`      means of what the senders have sent
:mod:`~.parts`        the tensors as parts
====================  =============================================================================================
"""

from shoal.averaging.control import AveragingMode
from shoal.errors import BannedException

__all__ = ["AveragingMode", "BannedException"]
