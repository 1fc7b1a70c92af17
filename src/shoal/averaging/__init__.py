"""Averaging tensors with other peers, and giving a peer's state to newcomers.

- :class:`DecentralizedAverager` is the object that users hold; :mod:`~.node` does its work in the event loop, and a
  :class:`~.control.StepControl` is the handle of one step. :mod:`~.arguments` checks the options.
- ``groups``: peers with the same key in the DHT find each other; the peer with the earliest promise leads. It starts
  when all expected members are there, or at the promised time, and announces which member averages which share.
- ``round``: a vector is split into shares, one per member. Each member sends every share to the member that averages
  it, and gets the average back. Before the group dissolves, the members make sure that all of them have every average,
  even if some members have died.
- ``state``: a newcomer finds donors in the DHT and downloads the chunks of one version from several at once.
- :mod:`~.aggregation` has rules other than the mean, for runs in which some members may be faulty or lie.
- :mod:`~.messages` defines the messages that all of these exchange.
- Helpers: :mod:`~.message_means` (sparse messages), :mod:`~.majorities` (votes), :mod:`~.finite` (checks for NaN),
  :mod:`~.tensor_lock`.
"""

import shoal.base.needs_torch  # noqa: F401
from shoal.averaging.aggregation import Aggregation, CenteredClip, ClipToMedianNorm, TrimmedMean
from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import AveragingStage, RoundResult, StepControl
from shoal.base.inherited import offer_modules

__all__ = [
    "Aggregation",
    "AveragingStage",
    "CenteredClip",
    "ClipToMedianNorm",
    "DecentralizedAverager",
    "RoundResult",
    "StepControl",
    "TrimmedMean",
]

offer_modules(__name__)
