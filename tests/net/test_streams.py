"""What holds for streams of every transport."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.errors import StreamClosedError
from shoal.net.memory import WINDOW_BYTES, MemoryNetwork
from shoal.net.tcp.stream import TcpStream
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Stream, Transport
from shoal.p2p import Identity, Multiaddr
from tests.p2p.peers import until

pytestmark = pytest.mark.oldest


def transports(kind: str) -> list[Transport]:
    identities = [Identity.generate() for _ in range(2)]
    if kind == "tcp":
        return [TcpTransport(identity) for identity in identities]
    network = MemoryNetwork()
    return [network.transport(identity) for identity in identities]


@asynccontextmanager
async def both_ends(kind: str) -> AsyncIterator[tuple[Stream, Stream]]:
    """A connection: the dialler's stream, and the listener's."""
    dialler, listener = transports(kind)
    accepted: asyncio.Queue[Stream] = asyncio.Queue()
    [address] = await listener.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), accepted.put_nowait)
    yield await dialler.dial(address, listener.identity.peer_id), await accepted.get()
    await dialler.close()
    await listener.close()


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_what_has_arrived_can_be_taken_without_waiting(kind: str) -> None:
    async with both_ends(kind) as (near, far):
        taken: list[bytearray] = []

        def took(size: int) -> bool:
            taken.extend(piece for piece in [far.take(size)] if piece is not None)
            return bool(taken)

        assert far.take(1) is None
        assert far.take(0) == b""
        await near.write(b"abc", b"def")
        await until(lambda: took(4))
        assert taken == [b"abcd"]
        assert far.take(3) is None
        assert far.take(2) == b"ef"
        await near.write(b"ghijkl")
        await until(lambda: took(1) and len(taken) == 2)
        rest = bytearray(4)
        await far.read_exactly_into(memoryview(rest))
        assert (taken[1], rest, far.take(1), far.take(2)) == (b"g", b"hijk", b"l", None)
        near.abort()
        far.abort()


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_what_is_read_in_pieces_of_any_size_is_what_was_written(kind: str) -> None:
    async with both_ends(kind) as (near, far):
        rng = random.Random(5)
        data = rng.randbytes(400_000)

        async def write() -> None:
            rest = memoryview(data)
            while rest:
                size = rng.choice([1, 12, 500, 1024, 1025, 4096, 9000])
                await near.write(rest[:size])
                rest = rest[size:]
                if rng.random() < 0.2:
                    await asyncio.sleep(0.001)  # perhaps the reader waits meanwhile
            near.close()

        writing, read = asyncio.ensure_future(write()), bytearray()
        while left := len(data) - len(read):
            size = min(left, rng.choice([1, 12, 500, 1024, 1025, 4096, 20000]))
            piece = far.take(size) if rng.random() < 0.5 else None
            if piece is None:
                piece = bytearray(size)
                await far.read_exactly_into(memoryview(piece))
            read += piece
        assert read == data
        await writing
        with pytest.raises(StreamClosedError):
            await far.read_exactly_into(memoryview(bytearray(1)))


@pytest.mark.parametrize("kind", ["tcp", "memory"])
@pytest.mark.parametrize("size", [10, 5000])
async def test_a_stream_that_ends_in_the_middle_of_a_read_says_so(kind: str, size: int) -> None:
    async with both_ends(kind) as (near, far):
        reading = asyncio.ensure_future(far.read_exactly_into(memoryview(bytearray(size))))
        await until(lambda: far.is_awaited)
        await near.write(b"x" * (size - 1))
        near.close()
        with pytest.raises(StreamClosedError):
            await reading
        assert not far.is_awaited


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_a_few_bytes_go_between_others_unless_these_are_held_up(kind: str) -> None:
    async with both_ends(kind) as (near, far):
        await near.write(b"ab")
        assert near.write_if_free(b"cd")
        await near.write(b"ef")
        begun = bytearray(6)
        await far.read_exactly_into(memoryview(begun))
        assert begun == b"abcdef"
        if isinstance(near, TcpStream):
            near.pause_writing()
            assert not near.write_if_free(b"x")
            near.resume_writing()
        else:
            writing = asyncio.ensure_future(near.write(bytes(2 * WINDOW_BYTES)))
            await asyncio.sleep(0)
            assert not near.write_if_free(b"x")
            await far.read_exactly_into(memoryview(bytearray(2 * WINDOW_BYTES)))
            await writing
        assert near.write_if_free(b"x")
        near.abort()
        assert not near.write_if_free(b"x")
        far.abort()
