"""Averagers in one loop on an in-memory network, with a plain dictionary in place of the distributed table."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import torch

from shoal.averaging.allreduce.parts import RoundVector
from shoal.averaging.control import AveragingMode, StepControl
from shoal.averaging.node import Average, AveragerConfig, AveragerNode, average_once
from shoal.averaging.state.download import GetState
from shoal.averaging.tensor_lock import TensorLock
from shoal.clock import get_dht_time
from shoal.compression import CompressionInfo
from shoal.p2p import P2P, Identity
from shoal.p2p.memory import MemoryNetwork
from shoal.serializer import MSGPackSerializer
from shoal.testing.averagers import SharedTable, make_averager_config


def make_config(**changes: Any) -> AveragerConfig:
    """Settings for tests in real time: little patience while looking for a group, much while averaging."""
    patience = {"min_matchmaking_time": 2.0, "request_timeout": 1.0, "sender_timeout": 15.0, "reducer_timeout": 30.0}
    return make_averager_config(**{**patience, **changes})


class Swarm:
    """A number of averagers that can reach each other."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.network = MemoryNetwork()
        self.table = SharedTable()
        self.nodes: list[AveragerNode] = []

    async def add(
        self,
        tensors: Sequence[torch.Tensor],
        average: Average = average_once,
        get_state: GetState | None = None,
        **changes: Any,
    ) -> AveragerNode:
        config = make_config(**changes)
        transport = self.network.transport(Identity.generate(self.rng))
        no_listen = config.mode is AveragingMode.CLIENT
        p2p = await P2P.create(transport=transport, rng=random.Random(self.rng.random()), no_listen=no_listen)
        infos = [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
        lock = TensorLock()

        def state_of_tensors() -> tuple[Any, list[torch.Tensor]]:
            with lock.hold():
                return {"group_key": "bits"}, [tensor.clone() for tensor in tensors]

        node = AveragerNode(p2p, self.table, tensors, infos, config, lock, get_state or state_of_tensors, average)
        await node.start()
        self.nodes.append(node)
        return node

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()
            await node.p2p.shutdown()


def make_control(node: AveragerNode, *, gather: Any = None, timeout: float = 20.0, **changes: Any) -> StepControl:
    now = get_dht_time()
    triggered = changes.pop("triggered", True)
    changes.setdefault("scheduled_time", now + node.config.min_matchmaking_time)
    changes.setdefault("weight", 0.0 if node.config.mode is AveragingMode.AUX else 1.0)
    control = StepControl(deadline=now + timeout, data_for_gather=MSGPackSerializer.dumps(gather), **changes)
    if triggered:
        control.allow_allreduce()
    return control


async def until(condition):
    """Wait until something has become true in this loop; the test's time limit ends the wait."""
    while not condition():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.01)


def owner_of(swarm: Swarm, vector: RoundVector) -> AveragerNode:
    """Whose values these are."""
    for node in swarm.nodes:
        rounds = [*node._rounds._running.values(), *(current for current, _ in node._rounds._lingering.values())]
        if any(current._allreduce.vector is vector for current in rounds):
            return node
    raise AssertionError("nobody averages these values now")


__all__ = ["Swarm", "make_config", "make_control", "owner_of", "until"]
