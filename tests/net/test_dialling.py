"""In which order, and how soon after each other, the addresses of a peer are tried."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import DialError
from shoal.metrics import Metrics
from shoal.net.addresses import AddressBook
from shoal.net.connection_pool import DIAL_STAGGER, HANDSHAKE_STAGGER, Dialler
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
