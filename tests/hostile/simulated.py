"""A swarm in virtual time that strangers and liars attack, and what it has achieved beside the same swarm in peace."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.dht import DHTNode
from shoal.p2p import PeerID
from shoal.testing import Network, run
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import STRANGERS
from tests.hostile.attacks.members import LIES
from tests.simulation.training import LINK, RUN, Course, Swarm, Trainer

COURSE = Course(learning_rate=0.02)
SAMPLES_OF_A_PEER, SECONDS_OF_AN_EPOCH = 500, 10.0
PEERS, EPOCHS_BEFORE, EPOCHS = 20, 3, 10
EPOCHS_TO_LEARN = 3
HONEST = "honest"
"""Instead of a lie: a further member that keeps its word."""
GRACE = 0.5
"""Seconds within which all are done with a round, if nobody holds them up."""
LIMIT_SECONDS = 5000.0


@dataclass(frozen=True)
class Outcome:
    """What the honest peers have achieved while they were attacked."""

    goodput: float
    """Share of the samples that they could have made that were averaged with others."""
    loss: float
    """Of the mean honest peer in the end."""
    spread: float
    """Largest distance between a parameter of two honest peers that are at the same epoch."""
    epochs: int
    alone: int
    """Epochs that somebody made without others."""
    downloads: int
    """States that peers took over."""
    lines: int
    """Warnings in the logs of all of them."""
    told: tuple[str, ...]
    """Different ones, without their values."""
    named: frozenset[str]
    """Which of the attacks some warning has named the peer of."""


class Log(logging.Handler):
    """Collects warnings, within a ``with`` block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def names(self, *peers: PeerID, kind: str = "") -> bool:
        """Whether some line, with a certain text in it, says who one of these peers is."""
        lines = [record.getMessage() for record in self.records if kind in record.getMessage()]
        return any(str(peer) in line for line in lines for peer in peers)

    def __enter__(self) -> Log:
        logging.getLogger("shoal").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("shoal").removeHandler(self)


async def attacker_in(swarm: Swarm) -> Attacker:
    """One who comes from a host of its own."""

    addresses = [address for trainer in swarm.living for address in await trainer.node.p2p.get_visible_maddrs()]

    async def make_node(**options: Any) -> DHTNode:
        host = swarm.network.add_host()
        # Not with the validator of the others, which holds the keys of all of them.
        node = DHTNode.create(initial_peers=addresses[:3], transport=host.transport(), rng=host.rng, **options)
        return await host.run(node)

    return Attacker(await make_node(), RUN, make_node, state_of="grad")


async def begin(swarm: Swarm, name: str) -> Attacker:
    """Let a stranger begin."""
    me = await attacker_in(swarm)
    swarm.network.host_of(me.node.peer_id).spawn(STRANGERS[name](me))
    return me


def spread_of(trainers: Sequence[Trainer]) -> float:
    """How far the parameters are apart of those that are at the same epoch."""
    by_epoch: dict[int, list[torch.Tensor]] = {}
    for trainer in trainers:
        by_epoch.setdefault(trainer.epoch, []).append(trainer.parameters)
    spans = [torch.stack(models).amax(0) - torch.stack(models).amin(0) for models in by_epoch.values()]
    return max(float(span.max()) for span in spans)


async def next_epoch(trainer: Trainer, epoch: int, *, within: float = LIMIT_SECONDS) -> bool:
    """Wait until a trainer has reached an epoch; whether it has."""
    deadline = asyncio.get_running_loop().time() + within
    while trainer.epoch < epoch and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - time is virtual
        await asyncio.sleep(0.05)
    return trainer.epoch >= epoch


@functools.cache
def train(
    seed: int,
    attacks: tuple[str, ...] = (),
    lies: tuple[str, ...] = (),
    *,
    peers: int = PEERS,
    epochs: int = EPOCHS,
    values: int = COURSE.values,
) -> Outcome:
    """Let honest peers train, attack them when they know each other, and look what they achieve from then on.

    Args:
        attacks: of strangers.
        lies: of further members, who are honest until then. The first rounds after that do not count: it takes some to
            know them.
        epochs: that they make meanwhile, or try to make for three times as long as they should need.
        values: of the model. One member alone reduces a small one.
    """

    async def main() -> Outcome:
        target = (peers + len(lies)) * SAMPLES_OF_A_PEER
        # A run trusts its members by default.
        guard = "open" if lies else "members"
        course = replace(COURSE, target_batch_size=target, guard=guard, values=values)
        swarm = Swarm(Network(LINK), course)
        trainers = [await swarm.add() for _ in range(peers)]
        liars = [await swarm.add() for _ in lies]
        first, attackers = trainers[0], dict[str, PeerID]()
        await next_epoch(first, EPOCHS_BEFORE)
        with Log() as log:
            for name in attacks:
                attackers[name] = (await begin(swarm, name)).node.peer_id
            for liar, lie in zip(liars, lies, strict=True):
                if lie != HONEST:
                    attackers[lie] = liar.node.peer_id
                    LIES[lie](liar.averager)
            await next_epoch(first, first.epoch + (EPOCHS_TO_LEARN if lies else 1))
            await asyncio.sleep(GRACE)
            began, since, lines = first.epoch, swarm.forget(), len(log.records)
            await next_epoch(first, began + epochs, within=3 * epochs * SECONDS_OF_AN_EPOCH)
            await asyncio.sleep(GRACE)
        outcome = Outcome(
            goodput=swarm.goodput(trainers, since=since),
            loss=sum(trainer.loss for trainer in trainers) / peers,
            spread=spread_of(trainers),
            epochs=first.epoch - began,
            alone=sum(trainer.record.alone + trainer.record.failed for trainer in trainers),
            downloads=sum(trainer.record.downloads for trainer in trainers),
            lines=len(log.records) - lines,
            told=tuple(dict.fromkeys(str(record.msg) for record in log.records)),
            named=frozenset(name for name, peer in attackers.items() if log.names(peer)),
        )
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)
        return outcome

    return run(main(), seed=seed, time_limit=LIMIT_SECONDS)
