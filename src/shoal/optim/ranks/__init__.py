"""One peer of several processes, such as one for each GPU of a machine. They talk through ``torch.distributed``.

The first process decides, and the others follow it: after each batch all share what they have
(:meth:`~.processes.Processes.share`), and the others wait for the first one's word::

    batch ─► share ─► first process:   decide, call the others ─► carry on ─► batch
                   └► other processes: hear ─► do what is called ─┘

- :mod:`~.processes`: what they tell each other, and errors, which reach all of them.
- :mod:`~.several_processes`: what all such optimizers have in common.
- :mod:`~.multi_process`: with :class:`~shoal.Optimizer`. The first process gets all gradients and makes the steps; of a
  model that the processes share, it has whole stand-ins in the memory of its host (:mod:`~.shards`).
- :mod:`~.sharded_diloco`: with :class:`~shoal.DiLoCo`, for a model that the processes share. Each has outer parameters
  of its own part, and exchanges that part.
"""
