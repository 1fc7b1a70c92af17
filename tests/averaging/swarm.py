"""Averagers in one loop on an in-memory network, with a plain dictionary in place of the distributed table."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch

from shoal.averaging.control import StepControl
from shoal.averaging.node import AveragerNode
from shoal.averaging.round.parts import RoundVector
from shoal.base.clock import get_dht_time
from shoal.testing import AveragerSwarm, make_step

# In real time: little patience while looking for a group, much while averaging.
PATIENCE = {"min_matchmaking_time": 2.0, "request_timeout": 1.0, "sender_timeout": 15.0, "reducer_timeout": 30.0}


class Swarm(AveragerSwarm):
    """A number of averagers that can reach each other."""

    async def add(self, tensors: Sequence[torch.Tensor], **settings: Any) -> AveragerNode:
        return await super().add(tensors, **{**PATIENCE, **settings})


def make_control(node: AveragerNode, *, timeout: float = 20.0, **changes: Any) -> StepControl:
    return make_step(node, get_dht_time(), timeout=timeout, **changes)


async def until(condition):
    """Wait until something has become true in this loop; the test's time limit ends the wait."""
    while not condition():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.01)


def owner_of(swarm: Swarm, vector: RoundVector) -> AveragerNode:
    """Whose values these are."""
    for node in swarm.nodes:
        rounds = [*node.rounds.running.values(), *(current for current, _ in node.rounds.lingering.values())]
        if any(current.allreduce.vector is vector for current in rounds):
            return node
    raise AssertionError("nobody averages these values now")


async def average_while_one_dies(swarm: Swarm) -> list[StepControl]:
    """One round, until all but the first member have its result: the first one is dead by then."""
    controls = [make_control(node, expected_group_size=4, allow_retries=False) for node in swarm.nodes]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[1:])
    running[0].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return controls


async def average_while_one_is_late(swarm: Swarm) -> list[StepControl]:
    """One round with a quorum, which the first member joins when the others have its result."""
    controls = [make_control(node, expected_group_size=4, triggered=i != 0) for i, node in enumerate(swarm.nodes)]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[1:])
    controls[0].allow_allreduce()
    await running[0]
    return controls


__all__ = ["Swarm", "average_while_one_dies", "average_while_one_is_late", "make_control", "owner_of", "until"]


def warnings_of(caplog, text):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and text in r.getMessage()]
