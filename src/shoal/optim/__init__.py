"""When to average and step."""

from shoal.optim.grad_scaler import GradScaler
from shoal.optim.optimizer import Optimizer

__all__ = ["GradScaler", "Optimizer"]
