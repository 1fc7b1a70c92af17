"""Starts many peers, DHT nodes or averagers, each on a simulated host of its own, or averagers in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from shoal.averaging.arguments import AveragerConfig
from shoal.averaging.control import AveragingMode, StepControl
from shoal.averaging.node import Average, AveragerNode, average_once
from shoal.averaging.state.download import GetState
from shoal.averaging.tensor_lock import TensorLock
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import CompressionInfo, NoCompression
from shoal.dht import DHTNode, ValueWithExpiration
from shoal.errors import BootstrapError, ValidationError
from shoal.p2p import P2P, Multiaddr
from shoal.testing.network import Host, Network
from shoal.testing.swarm import INITIAL_PEERS, Swarm


async def start_peers(network: Network, count: int, **options: Any) -> list[P2P]:
    """Start peers that do not know each other.

    Args:
        count: number of peers, each on a new host.
        options: for :meth:`P2P.create`.
    """
    hosts = [network.add_host() for _ in range(count)]
    return [await host.run(P2P.create(transport=host.transport(), rng=host.rng, **options)) for host in hosts]


async def start_dht_nodes(
    network: Network, count: int, *, swarm: list[DHTNode] | None = None, at_once: int = 32, **options: Any
) -> list[DHTNode]:
    """Start nodes of one DHT, each on a new host.

    Args:
        count: number of nodes.
        swarm: existing nodes that the new ones join.
        at_once: number of nodes that join at the same time.
        options: for :meth:`DHTNode.create`.

    Returns:
        The new nodes.

    Raises:
        BootstrapError, ValidationError: a node could not join in any of its attempts.
    """
    existing: list[DHTNode] = list(swarm or ())
    started: list[DHTNode] = []
    while len(started) < count:
        wave = min(at_once, count - len(started)) if existing else 1
        hosts = [network.add_host() for _ in range(wave)]
        nodes = await asyncio.gather(*(start_dht_node(network, host, existing, **options) for host in hosts))
        started += nodes
        existing += nodes
    return started


async def _some_addresses(network: Network, nodes: Sequence[DHTNode]) -> list[Multiaddr]:
    reachable = [node for node in nodes if not node.protocol.client_mode and network.host_of(node.peer_id).is_up]
    chosen = network.rng.sample(reachable, min(INITIAL_PEERS, len(reachable)))
    return [address for node in chosen for address in await node.p2p.get_visible_maddrs()]


async def start_dht_node(network: Network, host: Host, swarm: Sequence[DHTNode], **options: Any) -> DHTNode:
    """Start a node on a host; it joins through a few random nodes.

    Args:
        swarm: the nodes that it may choose from; the list may grow meanwhile.
        options: for :meth:`DHTNode.create`.

    Raises:
        BootstrapError, ValidationError: it could not join in any of its attempts, or the host has died.
    """
    attempts_left = 5  # links may fail
    while True:
        addresses = await _some_addresses(network, swarm)
        create = DHTNode.create(initial_peers=addresses, transport=host.transport(), rng=host.rng, **options)
        attempts_left -= 1
        try:
            return await host.run(create)
        except (BootstrapError, ValidationError):
            if not attempts_left or not host.is_up:
                raise


class SharedTable:
    """A cheap stand-in for the DHT, for tests of other things: all peers share one dictionary.

    Args:
        delay: seconds that a request takes; the answer takes as long.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.records: dict[Any, dict[Any, ValueWithExpiration[Any]]] = {}

    async def get(self, key: Any, latest: bool = False, **how: Any) -> ValueWithExpiration[Any] | None:
        """The dictionary under a key, as :meth:`DHTNode.get` returns it. Other arguments are ignored."""
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
    """The settings of a small averager; ``settings`` override the defaults."""
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


