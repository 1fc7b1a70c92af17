"""Running modules for other peers: what experts (``shoal.moe``) and stages (``shoal.stages``) have in common.

- :mod:`~.tensors` sends nested structures of tensors over a call, each tensor with its codec.
- :mod:`~.task_pool` has the work that waits for a device, and :mod:`~.runtime` the thread that does it.
"""
