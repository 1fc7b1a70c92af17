"""What a DHT looks like to those who hold one: how it shows itself, how it ends, other names of its options."""

from __future__ import annotations

import re

import pytest

from shoal.clock import get_dht_time
from shoal.dht import DHT, DHTNode
from shoal.errors import DHTError, P2PDaemonError, ReactorError


def test_no_listen_is_another_name_of_client_mode() -> None:
    with DHT(start=True) as server, DHT(server.get_visible_maddrs(), start=True, no_listen=True) as client:
        assert client.client_mode
        assert client.get_visible_maddrs() == []
        assert client.store("key", 1, get_dht_time() + 60)
        found = server.get("key")
        assert found is not None
        assert found.value == 1


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


def test_its_address_is_short_and_the_whole_of_what_another_peer_needs() -> None:
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


def test_what_a_dht_looks_like_that_could_not_start() -> None:
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
