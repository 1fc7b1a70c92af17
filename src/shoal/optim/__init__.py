"""When to average and when to step: many peers train as if they were one.

Each peer adds up the gradients of its batches and tells the others how many samples it has. When all together have
``target_batch_size``, they make a *global step*: they average gradients, weighted by samples, and each makes the same
step. Then they average parameters, which removes the small differences that are left. Which of this runs in the
background is the *mode*. A newcomer, or a peer that has fallen behind, downloads parameters, optimizer and epoch.

::

    batch ─► gradient_accumulator ─► progress: enough samples? ─► global_step ─► grad_averager ─► state_averager
      ▲                                                                                                 │
      └──────── recovery, if the others are ahead ◄────────────────────── next epoch ◄──────────────────┘

In reading order:

- :mod:`~.options` resolves what the user has given, and :mod:`~.setup` its parameters, optimizer and schedule.
- :mod:`~.optimizer` counts batches, and decides when to step and when to catch up. :mod:`~.joint_optimizer` has what it
  shares with :class:`DiLoCo`, such as searches for a group, which begin before the end of an epoch.
- :mod:`~.gradient_accumulator` and :mod:`~.grad_scaler` take in the gradients of a batch.
- :mod:`~.progress_tracker` is the training thread's view of :mod:`~.progress`: how far all peers are, and which are
  expected. :mod:`shoal.guard` decides how far others are believed.
- :mod:`~.global_step` makes the step, with :mod:`~.grad_averager` and :mod:`~.state_averager`.
- :mod:`~.recovery` downloads states. :mod:`~.history` says how many epochs peers may be apart, and which partition wins
  after a run was split.
- :mod:`~.consistency` warns of what differs between peers although nothing averages it, and :mod:`~.report` tells
  monitors how this peer is doing.

For slow connections, :class:`DiLoCo` lets each peer make many steps of its own between two exchanges
(:mod:`~.diloco`), or gradients are sent as matrices of low rank (:mod:`~.low_rank`, :mod:`~.power_sgd_averager`,
:mod:`~.power_ef_averager`). A peer can be several processes (:mod:`~.ranks`). :mod:`~.training_averager` averages a
model whenever the training loop calls it.
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
