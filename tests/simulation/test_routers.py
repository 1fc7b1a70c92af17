"""Peers behind routers of every kind: who reaches whom, and how, in simulated time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from shoal.reach.reachability import Reachability
from shoal.testing import Nat, run
from tests.simulation.routers import KINDS, Internet, dial, need_relay

SETTLED_SECONDS = 30.0
DIALS = 5


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations_with_replacement(KINDS, 2)])
def test_any_two_peers_connect_directly_where_their_routers_allow_it(first: str, second: str) -> None:
    async def main() -> None:
        internet = Internet()
        await internet.start()
        loop = asyncio.get_running_loop()
        nodes = []
        for kind in (first, second):
            began = loop.time()
            nodes.append(await internet.start(KINDS[kind]()))
            assert loop.time() - began <= 2.0
            expected = Reachability.PUBLIC if kind == "public" else Reachability.RELAYED
            assert nodes[-1].p2p.reachability is expected
        await asyncio.sleep(SETTLED_SECONDS)
        for caller, other in (nodes, reversed(nodes)):
            for number in range(DIALS):
                connection, seconds = await dial(internet, caller, other)
                assert connection.stream.is_relayed is need_relay(first, second)
                # A punch that comes to nothing costs its head start, and only once.
                assert seconds < (1.4 if number == 0 else 0.75)
                connection.abort()

    run(main())


@pytest.mark.parametrize("make", [Nat, lambda: Nat(mapping="hard"), lambda: Nat(behind=Nat())])
def test_peers_behind_one_router_meet_inside(make: Callable[[], Nat]) -> None:
    async def main() -> None:
        internet = Internet()
        await internet.start()
        home = make()
        nodes = [await internet.start(home) for _ in range(2)]
        await asyncio.sleep(SETTLED_SECONDS)
        for caller, other in (nodes, reversed(nodes)):
            connection, seconds = await dial(internet, caller, other)
            assert not connection.stream.is_relayed
            assert seconds < 0.05
            connection.abort()

    run(main())


def test_a_firewall_before_public_addresses_is_passed_by_punching() -> None:
    async def main() -> None:
        internet = Internet()
        await internet.start()
        nodes = [await internet.start(Nat(mapping="none")) for _ in range(2)]
        await asyncio.sleep(SETTLED_SECONDS)
        assert [node.p2p.reachability for node in nodes] == [Reachability.RELAYED] * 2
        connection, _ = await dial(internet, *nodes)
        assert not connection.stream.is_relayed

    run(main())


def test_a_forwarded_port_makes_a_peer_public_and_a_relay_for_others() -> None:
    async def main() -> None:
        internet = Internet()
        await internet.start()
        home = Nat()
        node = await internet.start(home)
        assert node.p2p.reachability is Reachability.RELAYED
        assert not node.p2p.relay.serves
        home.forward(int(node.p2p.transport.addresses()[0]["tcp"] or 0), internet.host_of(node))
        await asyncio.sleep(1200)
        assert node.p2p.reachability is Reachability.PUBLIC
        assert node.p2p.relay.serves
        assert str(node.p2p.outlook.announced()[0]).startswith(f"/ip4/{home.ip}/tcp/")

    run(main())
