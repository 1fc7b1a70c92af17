"""When to average and step."""

from shoal.optim.grad_scaler import GradScaler
from shoal.optim.optimizer import Optimizer
from shoal.optim.training_averager import TrainingAverager

__all__ = ["GradScaler", "Optimizer", "TrainingAverager"]
