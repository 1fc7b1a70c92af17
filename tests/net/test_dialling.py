"""In which order, and how soon after each other, the addresses of a peer are tried."""

from __future__ import annotations

import asyncio

import pytest

from shoal.base.tasks import cancel_and_wait
from shoal.errors import DialError
from shoal.metrics import Metrics
from shoal.net.addresses import AddressBook
from shoal.net.connection import Connection
from shoal.net.connection_pool import (
    DIAL_STAGGER,
    HANDSHAKE_STAGGER,
    MAX_PARALLEL_DIALS,
    ConnectionPool,
    Dialler,
)
from shoal.net.memory import MemoryNetwork, MemoryTransport
from shoal.net.transport import ON_ANSWER, Stream
from shoal.p2p import Identity, PeerID
from shoal.peers.book import PeerBook
from shoal.peers.multiaddr import Multiaddr
from shoal.testing import run
from tests.p2p.peers import ScriptedStream

SOMEBODY = Identity.generate().peer_id
FIRST, SECOND = Multiaddr("/memory/1"), Multiaddr("/memory/2")


class Slow(MemoryTransport):
    """Where the first address takes some seconds, of which the machine may need all for its handshake."""

    def __init__(self, seconds: float, *, answers: bool, fails: bool = False) -> None:
        super().__init__(MemoryNetwork(), Identity.generate())
        self.seconds, self.answers, self.fails = seconds, answers, fails
        self.dialled: list[tuple[Multiaddr, float]] = []

    async def dial(self, address: Multiaddr, expected_peer: PeerID) -> Stream:
        self.dialled.append((address, asyncio.get_running_loop().time()))
        if address == FIRST:
            if self.answers:
                ON_ANSWER.get()()
            await asyncio.sleep(self.seconds)
            if self.fails:
                raise DialError("no TLS")
        return ScriptedStream(b"", expected_peer)


def dialled(transport: Slow) -> list[tuple[Multiaddr, float]]:
    async def main() -> None:
        book = AddressBook()
        book.replace(SOMEBODY, [FIRST, SECOND])
        await Dialler(transport, book, PeerBook(), Metrics()).dial(SOMEBODY)

    run(main())
    return transport.dialled


def test_a_machine_that_is_busy_with_a_handshake_is_not_dialled_again() -> None:
    assert dialled(Slow(HANDSHAKE_STAGGER - 0.1, answers=True)) == [(FIRST, 0.0)]


@pytest.mark.parametrize(("answers", "moment"), [(False, DIAL_STAGGER), (True, HANDSHAKE_STAGGER)])
def test_another_address_is_tried_if_the_first_one_is_silent(answers: bool, moment: float) -> None:
    assert dialled(Slow(60.0, answers=answers)) == [(FIRST, 0.0), (SECOND, moment)]


def test_another_address_is_tried_at_once_if_a_handshake_fails() -> None:
    assert dialled(Slow(1.0, answers=True, fails=True)) == [(FIRST, 0.0), (SECOND, 1.0)]


def test_a_call_that_gives_up_ends_its_own_dial() -> None:
    """No other one, and a new dial begins if more calls wait."""

    async def main() -> None:
        ended: list[int] = []
        began: list[int] = []

        async def dial(peer: PeerID) -> Connection:
            number = len(began)
            began.append(number)
            try:
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.append(number)

        pool, peer = ConnectionPool(dial, 60.0), Identity.generate().peer_id
        calls = [asyncio.ensure_future(pool.acquire(peer)) for _ in range(MAX_PARALLEL_DIALS + 2)]
        await asyncio.sleep(0)
        await cancel_and_wait(calls.pop())
        await asyncio.sleep(0)
        assert ended == []
        await cancel_and_wait(calls.pop(0))
        await asyncio.sleep(0)
        assert (ended, len(began)) == ([0], MAX_PARALLEL_DIALS + 1)
        await cancel_and_wait(*calls)
        await asyncio.sleep(0)
        assert sorted(ended) == began
        pool.close()

    run(main())
