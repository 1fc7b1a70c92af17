"""Many peers at once: each on a simulated host of its own, with or without an averager."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from shoal.averaging.control import AveragingMode, StepControl
from shoal.averaging.node import AveragerConfig, AveragerNode
from shoal.averaging.tensor_lock import TensorLock
from shoal.clock import get_dht_time
from shoal.compression import CompressionInfo, NoCompression
from shoal.dht import DHTNode, ValueWithExpiration
from shoal.errors import BootstrapError, ValidationError
from shoal.p2p import P2P, Multiaddr
from shoal.serializer import MSGPackSerializer
from shoal.testing.host import Host
from shoal.testing.network import Network

# How many nodes of the swarm a newcomer is told.
INITIAL_PEERS = 3
# How often it tries, on links that fail now and then.
JOIN_ATTEMPTS = 5


async def start_peers(network: Network, count: int, **options: Any) -> list[P2P]:
    """Start peers that know nothing of each other.

    Args:
        count: how many, each on a new host.
        options: for :meth:`P2P.create`.
    """
    hosts = [network.add_host() for _ in range(count)]
    return [await host.run(P2P.create(transport=host.transport(), rng=host.rng, **options)) for host in hosts]


async def start_dht_nodes(
    network: Network, count: int, *, swarm: list[DHTNode] | None = None, at_once: int = 32, **options: Any
) -> list[DHTNode]:
    """Start nodes of one distributed table, each on a new host.

    Args:
        count: how many.
        swarm: nodes that exist already; the new ones join them.
        at_once: so many join at the same time.
        options: for :meth:`DHTNode.create`.

    Returns:
        The new nodes.

    Raises:
        BootstrapError, ValidationError: a node could not join, also when it tried again.
    """
    existing: list[DHTNode] = list(swarm or ())
    started: list[DHTNode] = []
    while len(started) < count:
        wave = min(at_once, count - len(started)) if existing else 1
        nodes = await asyncio.gather(*(_start_dht_node(network, existing, options) for _ in range(wave)))
        started += nodes
        existing += nodes
    return started


async def _some_addresses(network: Network, nodes: list[DHTNode]) -> list[Multiaddr]:
    reachable = [node for node in nodes if not node.protocol.client_mode and network.host_of(node.peer_id).is_up]
    chosen = network.rng.sample(reachable, min(INITIAL_PEERS, len(reachable)))
    return [address for node in chosen for address in await node.p2p.get_visible_maddrs()]


async def _start_dht_node(network: Network, swarm: list[DHTNode], options: dict[str, Any]) -> DHTNode:
    host, attempts_left = network.add_host(), JOIN_ATTEMPTS
    while True:
        addresses = await _some_addresses(network, swarm)
        create = DHTNode.create(initial_peers=addresses, transport=host.transport(), rng=host.rng, **options)
        attempts_left -= 1
        try:
            return await host.run(create)
        except (BootstrapError, ValidationError):
            if not attempts_left:
                raise


class SharedTable:
    """What a distributed table does, without distributing: cheap, where the table is not what is being tested.

    Args:
        delay: seconds that a request takes to the table, and as many back.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.records: dict[Any, dict[Any, ValueWithExpiration[Any]]] = {}

    async def get(self, key: Any, latest: bool = False, **how: Any) -> ValueWithExpiration[Any] | None:
        """The dictionary under a key, as :meth:`DHTNode.get` returns it, whose further arguments make no difference."""
        await asyncio.sleep(self.delay)
        now = get_dht_time()
        alive = {k: v for k, v in self.records.get(key, {}).items() if v.expiration_time > now}
        await asyncio.sleep(self.delay)
        return ValueWithExpiration(alive, max(v.expiration_time for v in alive.values())) if alive else None

    async def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Set an entry of the dictionary under a key, as :meth:`DHTNode.store` does."""
        await asyncio.sleep(self.delay)
        known = self.records.setdefault(key, {}).get(subkey)
        is_later = known is None or known.expiration_time < expiration_time
        if is_later:
            self.records[key][subkey] = ValueWithExpiration(value, expiration_time)
        await asyncio.sleep(self.delay)
        return is_later


def make_averager_config(**settings: Any) -> AveragerConfig:
    """The settings of a small averager, changed as the caller likes."""
    defaults: dict[str, Any] = {
        "prefix": "simulation",
        "target_group_size": None,
        "min_group_size": 2,
        "initial_group_bits": "",
        "min_matchmaking_time": 5.0,
        "request_timeout": 3.0,
        "allreduce_timeout": None,
        "sender_timeout": 5.0,
        "reducer_timeout": 10.0,
        "chunk_timeout": 5.0,
        "averaging_alpha": 1.0,
        "part_size_bytes": 2**12,
        "compression": NoCompression(),
        "state_compression": NoCompression(),
        "bandwidth": None,
        "min_vector_size": 0,
        "mode": AveragingMode.NODE,
        "declare_state_period": 30.0,
    }
    return AveragerConfig(**{**defaults, **settings})


async def start_averager(
    host: Host, tensors: Sequence[torch.Tensor], table: SharedTable | DHTNode, **settings: Any
) -> AveragerNode:
    """Start an averager on a host.

    Args:
        tensors: what it averages; changed in place.
        table: where it finds others. If it is a node on the same host, the averager shares the node's peer.
        settings: fields of :class:`~shoal.averaging.node.AveragerConfig` that differ from
            :func:`make_averager_config`'s.
    """
    config = make_averager_config(**settings)
    if isinstance(table, DHTNode):
        p2p = table.p2p
    else:
        no_listen = config.mode is AveragingMode.CLIENT
        p2p = await host.run(P2P.create(transport=host.transport(), rng=host.rng, no_listen=no_listen))
    infos = [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
    lock = TensorLock()

    def get_state() -> tuple[Any, list[torch.Tensor]]:
        with lock.hold():
            return None, [tensor.clone() for tensor in tensors]

    node = AveragerNode(p2p, table, tensors, infos, config, lock, get_state)
    await host.run(node.start())
    return node


async def start_averagers(
    network: Network, tensors: Sequence[Sequence[torch.Tensor]], table: SharedTable | None = None, **settings: Any
) -> list[AveragerNode]:
    """Start one averager for each list of tensors, each on a new host.

    Args:
        table: where they find each other; by default one that answers at once.
        settings: as for :func:`start_averager`.
    """
    shared = table or SharedTable()
    return [await start_averager(network.add_host(), each, shared, **settings) for each in tensors]


def start_step(
    network: Network, node: AveragerNode, *, timeout: float = 60.0, gather: Any = None, **settings: Any
) -> StepControl:
    """Let an averager begin a step, on its host; the all-reduce may begin as soon as there is a group.

    Args:
        timeout: seconds for finding a group.
        gather: what the other members of the group get to know.
        settings: of :class:`StepControl`; ``scheduled_time`` is by default the end of the averager's
            ``min_matchmaking_time``.

    Returns:
        The step; wait for it with ``asyncio.wrap_future``. Cancelling it ends it; so does the death of the host.
    """
    now = network.host_of(node.p2p.peer_id).dht_time()
    settings.setdefault("scheduled_time", now + node.config.min_matchmaking_time)
    settings.setdefault("weight", 0.0 if node.config.mode is AveragingMode.AUX else 1.0)
    control = StepControl(deadline=now + timeout, data_for_gather=MSGPackSerializer.dumps(gather), **settings)
    control.allow_allreduce()
    running = network.host_of(node.p2p.peer_id).spawn(node.run_step(control))
    control.add_done_callback(lambda step: running.cancel() if step.cancelled() else None)
    return control
