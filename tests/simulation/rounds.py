"""One averaging round of many peers on a simulated network, and what came of it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.averaging.control import RoundResult, StepControl
from shoal.averaging.node import AveragerNode
from shoal.averaging.round.exchange import AllReduce
from shoal.base.tasks import await_cancelled
from shoal.testing import Host, Link, Network, SharedTable, run, start_averagers, start_step

WINDOW = 5.0
"""Seconds for which groups are open."""
STAGGER = 1.0
"""Seconds within which all peers begin."""
TABLE_DELAY = 0.15
PART_BYTES = 64
VALUES_PER_MEMBER = 32
WIDE_AREA = Link(delay=(0.02, 0.15), jitter=0.01, dial_failure=0.01)


@dataclass
class Member:
    """One peer of the round.

    Attributes:
        index: among all peers; see :func:`own_value`.
        values: what it has afterwards.
        step: its step.
        ended: loop time at which the step ended.
    """

    index: int
    node: AveragerNode
    host: Host
    values: torch.Tensor
    step: StepControl | None = None
    ended: float = 0.0

    @property
    def result(self) -> RoundResult:
        """Of a successful round."""
        assert self.step is not None
        self.step.result()  # raises what the step raised
        assert self.step.round is not None
        return self.step.round

    @property
    def group_size(self) -> int:
        return len(self.result.peers)


Interfere = Callable[[Network, list[Member]], None]
"""Called when all members exist, before they begin."""


def run_round(
    seed: int,
    size: int,
    *,
    link: Link = WIDE_AREA,
    interfere: Interfere | None = None,
    linger: float = 0.0,
    **settings: Any,
) -> list[Member]:
    """Let peers begin a step at about the same time, and wait until all living ones are done.

    Args:
        linger: seconds for which all go on after that.
        settings: of the averagers.
    """
    settings = {"min_matchmaking_time": WINDOW, "part_size_bytes": PART_BYTES, **settings}

    async def main() -> list[Member]:
        network = Network(link)
        tensors = [torch.full((size * VALUES_PER_MEMBER,), own_value(index)) for index in range(size)]
        table = SharedTable(TABLE_DELAY)
        nodes = await start_averagers(network, [[tensor] for tensor in tensors], table, **settings)
        members = [
            Member(index, node, network.host_of(node.p2p.peer_id), tensor)
            for index, (node, tensor) in enumerate(zip(nodes, tensors, strict=True))
        ]
        if interfere is not None:
            interfere(network, members)
        await asyncio.gather(*(_take_part(network, member) for member in members))
        await asyncio.sleep(linger)
        return members

    return run(main(), seed=seed, time_limit=600)


def when_all_average(members: list[Member], then: Callable[[list[AllReduce]], None]) -> None:
    """Call ``then`` with the all-reduces of all members once all of them have begun."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        rounds = [current.allreduce for member in members for current in member.node.rounds.running.values()]
        if len(rounds) == len(members):
            then(rounds)
        else:
            loop.call_later(0.01, look)

    look()


async def _take_part(network: Network, member: Member) -> None:
    await asyncio.sleep(STAGGER * network.rng.random())
    if not member.host.is_up:
        return
    member.step = start_step(network, member.node, timeout=3 * WINDOW)
    await await_cancelled(asyncio.wrap_future(member.step))
    member.ended = asyncio.get_running_loop().time()


def own_value(index: int) -> float:
    """What a member has before the round; no two groups of members have the same mean."""
    return math.sqrt(2 + index) * 10


def left_out(
    member: Member, size: int, possible: Iterable[int], *, surely: Iterable[int] = (), at_most: int | None = None
) -> set[frozenset[int]]:
    """Who is missing in the means that a member has after the round: for each value, nobody or some of ``possible``.

    Args:
        surely: are missing in any case.

    Raises:
        AssertionError: a value is the mean of something else.
    """
    always = frozenset(surely)
    suspects = frozenset(possible) - always
    limit = len(suspects) if at_most is None else at_most
    return {_left_out(mean, size, suspects, always, limit) for mean in member.values.tolist()}


@functools.lru_cache(maxsize=1000)
def _left_out(mean: float, size: int, possible: frozenset[int], surely: frozenset[int], at_most: int) -> frozenset[int]:
    for count in range(at_most + 1):
        for absent in itertools.combinations(sorted(possible), count):
            missing = surely.union(absent)
            present = [own_value(index) for index in range(size) if index not in missing]
            if math.isclose(mean, sum(present) / len(present), rel_tol=3e-7):
                return missing
    raise AssertionError(
        f"{mean} is not the mean of {size} members without {sorted(surely)} and up to {at_most} of {sorted(possible)}"
    )


def assert_same_bytes(members: Sequence[Member]) -> None:
    first = members[0].values
    assert all(torch.equal(member.values, first) for member in members)
