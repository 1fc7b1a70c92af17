"""One peer of several processes, such as one for each GPU of a machine. They communicate by ``torch.distributed``.

The first process decides, and the others follow it. After each batch all share their counts
(:meth:`~.processes.Processes.share`), and the others wait for commands of the first one::

    batch ─► share ─► first process:   decide, call the others ─► carry on ─► batch
                   └► other processes: hear ─► do what is called ─┘

- :mod:`~.processes`: their messages, and errors, which reach all of them.
- :mod:`~.several_processes`: what all such optimizers have in common.
- :mod:`~.multi_process`: with :class:`~shoal.Optimizer`. The first process gets all gradients and makes the steps. If
  the processes share the model, it has whole copies of the parameters in the memory of its host (:mod:`~.shards`).
- :mod:`~.sharded_diloco`: with :class:`~shoal.DiLoCo`, for a model that the processes share. Each has outer parameters
  of its own part, and exchanges that part.
"""
