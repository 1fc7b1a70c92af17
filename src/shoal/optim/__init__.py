"""When to average and when to step: many peers train as if they were one.

- :class:`Optimizer` counts the samples of each batch and adds up its gradients (:mod:`~.gradient_accumulator`).
- Each peer tells the others how far it is (:mod:`~.progress.exchange`). From this each peer predicts when all together
  will have ``target_batch_size`` samples, and which peers will come (:mod:`~.progress.board`,
  :mod:`~.progress_tracker`). How far others are believed is the business of :mod:`shoal.guard`.
- Then they make the global step (:mod:`~.global_step`): they average gradients, weighted by samples
  (:mod:`~.grad_averager`), each peer makes the same step, and they average parameters to remove the small differences
  that are left (:mod:`~.state_averager`). Which of these run in the background is the mode (:mod:`~.options`);
  :mod:`~.history.window` says how many epochs peers may then be apart. A search for a group begins early, and ends
  when nobody can come any more (:mod:`~.searches`).
- A newcomer, or a peer that has fallen behind, downloads parameters, optimizer and epoch
  (:mod:`~.recovery.when`, :mod:`~.setup.training_state`).
- If a swarm was split and each side has trained on, :mod:`~.history.fork_choice` decides which side continues.
- For slow lines, :class:`DiLoCo` lets each peer make many steps of its own between two exchanges (:mod:`~.diloco`).
- Gradients can be sent as matrices of low rank (:mod:`~.power_sgd_averager`, :mod:`~.power_ef_averager`). A peer can be
  several processes (:mod:`~.ranks.multi_process`), on any device (:mod:`~.setup.devices`).
"""

import shoal.base.needs_torch  # noqa: F401
from shoal.optim.diloco import DiLoCo, MultiProcessDiLoCo, strided_fragments
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.optimizer import Optimizer
from shoal.optim.ranks.multi_process import MultiProcessOptimizer
from shoal.optim.training_averager import TrainingAverager

__all__ = [
    "DiLoCo",
    "GradScaler",
    "MultiProcessDiLoCo",
    "MultiProcessOptimizer",
    "Optimizer",
    "TrainingAverager",
    "strided_fragments",
]
