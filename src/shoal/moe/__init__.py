"""Experts: modules that a server runs for others, and mixtures of them.

A caller sends an expert its inputs and gets the outputs. In its backward pass it sends the inputs again, with the
gradients of the outputs; the server trains the expert by one step and returns the gradients of the inputs.

::

    caller    gate ─► beam search in the DHT ─► one request per expert ─────────────────────► weighted sum
                                                        ▼                                       ▲
    server                               checks ─► pool of requests ─► one batch at a time ─────┘

In reading order:

- :mod:`~.uids` and :mod:`~.declare`: names of experts, and their records in the DHT.
- :mod:`~.expert`: a remote expert as a module. :mod:`~.beam_search` finds the best ones of a grid, :mod:`~.mixture`
  and :mod:`~.switch` mix them.
- :mod:`~.handler` answers calls, :mod:`~.backend` runs and trains a module, :mod:`~.layers` has classes of modules.
- :mod:`~.expert_server` is a server with all of its experts, with :mod:`~.dht_handler` and :mod:`~.checkpoints`;
  :mod:`~.background` runs one in a process of its own.
"""

import shoal.base.needs_torch  # noqa: F401
from shoal.base.inherited import offer_modules
from shoal.moe.backend import ModuleBackend
from shoal.moe.background import background_server
from shoal.moe.declare import declare_experts, get_experts
from shoal.moe.expert import RemoteExpert
from shoal.moe.expert_server import Server
from shoal.moe.layers import register_expert_class
from shoal.moe.mixture import RemoteMixtureOfExperts
from shoal.moe.switch import RemoteSwitchMixtureOfExperts

__all__ = [
    "ModuleBackend",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "Server",
    "background_server",
    "declare_experts",
    "get_experts",
    "register_expert_class",
]

offer_modules("shoal.moe")
