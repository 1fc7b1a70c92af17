"""When to average and step: many peers make the steps of one.

- :class:`Optimizer` counts the samples of each batch and adds up its gradients (:mod:`~.gradient_accumulator`).
- Each peer tells the others how far it is (:mod:`~.progress_exchange`); from that each foresees when all together have
  ``target_batch_size`` samples, and who will come (:mod:`~.progress_board`, :mod:`~.progress_tracker`).
- Then comes the global step (:mod:`~.global_step`): gradients are averaged by samples (:mod:`~.grad_averager`), every
  peer makes the same step, and parameters are averaged to remove what small differences are left
  (:mod:`~.state_averager`). Each of these may go on in the background; :mod:`~.epochs` says who may be how far ahead.
- A newcomer, and whoever has fallen behind, downloads parameters, optimizer and epoch (:mod:`~.synchronization`,
  :mod:`~.training_state`).
- If the swarm came apart, both sides have trained on; which of them goes on is decided in :mod:`~.sides`.
- Gradients may travel as matrices of low rank (:mod:`~.power_sgd_averager`, :mod:`~.power_ef_averager`). A peer may be
  several processes (:mod:`~.multi_process`), on any device (:mod:`~.devices`).
"""

from shoal.optim.grad_scaler import GradScaler
from shoal.optim.multi_process import MultiProcessOptimizer
from shoal.optim.optimizer import Optimizer
from shoal.optim.training_averager import TrainingAverager

__all__ = ["GradScaler", "MultiProcessOptimizer", "Optimizer", "TrainingAverager"]
