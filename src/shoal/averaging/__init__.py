"""Averaging tensors with other peers: finding a group, all-reduce, sharing state with newcomers."""

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import AveragingStage, RoundResult, StepControl
from shoal.inherited import offer_modules

__all__ = ["AveragingStage", "DecentralizedAverager", "RoundResult", "StepControl"]

offer_modules(__name__)
