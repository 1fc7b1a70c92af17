"""When to average and step."""

from shoal.optim.grad_scaler import GradScaler
from shoal.optim.multi_process import MultiProcessOptimizer
from shoal.optim.optimizer import Optimizer
from shoal.optim.training_averager import TrainingAverager

__all__ = ["GradScaler", "MultiProcessOptimizer", "Optimizer", "TrainingAverager"]
