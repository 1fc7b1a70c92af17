"""A crowd with another time meets a small swarm that has agreed about it for a while."""

from __future__ import annotations

import asyncio

import pytest

from shoal.base.clock import UNNOTICEABLE_SECONDS
from shoal.testing import Network, run
from tests.hostile.attacks.clocks import tells_another_time
from tests.hostile.simulated import Log, attacker_in
from tests.simulation.training import LINK, Course, Swarm

PEERS, SETTLING_SECONDS, SECONDS = 3, 700.0, 900.0


@pytest.mark.timeout(300)  # it only computes
@pytest.mark.slow_drill
def test_seven_newcomers_do_not_move_the_time_of_three() -> None:
    async def main() -> None:
        swarm = Swarm(Network(LINK), Course(target_batch_size=PEERS * 1000))
        trainers = [await swarm.add() for _ in range(PEERS)]
        await asyncio.sleep(SETTLING_SECONDS)
        me = await attacker_in(swarm)
        with Log() as log:
            swarm.network.host_of(me.node.peer_id).spawn(tells_another_time(me))
            await asyncio.wait_for(me.has_struck.wait(), 60)
            await asyncio.sleep(SECONDS)
        assert not log.names(*(trainer.node.peer_id for trainer in trainers))
        true_time = sum(trainer.host.dht_time() for trainer in trainers) / PEERS
        for trainer in trainers:
            heard = trainer.node.p2p.clock
            assert heard.offset == pytest.approx(0, abs=UNNOTICEABLE_SECONDS), "these seven are in no round"
            assert trainer.host.dht_time() == pytest.approx(true_time, abs=3)
            assert trainer.record.group_sizes.keys() == {PEERS}
        for host in swarm.network.hosts:
            host.crash()
        await asyncio.sleep(1.0)

    run(main(), seed=1, time_limit=3000)
