"""Private runs on simulated networks: members train, the expelled are out within seconds, roles hold in the table."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.access.badges import ROLES_BY_NAME
from shoal.access.tokens import DAY
from shoal.base.clock import get_dht_time
from shoal.dht import DHTNode
from shoal.errors import BootstrapError, ShoalError
from shoal.testing import START_OF_TIME, Network, run, start_averager, start_dht_nodes
from tests.drills import mostly_drills
from tests.simulation.expelling import LIMIT_SECONDS, LINK, MEMBERS, SECRET, expel, group_of, round_of


def invitation(role: str) -> str:
    return SECRET.invite(ROLES_BY_NAME[role], int(START_OF_TIME) + 30 * DAY).text


@pytest.mark.parametrize("members", mostly_drills([20, MEMBERS]))
@pytest.mark.parametrize("is_in_round", mostly_drills([False, True]))
def test_expelled_member_is_out_within_seconds_and_the_others_lose_no_round(is_in_round: bool, members: int) -> None:
    assert expel(7, members, is_in_round=is_in_round) < LIMIT_SECONDS


def test_roles_in_the_table() -> None:
    async def main() -> None:
        network = Network(LINK)
        trainers = await start_dht_nodes(network, 4, token=invitation("train"))
        [relay] = await start_dht_nodes(network, 1, swarm=trainers, token=invitation("relay"))
        [monitor] = await start_dht_nodes(network, 1, swarm=[relay, *trainers], token=invitation("monitor"))
        until = get_dht_time() + 600
        assert await trainers[0].store("by a trainer", 1, until)
        assert await relay.store("by a relay", 2, until)
        assert not await monitor.store("by a monitor", 3, until)
        for node in (*trainers, relay, monitor):
            for key, value in (("by a trainer", 1), ("by a relay", 2)):
                found = await node.get(key, latest=True)
                assert found is not None
                assert found.value == value
            if node is not monitor:
                assert await node.get("by a monitor", latest=True) is None
                assert monitor.peer_id not in node.protocol.routing_table, "it keeps no records"
                assert relay.peer_id in node.protocol.routing_table or node is relay
        assert len(monitor.protocol.routing_table) == 5, "a refused store is no reason to forget a node"

    run(main(), seed=2)


def test_relay_takes_no_part_in_rounds() -> None:
    async def main() -> None:
        network = Network(LINK)
        nodes = await start_dht_nodes(network, 2, token=invitation("train"))
        nodes += await start_dht_nodes(network, 1, swarm=nodes, token=invitation("relay"))
        averagers = [
            await start_averager(network.host_of(node.peer_id), [torch.full((8,), float(number))], node)
            for number, node in enumerate(nodes)
        ]
        first, second, relay = await round_of(network, averagers)
        assert group_of(first) == group_of(second) == {node.peer_id for node in nodes[:2]}
        assert isinstance(relay.exception(), ShoalError)
        assert averagers[0].tensors[0].tolist() == [0.5] * 8
        assert averagers[2].tensors[0].tolist() == [2.0] * 8

    run(main(), seed=3)


def test_guest_is_out_when_its_invitation_ends() -> None:
    async def main() -> None:
        network = Network(LINK)
        friends = await start_dht_nodes(network, 3, token=SECRET.text)
        short = SECRET.invite(ROLES_BY_NAME["train"], int(get_dht_time()) + 600).text
        [guest] = await start_dht_nodes(network, 1, swarm=friends, token=short)
        assert len(guest.protocol.routing_table) == 3
        await asyncio.sleep(900)
        for friend in friends:
            await friend.get("a key, for which all nodes are asked", latest=True)
            assert len(friend.protocol.routing_table) == 2
            assert guest.peer_id not in friend.protocol.routing_table
        with pytest.raises(BootstrapError, match="has expired"):
            await start_dht_nodes(network, 1, swarm=friends, token=short)

    run(main(), seed=4)


def test_newcomer_whose_clock_is_off_joins() -> None:
    """Within the days that a badge has left, a wrong clock is no obstacle: shoal tells it the time."""

    async def main() -> None:
        network = Network(LINK)
        nodes = await start_dht_nodes(network, 3, token=SECRET.text)
        host = network.add_host()
        host.clock_offset = 40.0 * DAY
        addresses = await nodes[0].get_visible_maddrs()
        late = await host.run(
            DHTNode.create(initial_peers=addresses, transport=host.transport(), rng=host.rng, token=SECRET.text)
        )
        assert len(late.protocol.routing_table) == 3

    run(main(), seed=5)
