"""What routers do to outgoing ports, as others tell."""

from __future__ import annotations

import pytest

from shoal.p2p import P2P, PeerID, observing
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.observing import is_mapping_hard
from tests.p2p.peers import Peers


def near_places(p2p: P2P, peer: PeerID) -> list[Multiaddr]:
    """Here there is no outside: observers are asked on this machine."""
    return [address for address in p2p.address_book.peek(peer) if address.get("ip4") == "127.0.0.1"]


async def test_without_a_router_both_observers_see_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "places_of", near_places)
    async with Peers("tcp") as peers:
        first, second = await peers.two()
        asker = await peers.start()
        assert await is_mapping_hard(asker, [first.peer_id, second.peer_id]) is False


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_one_observer_is_not_enough(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "places_of", lambda p2p, peer: p2p.address_book.peek(peer)[-1:])
    async with Peers(kind) as peers:
        first, asker = await peers.two()
        assert await is_mapping_hard(asker, [first.peer_id]) is None
        assert await is_mapping_hard(asker, []) is None
        assert await is_mapping_hard(asker, [asker.peer_id, first.peer_id]) is None, "nobody observes itself"


async def test_observers_without_a_public_address_are_of_no_use() -> None:
    async with Peers("tcp") as peers:
        first, second = await peers.two()
        asker = await peers.start()
        asker.address_book.replace(first.peer_id, ["/ip4/127.0.0.1/tcp/1"])
        assert await is_mapping_hard(asker, [first.peer_id, second.peer_id]) is None
