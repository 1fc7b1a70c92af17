"""Averaging tensors with other peers: finding a group, all-reduce, sharing state with newcomers."""

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import AveragingStage, RoundResult, StepControl

__all__ = ["AveragingStage", "DecentralizedAverager", "RoundResult", "StepControl"]
