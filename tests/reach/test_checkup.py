"""What a peer does for others that check how they reach it, and how little they can make of that."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

import pytest

from shoal.errors import P2PHandlerError, ProtocolError, StreamClosedError
from shoal.net.limits import DEFAULT_LIMITS
from shoal.net.transport import VERSION, Kind, pack
from shoal.p2p import P2P
from shoal.reach.checkup import (
    BULK_OF_ALL,
    BULK_OF_HOST,
    BULK_SECONDS,
    CALLS_BACK_OF_HOST,
    MAX_AT_ONCE,
    MAX_BULK_BYTES,
    Bulk,
    CallBack,
    Checkup,
    Description,
    Question,
)
from tests.dht.virtual_time import in_virtual_time
from tests.p2p.peers import Peers, assert_clean


def checkup(caller: P2P, server: P2P) -> Any:
    return Checkup.get_stub(caller, server.peer_id)


@asynccontextmanager
async def bulk(caller: P2P, server: P2P, size: int, wanted: int) -> AsyncIterator[Any]:
    async with checkup(caller, server).rpc_bulk() as call:
        await call.send(Bulk(wanted=wanted), bytes(size), end=True)
        yield call


async def exchange(caller: P2P, server: P2P, size: int, wanted: int) -> int:
    """How many bytes come back."""
    async with bulk(caller, server, size, wanted) as call:
        assert await call.receive(Bulk) is not None
        received = len(await call.read_payload(2**30))
        assert await call.receive(Bulk) is None
        return received


async def test_versions() -> None:
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        found: Description = await checkup(caller, server).rpc_describe(Question())
        assert found.shoal == metadata.version("shoal")
        assert found.torch == metadata.version("torch")
        assert found.python.count(".") == 2
        assert found.wire == VERSION
        assert found.seen_at.startswith("/ip4/127.0.0.1/tcp/")


async def test_calling_back() -> None:
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        answer: CallBack = await checkup(caller, server).rpc_call_back(Question())
        [address] = caller.get_addresses(caller.peer_id)
        assert answer.reached == {str(address): True}
        client = await peers.start(client_mode=True)
        assert (await checkup(client, server).rpc_call_back(Question())).reached == {}


async def test_calls_back_are_limited() -> None:
    """Otherwise a stranger could let this peer dial others as often as it likes."""
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        for _ in range(CALLS_BACK_OF_HOST[1]):
            await checkup(caller, server).rpc_call_back(Question())
        dialled = server.metrics.connections_dialled
        with pytest.raises(P2PHandlerError, match="enough has been measured"):
            await checkup(await peers.start(), server).rpc_call_back(Question())  # another identity, the same host
        assert server.metrics.connections_dialled == dialled == CALLS_BACK_OF_HOST[1]


async def test_who_has_a_whole_network_of_ipv6_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        addresses = (f"/ip6/2a00:1450:1:2::{number:x}/tcp/4000" for number in itertools.count(1))
        monkeypatch.setattr(server, "address_seen_of", lambda peer: next(addresses))
        for _ in range(CALLS_BACK_OF_HOST[1]):
            await checkup(caller, server).rpc_call_back(Question())
        with pytest.raises(P2PHandlerError, match="enough has been measured"):
            await checkup(caller, server).rpc_call_back(Question())


@in_virtual_time
async def test_who_sends_without_end_keeps_nobody_from_being_called_back() -> None:
    async with Peers("memory") as peers:
        server, caller = await peers.two()
        stranger = await peers.start()

        async def drip() -> None:
            async with checkup(stranger, server).rpc_bulk() as call:
                await call.connection.flush()
                stream = call.connection.stream
                await stream.write(pack(Kind.ITEM, Bulk(), 1000))
                while True:
                    await stream.write(b"x")
                    await asyncio.sleep(DEFAULT_LIMITS.seconds_of_silence / 3)

        dripping = [asyncio.ensure_future(drip()) for _ in range(MAX_AT_ONCE)]
        await asyncio.sleep(1.0)
        assert "too many others" in await outcome(caller, server)
        assert (await checkup(caller, server).rpc_call_back(Question())).reached
        await asyncio.sleep(BULK_SECONDS)
        assert await outcome(caller, server) == "done"
        for error in await asyncio.gather(*dripping, return_exceptions=True):
            assert isinstance(error, StreamClosedError)


async def test_calling_back_where_nobody_or_somebody_else_listens() -> None:
    """Told is no more than that it did not work, so that nobody can look around in another one's network."""
    async with Peers("tcp") as peers:
        server = await peers.start()
        with socket.create_server(("127.0.0.1", 0)) as other:
            other_address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
            [own] = server.get_addresses(server.peer_id)
            announced = ["/ip4/127.0.0.1/tcp/1", str(own)]
            caller = await peers.start(announce_maddrs=announced)
            assert (await checkup(caller, server).rpc_call_back(Question())).reached == dict.fromkeys(announced, False)
            silent = await peers.start(announce_maddrs=[other_address])
            answer = checkup(silent, server).rpc_call_back(Question())
            other.close()  # what would never answer is given up as soon as it is gone, or after some seconds
            assert (await answer).reached == {other_address: False}


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_bulk_data_in_both_directions(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        assert await exchange(caller, server, 0, 0) == 0
        assert await exchange(caller, server, 1_000_000, 0) == 0
        assert await exchange(caller, server, 10, 1_000_000) == 1_000_000
        assert await exchange(caller, server, 0, -5) == 0
        assert await exchange(caller, server, 0, 2**60) == MAX_BULK_BYTES
        assert_clean(server, caller)


async def test_too_much_at_a_time() -> None:
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        with pytest.raises((P2PHandlerError, ProtocolError, StreamClosedError), match=r"over|closed"):
            await exchange(caller, server, MAX_BULK_BYTES + 1, 0)


@in_virtual_time
async def test_bytes_for_one_caller_are_limited() -> None:
    async with Peers("memory") as peers:
        server, caller = await peers.two()
        other = await peers.start()
        taken = 0
        for _ in range(BULK_OF_HOST[1] // MAX_BULK_BYTES):
            taken += await exchange(caller, server, 0, MAX_BULK_BYTES)
        with pytest.raises(P2PHandlerError, match="enough has been measured for now"):
            await exchange(caller, server, 0, MAX_BULK_BYTES)
        assert taken == BULK_OF_HOST[1]
        assert await exchange(other, server, 0, MAX_BULK_BYTES), "another host is not concerned"
        await asyncio.sleep(3)
        assert await exchange(caller, server, 0, MAX_BULK_BYTES), "as time goes by there is more"
        assert server.metrics.bytes_sent < BULK_OF_HOST[1] + 5 * MAX_BULK_BYTES


@in_virtual_time
async def test_bytes_for_all_callers_are_limited() -> None:
    async with Peers("memory") as peers:
        server = await peers.start()
        taken, refused = 0, 0
        for _ in range(8):
            caller = await peers.start()
            for _ in range(BULK_OF_HOST[1] // MAX_BULK_BYTES):
                try:
                    taken += await exchange(caller, server, 0, MAX_BULK_BYTES)
                except P2PHandlerError:
                    refused += 1
        assert taken == BULK_OF_ALL[1]
        assert refused


async def test_callers_at_a_time_are_limited() -> None:
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        held = []
        for _ in range(MAX_AT_ONCE):
            opened = checkup(caller, server).rpc_bulk()
            call = await opened.__aenter__()
            await call.connection.flush()  # nothing more follows, so the other side waits
            held.append(opened)
        assert "too many others" in await next_refusal(caller, server)
        for opened in held:
            await opened.__aexit__(None, None, None)
        while await outcome(caller, server) != "done":  # that they have ended is on its way
            pass


async def outcome(caller: P2P, server: P2P) -> str:
    try:
        await exchange(caller, server, 0, 1)
    except P2PHandlerError as error:
        return str(error)
    return "done"


async def next_refusal(caller: P2P, server: P2P) -> str:
    """The openings of others are on their way."""
    while (text := await outcome(caller, server)) == "done":
        pass
    return text
