"""Peers that are alive and cannot be called are told of, once, and nobody else is."""

from __future__ import annotations

import logging

import pytest

from shoal.errors import DialError, P2PHandlerError
from shoal.net.addresses import FAILURES_TO_TELL, UnreachablePeers, what_to_do
from shoal.p2p import P2P, Identity, Multiaddr
from shoal.peers.book import PeerBook
from tests.p2p.peers import Number, Peers, serving, stub

PEER = Identity.generate().peer_id
ADDRESSES = [Multiaddr("/ip4/192.168.1.7/tcp/4001")]
ERROR = DialError("/ip4/192.168.1.7/tcp/4001: connection refused")


def fail(peers: UnreachablePeers, *signs: float, error: Exception = ERROR, company: str = "run 'a'") -> None:
    for sign in signs:
        peers.note_failure(PEER, error, ADDRESSES, company=company, sign_of_life=sign)


def test_who_goes_on_living_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    peers = UnreachablePeers(PeerBook())
    fail(peers, *range(FAILURES_TO_TELL - 1))
    assert not caplog.messages
    fail(peers, 7, 8, 9)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for words in (str(PEER), "run 'a'", "connection refused", "open port 4001", "`shoal dht`", "shoal doctor"):
        assert words in record.getMessage()
    peers.note_connection(PEER)
    fail(peers, *range(10, 20))
    assert len(caplog.records) == 1


def test_who_may_be_gone_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    peers = UnreachablePeers(PeerBook())
    fail(peers, *[5.0] * 100)
    fail(peers, *[3.0] * 100, company="run 'b'")
    fail(peers, *range(10, 20), error=P2PHandlerError("it answers"))
    assert not caplog.messages


def test_a_connection_takes_it_back(caplog: pytest.LogCaptureFixture) -> None:
    peers = UnreachablePeers(PeerBook())
    for round_number in range(10):
        fail(peers, 2 * round_number, 2 * round_number + 1)
        peers.note_connection(PEER)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["/ip4/127.0.0.1/tcp/5", "/ip6/::1/tcp/5"], "listens on its own machine alone: start it with host_maddrs="),
        (["/ip4/10.0.0.7/tcp/5", "/ip4/127.0.0.1/tcp/5"], "open port 5 of that machine"),
        (["/dns4/example.org/tcp/5"], "open port 5"),
    ],
)
def test_what_to_do(addresses: list[str], words: str) -> None:
    assert words in what_to_do([Multiaddr(address) for address in addresses])


async def test_dials_of_a_peer(caplog: pytest.LogCaptureFixture) -> None:
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        await serving(server)
        await stub(caller, server).rpc_square(Number(value=2))
        gone = await P2P.create()
        caller.add_addresses(gone.peer_id, gone.get_addresses(gone.peer_id))
        await gone.shutdown()
        for sign in range(FAILURES_TO_TELL):
            with pytest.raises(DialError) as error:
                await stub(caller, gone).rpc_square(Number(value=2))
            caller.note_uncalled(gone.peer_id, error.value, company="run 'a'", sign_of_life=float(sign))
        [line] = caplog.messages
        assert str(gone.peer_id) in line
        assert "SHOAL_HOST_MADDRS" in line, "it was on loopback"
