"""Averaging in small groups until everybody has the mean of all."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch

from shoal.averaging.node import AveragerNode
from shoal.testing import Link, Network, SharedTable, run, start_averagers, start_step
from tests.simulation.rounds import WINDOW

VALUES = 4
SPREAD = 0.05
"""The values of the peers are drawn around 1 with this standard deviation: models that have drifted apart by 5 %."""
QUICK = Link(delay=(0.005, 0.05), jitter=0.005)


@dataclass(frozen=True)
class Spread:
    """How far the peers are from the mean that they had together at the beginning."""

    largest: float
    """Largest difference of any value of any peer."""
    standard_deviation: float
    """Over all peers, the largest one of any value."""
    shift: float
    """By how much the mean over all peers has moved."""
    group_sizes: Counter[int]
    """How many peers were in groups of each size in the round before."""


def mix(peers: int, group_size: int, rounds: int, *, seed: int = 0) -> list[Spread]:
    """Average again and again in groups, with buckets of one group's size in the beginning.

    Returns:
        The spread before the first round and after each one.
    """

    async def main() -> list[Spread]:
        network = Network(QUICK)
        tensors = [torch.tensor([network.rng.gauss(1, SPREAD) for _ in range(VALUES)]) for _ in range(peers)]
        bits = math.ceil(math.log2(peers / group_size))
        settings = {"target_group_size": group_size, "min_matchmaking_time": WINDOW, "part_size_bytes": 4}
        table, nodes = SharedTable(), []
        for index, tensor in enumerate(tensors):
            bucket = f"{index // group_size:0{bits}b}" if bits else ""
            nodes += await start_averagers(network, [[tensor]], table, initial_group_bits=bucket, **settings)
        means = [fmean(tensor[i].item() for tensor in tensors) for i in range(VALUES)]
        spreads = [_spread(tensors, means, Counter())]
        for _ in range(rounds):
            sizes = await asyncio.gather(*(_step(network, node) for node in nodes))
            spreads.append(_spread(tensors, means, Counter(sizes)))
        return spreads

    return run(main(), seed=seed)


async def _step(network: Network, node: AveragerNode) -> int:
    step = start_step(network, node, timeout=20 * WINDOW)
    await asyncio.wrap_future(step)
    assert step.round is not None
    return len(step.round.peers)


def _spread(tensors: list[torch.Tensor], means: list[float], group_sizes: Counter[int]) -> Spread:
    columns = [[tensor[i].item() for tensor in tensors] for i in range(VALUES)]
    return Spread(
        largest=max(abs(value - mean) for column, mean in zip(columns, means, strict=True) for value in column),
        standard_deviation=max(map(pstdev, columns)),
        shift=max(abs(fmean(column) - mean) for column, mean in zip(columns, means, strict=True)),
        group_sizes=group_sizes,
    )
