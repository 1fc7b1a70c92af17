"""When to average and step."""

from shoal.optim.optimizer import Optimizer

__all__ = ["Optimizer"]
