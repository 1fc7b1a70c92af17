"""A run for members only: to everybody else its trackers, averagers and states are as silent as its table."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from shoal.p2p import P2P
from shoal.testing import Network, run
from tests.dht.members import Authority, Member
from tests.hostile.attacker import Attacker
from tests.hostile.attacks.outsiders import uses_what_is_not_the_table
from tests.hostile.simulated import next_epoch
from tests.simulation.training import LINK, RUN, Course, Swarm

PEERS, EPOCHS = 3, 3


def test_an_outsider_is_told_nothing() -> None:
    async def main() -> None:
        authority = Authority()
        swarm = Swarm(Network(LINK), Course(target_batch_size=PEERS * 250))
        trainers = [await swarm.add(authorizer=Member(authority)) for _ in range(PEERS)]
        await next_epoch(trainers[0], EPOCHS)
        host = swarm.network.add_host()
        p2p = await host.run(P2P.create(transport=host.transport(), rng=host.rng))
        outsider: Any = SimpleNamespace(p2p=p2p)
        me = Attacker(outsider, RUN, lambda: None)  # type: ignore[arg-type, return-value]
        for trainer in trainers:
            victim = trainer.node.p2p
            p2p.add_addresses(victim.peer_id, victim.get_addresses(victim.peer_id))
            told = await host.run(uses_what_is_not_the_table(me, victim.peer_id))
            assert len(told) == 6
            for refusal in told.values():
                assert "only members" in refusal
                assert not any(word in refusal for word in ("shapes", "compression", "part_size", "quorum", "epoch"))
        await next_epoch(trainers[0], trainers[0].epoch + EPOCHS)
        await asyncio.sleep(0.5)
        for trainer in trainers:
            assert trainer.tracker.board.time_of_record(p2p.peer_id.to_bytes()) is None
            assert trainer.record.group_sizes.keys() == {PEERS}
            assert trainer.averager.p2p.metrics.rounds_failed == 0
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)

    run(main(), seed=1, time_limit=600)
