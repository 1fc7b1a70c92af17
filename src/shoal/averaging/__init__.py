"""Averaging tensors with other peers, and giving one's state to newcomers.

- :class:`DecentralizedAverager` is what users hold; :mod:`~.node` does its work in the event loop, and a
  :class:`~.control.StepControl` is the handle of one step.
- ``groups``: peers with the same key in the DHT find each other; the one that promised to start first leads. It starts
  when everybody who is expected is there, or at the promised time, and publishes who averages which share.
- ``allreduce``: every member sends each other one that member's share of its tensors and gets back the average. Before
  they part, members make sure that all of them have everything, also if some have died.
- ``state``: a newcomer finds donors in the DHT and takes the chunks of one version from several at once.
- :mod:`~.messages` are what all of these say to each other.
"""

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import AveragingStage, RoundResult, StepControl
from shoal.inherited import offer_modules

__all__ = ["AveragingStage", "DecentralizedAverager", "RoundResult", "StepControl"]

offer_modules(__name__)
