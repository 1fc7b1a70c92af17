"""What routers do to outgoing ports, as others tell."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import StreamClosedError
from shoal.net.transport import Session, send_frame
from shoal.p2p import P2P, P2PContext, PeerID, ServicerBase
from shoal.peers.multiaddr import Multiaddr
from shoal.reach import punching as observing
from shoal.reach.punching import is_mapping_hard
from shoal.reach.relay.messages import Observe, Observed, OpenObservation
from shoal.reach.relay.server import RelayServer
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


class Liar(ServicerBase):
    """Says to see everybody elsewhere."""

    def __init__(self, p2p: P2P) -> None:
        self.p2p = p2p
        self.lies: list[asyncio.Task[None]] = []

    @classmethod
    def handle_name(cls, method: str, namespace: str | None) -> str:
        return RelayServer.handle_name(method, namespace)

    async def rpc_observe(self, request: Observe, context: P2PContext) -> OpenObservation:
        cookie = self.p2p.transport.new_cookie()
        self.lies.append(asyncio.ensure_future(self.lie(self.p2p.transport.expect_session(cookie))))
        return OpenObservation(cookie=cookie)

    async def lie(self, expected: asyncio.Future[Session]) -> None:
        session = await expected
        await send_frame(session, Observed(seen_at="/ip4/8.8.8.8/tcp/4000"))
        with pytest.raises(StreamClosedError):
            await session.read_exactly(1)


@pytest.mark.parametrize(("honest", "expected"), [(1, True), (2, False)])
async def test_one_liar_does_not_make_a_router_hard(
    honest: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing, "places_of", near_places)
    async with Peers("tcp") as peers:
        observers = [await peers.start() for _ in range(1 + honest)]
        await observers[0].relay.remove_p2p_handlers(observers[0])
        liar = Liar(observers[0])
        await liar.add_p2p_handlers(observers[0])
        asker = await peers.start()
        for _ in range(2):
            assert await is_mapping_hard(asker, [each.peer_id for each in observers]) is expected
            observers.append(observers.pop(0))  # he may be the first or the last one
        await asyncio.gather(*liar.lies)
