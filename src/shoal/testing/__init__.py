"""Simulated networks in virtual time. They run the same code as over real sockets, with faults drawn from a seed.

::

    from shoal import get_dht_time
    from shoal.testing import Link, Network, run, start_dht_nodes

    async def main() -> None:
        network = Network(Link(delay=(0.01, 0.075), jitter=0.005, dial_failure=0.01))
        nodes = await start_dht_nodes(network, 100)
        await nodes[0].store("key", "value", get_dht_time() + 600)
        for node in nodes[1:31]:
            network.host_of(node.peer_id).power_off()
        assert (await nodes[99].get("key")).value == "value"

    run(main(), seed=1)  # minutes of virtual time pass in a second, and every run with this seed is the same

- :func:`run` runs a coroutine on a :class:`VirtualTimeLoop`, where time passes only when nothing is left to do.
- A :class:`Network` connects hosts (:class:`Host`) by links (:class:`Link`) with delay, jitter, and connections that
  fail or break. A host has a limited rate each way, a clock that may be off, and a firewall. It can crash, lose
  power or freeze for a while. The network can be partitioned and healed.
- Behind a :class:`Nat`, a host can call others but cannot be called, as behind a home router.
- :func:`start_peers`, :func:`start_dht_nodes` and :func:`start_averagers` start many nodes.
- A :class:`DHTSwarm` and an :class:`AveragerSwarm` need no hosts, for tests where an in-memory network is enough.
- A :class:`Trace` hashes everything that happened.

In reading order: :mod:`~.loop` has virtual time, :mod:`~.links` carries data between machines, :mod:`~.nat` has the
routers between them, :mod:`~.network` has the hosts, and :mod:`~.swarm` and :mod:`~.averagers` start many nodes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.errors import SimulationError
from shoal.testing.links import HostState, Link, Trace
from shoal.testing.loop import START_OF_TIME, Machine, VirtualTimeLoop, run
from shoal.testing.nat import Nat
from shoal.testing.network import Host, Network

if TYPE_CHECKING:
    from shoal.testing.averagers import (
        AveragerSwarm,
        SharedTable,
        make_averager,
        make_averager_config,
        make_step,
        start_averager,
        start_averagers,
        start_dht_node,
        start_dht_nodes,
        start_peers,
        start_step,
    )
    from shoal.testing.swarm import DHTSwarm, Swarm

# These load at first use, because they need the DHT or torch besides the network.
_HOME_OF = {
    **dict.fromkeys(("start_dht_node", "start_dht_nodes", "start_peers"), "shoal.testing.averagers"),
    **dict.fromkeys(
        ("AveragerSwarm", "SharedTable", "make_averager", "make_averager_config", "make_step"),
        "shoal.testing.averagers",
    ),
    **dict.fromkeys(("start_averager", "start_averagers", "start_step"), "shoal.testing.averagers"),
    **dict.fromkeys(("DHTSwarm", "Swarm"), "shoal.testing.swarm"),
}

__all__ = [
    "START_OF_TIME",
    "AveragerSwarm",
    "DHTSwarm",
    "Host",
    "HostState",
    "Link",
    "Machine",
    "Nat",
    "Network",
    "SharedTable",
    "SimulationError",
    "Swarm",
    "Trace",
    "VirtualTimeLoop",
    "make_averager",
    "make_averager_config",
    "make_step",
    "run",
    "start_averager",
    "start_averagers",
    "start_dht_node",
    "start_dht_nodes",
    "start_peers",
    "start_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shoal.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