def make_averager(
    p2p: P2P,
    tensors: Sequence[torch.Tensor],
    table: SharedTable | DHTNode,
    *,
    average: Average = average_once,
    get_state: GetState | None = None,
    **settings: Any,
) -> AveragerNode:
    """An averager that is not started yet.

    Args:
        tensors: the tensors to average; changed in place.
        table: where it finds others.
        average: runs a round in a group that was found.
        get_state: returns the state that newcomers download; default: the tensors.
        settings: fields of :class:`~shoal.averaging.arguments.AveragerConfig` that override the defaults of
            :func:`make_averager_config`.
    """
    infos = [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
    lock = TensorLock()

    def state_of_tensors() -> tuple[Any, list[torch.Tensor]]:
        with lock.hold():
            return None, [tensor.clone() for tensor in tensors]

    config = make_averager_config(**settings)
    return AveragerNode(p2p, table, tensors, infos, config, lock, get_state or state_of_tensors, average)


async def start_averager(
    host: Host, tensors: Sequence[torch.Tensor], table: SharedTable | DHTNode, **settings: Any
) -> AveragerNode:
    """Start an averager on a host.

    Args:
        tensors: the tensors to average; changed in place.
        table: where it finds others. If it is a node on the same host, the averager shares the node's peer.
        settings: fields of :class:`~shoal.averaging.arguments.AveragerConfig` that override the defaults of
            :func:`make_averager_config`.
    """
    if isinstance(table, DHTNode):
        p2p = table.p2p
    else:
        client_mode = settings.get("mode") is AveragingMode.CLIENT
        p2p = await host.run(P2P.create(transport=host.transport(), rng=host.rng, client_mode=client_mode))
    node = make_averager(p2p, tensors, table, **settings)
    await host.run(node.start())
    return node


async def start_averagers(
    network: Network, tensors: Sequence[Sequence[torch.Tensor]], table: SharedTable | None = None, **settings: Any
) -> list[AveragerNode]:
    """Start one averager for each list of tensors, each on a new host.

    Args:
        table: where they find each other; default: a table that answers at once.
        settings: as for :func:`start_averager`.
    """
    shared = table or SharedTable()
    return [await start_averager(network.add_host(), each, shared, **settings) for each in tensors]


def make_step(
    node: AveragerNode,
    now: float,
    *,
    timeout: float = 60.0,
    gather: Any = None,
    triggered: bool = True,
    **settings: Any,
) -> StepControl:
    """Make the control of a step that has not begun.

    Args:
        now: the time by the clock of its host.
        timeout: seconds for finding a group.
        gather: data for the other members of the group.
        triggered: whether the all-reduce may begin as soon as there is a group.
        settings: fields of :class:`StepControl`. By default, ``scheduled_time`` is ``min_matchmaking_time`` from now.
    """
    settings.setdefault("scheduled_time", now + node.config.min_matchmaking_time)
    settings.setdefault("weight", 0.0 if node.config.mode is AveragingMode.AUX else 1.0)
    control = StepControl(deadline=now + timeout, data_for_gather=MSGPackSerializer.dumps(gather), **settings)
    if triggered:
        control.allow_allreduce()
    return control


def start_step(network: Network, node: AveragerNode, **settings: Any) -> StepControl:
    """Let an averager start a step on its host.

    Args:
        settings: as for :func:`make_step`.

    Returns:
        The step; wait for it with ``asyncio.wrap_future``. It ends if it is cancelled or its host dies.
    """
    host = network.host_of(node.p2p.peer_id)
    control = make_step(node, host.dht_time(), **settings)
    running = host.spawn(node.run_step(control))
    control.add_done_callback(lambda step: running.cancel() if step.cancelled() else None)
    return control


class AveragerSwarm(Swarm[AveragerNode]):
    """Averagers that find each other in a :class:`SharedTable`."""

    def __init__(self, seed: int = 0, delay: float = 0.0) -> None:
        super().__init__(seed, delay)
        self.table = SharedTable()

    async def add(self, tensors: Sequence[torch.Tensor], **settings: Any) -> AveragerNode:
        """Start one more averager.

        Args:
            tensors: the tensors to average; changed in place.
            settings: as for :func:`make_averager`.
        """
        p2p = await self.p2p(client_mode=settings.get("mode") is AveragingMode.CLIENT)
        node = make_averager(p2p, tensors, self.table, **settings)
        await node.start()
        self.nodes.append(node)
        return node

    async def close(self) -> None:
        """End all averagers and their peers."""
        for node in self.nodes:
            await node.close()
            await node.p2p.shutdown()
