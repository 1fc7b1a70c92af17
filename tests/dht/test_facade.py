"""How a DHT shows itself, how it ends, and the other names of its options."""

from __future__ import annotations

import re

import pytest

from shoal.base.clock import get_dht_time
from shoal.dht import DHT, DHTNode
from shoal.errors import DHTError, P2PDaemonError, ReactorError
from tests.p2p.peers import Number, Service, serving


def test_relayed_peer_is_called_by_its_id() -> None:
    with DHT(start=True) as relay:
        peers = relay.get_visible_maddrs()
        with DHT(peers, start=True, no_listen=True) as hidden, DHT(peers, start=True) as caller:
            assert not hidden.client_mode
            assert hidden.p2p.transport.listeners == []
            visible = [str(address) for address in hidden.get_visible_maddrs()]
            assert visible == [f"{address}/p2p-circuit/p2p/{hidden.peer_id}" for address in peers]
            hidden.run_coroutine(_serve)

            async def call(dht: DHT, node: DHTNode) -> int:
                answer = await Service.get_stub(node.p2p, hidden.peer_id).rpc_square(Number(value=3))
                return int(answer.value)

            assert caller.run_coroutine(call) == 9
            assert hidden.store("key", 1, get_dht_time() + 60)
            found = caller.get("key", latest=True)
            assert found is not None
            assert found.value == 1
            with DHT(hidden.get_visible_maddrs(), start=True) as newcomer:
                assert newcomer.get("key") is not None


async def _serve(dht: DHT, node: DHTNode) -> None:
    await serving(node.p2p)


@pytest.mark.parametrize("options", [{"client_mode": True}, {"no_listen": True, "use_auto_relay": False}])
def test_a_client_is_never_called(options: dict[str, bool]) -> None:
    with DHT(start=True) as server, DHT(server.get_visible_maddrs(), start=True, **options) as client:
        assert client.client_mode
        assert client.get_visible_maddrs() == []
        assert client.store("key", 1, get_dht_time() + 60)
        found = server.get("key")
        assert found is not None
        assert found.value == 1
        assert server.p2p.relay.guests == []


def test_peer_without_port_or_relay_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with (
        DHT(start=True, relay=False) as server,
        DHT(server.get_visible_maddrs(), start=True, no_listen=True) as hidden,
    ):
        assert hidden.get_visible_maddrs() == []
        [line] = [text for text in caplog.messages if "nobody can call this peer" in text]
        assert line.endswith("none of 1 peers relays. Leave no_listen out, or run a public `shoal dht`")
        assert hidden.store("key", 1, get_dht_time() + 60)


def test_what_it_looks_like() -> None:
    later = DHT(start=False)
    assert repr(later) == "<DHT not started>"
    with DHT(start=True) as first:
        where = ", ".join(map(str, first.get_visible_maddrs()))
        assert repr(first) == f"<DHT {where}, knows 0 other peers>"
        with (
            DHT(first.get_visible_maddrs(), start=True) as second,
            DHT(first.get_visible_maddrs(), start=True, client_mode=True) as client,
        ):
            assert repr(second).endswith(", knows 1 other peer>")
            assert repr(client) in [
                f"<DHT client {client.peer_id}, knows {found}>" for found in ("1 other peer", "2 other peers")
            ]
            assert second.run_coroutine(_look) == repr(second), "also inside the loop"
        assert repr(second).endswith(", shut down>")
        assert str(second.peer_id) in repr(second)


def test_short_address_is_enough_to_join() -> None:
    with DHT(start=True) as first:
        [address] = first.get_visible_maddrs()
        assert first.address == f"127.0.0.1:{address['tcp']}"
        with DHT(first.address, start=True) as second:
            assert second.p2p.met == {address.decapsulate(f"/p2p/{first.peer_id}"): first.peer_id}
        with (
            DHT([first.address], start=True, client_mode=True) as client,
            pytest.raises(DHTError, match="in client mode it only calls others"),
        ):
            print(client.address)


async def _look(dht: DHT, node: DHTNode) -> str:
    return DHT.__repr__(dht)


def test_repr_of_a_dht_that_could_not_start() -> None:
    dht = DHT(start=True, await_ready=False, host_maddrs=["/ip4/127.0.0.1/udp/1"])
    with pytest.raises(P2PDaemonError):
        dht.wait_until_ready()
    assert re.fullmatch("<DHT failed to start: no usable address.*>", repr(dht))
    dht.shutdown()


def test_the_end_of_a_block_is_the_end() -> None:
    with DHT(start=True) as dht:
        assert dht.is_alive()
        dht.check()
    assert not dht.is_alive()
    with pytest.raises(ReactorError, match="this DHT is shut down"):
        dht.check()
