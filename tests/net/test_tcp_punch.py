"""Punching over TCP: two sides that connect to each other at once from known ports, and what is left afterwards."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from shoal.net.tcp import punch as tcp_punch
from shoal.net.tcp.punch import MAX_PER_PORT, MAX_SYNS, Endpoint, punch_socket, punched
from shoal.net.tcp.stream import OwnSocket
from tests.p2p.peers import PATIENCE, until

HERE = "127.0.0.1"
SOON = 0.05
"""A round trip that makes for short pauses."""


class Port:
    """A port that somebody holds as the connection to the relay would."""

    def __init__(self) -> None:
        self._held = punch_socket(socket.AF_INET)
        self.number: int = self._held.getsockname()[1]

    @property
    def endpoint(self) -> Endpoint:
        return HERE, self.number

    def punch(self, *candidates: Endpoint, seconds: float = PATIENCE) -> AsyncGenerator[OwnSocket, None]:
        return punched(self.number, candidates, seconds, SOON)

    def close(self) -> None:
        self._held.close()


@asynccontextmanager
async def ports(count: int) -> AsyncIterator[Sequence[Port]]:
    """Some ports; at the end nothing but what was there before is open."""
    before = set(OwnSocket.open)
    made = [Port() for _ in range(count)]
    try:
        yield made
    finally:
        for port in made:
            port.close()
    assert set(OwnSocket.open) == before


async def first_of(port: Port, *candidates: Endpoint) -> OwnSocket:
    """The first connection; the punch is over then."""
    async with aclosing(port.punch(*candidates)) as connections:
        return await anext(connections)


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        number: int = probe.getsockname()[1]
    return number


async def stranger_at(port: Port) -> socket.socket | None:
    """Somebody who connects from another port, unless nobody listens."""
    stranger = socket.socket()
    stranger.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(stranger, port.endpoint)
    except OSError:
        stranger.close()
        return None
    return stranger


async def persistent_stranger_at(port: Port) -> socket.socket:
    """The same, as soon as there is a listener."""
    async with asyncio.timeout(PATIENCE):
        while True:
            stranger = await stranger_at(port)
            if stranger is not None:
                return stranger
            await asyncio.sleep(0)


async def all_of(connections: AsyncIterator[OwnSocket]) -> list[OwnSocket]:
    return [each async for each in connections]


async def exchange(one: socket.socket, other: socket.socket) -> None:
    """Both sides say something and hear it."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(one, b"ping")
    await loop.sock_sendall(other, b"pong")
    async with asyncio.timeout(PATIENCE):
        assert await loop.sock_recv(other, 9) == b"ping"
        assert await loop.sock_recv(one, 9) == b"pong"


@pytest.mark.parametrize("turns", range(5))
async def test_nothing_is_left_of_a_punch_that_is_given_up_twice(turns: int) -> None:
    """As when a dial is cancelled while it gives up its punches."""
    async with ports(1) as (port,):
        coming = asyncio.ensure_future(first_of(port, (HERE, free_port())))
        await asyncio.sleep(SOON)
        coming.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        coming.cancel()
        await asyncio.wait([coming])
        assert coming.cancelled()


async def test_two_ports_get_one_connection() -> None:
    async with ports(2) as (left, right):
        one, other = await asyncio.gather(first_of(left, right.endpoint), first_of(right, left.endpoint))
        assert one.getsockname() == other.getpeername() == left.endpoint
        assert one.getpeername() == other.getsockname() == right.endpoint
        await exchange(one, other)
        one.close()
        other.close()


async def test_many_pairs_at_once() -> None:
    async with ports(16) as made:
        pairs = list(zip(made[::2], made[1::2], strict=True))
        found = await asyncio.gather(
            *(first_of(left, right.endpoint) for left, right in pairs),
            *(first_of(right, left.endpoint) for left, right in pairs),
        )
        for one, other in zip(found[:8], found[8:], strict=True):
            await exchange(one, other)
            one.close()
            other.close()


async def test_one_side_that_comes_late_is_waited_for() -> None:
    async with ports(2) as (left, right):
        early = asyncio.ensure_future(first_of(left, right.endpoint))
        await asyncio.sleep(SOON)  # so that some attempts are refused
        late = await first_of(right, left.endpoint)
        one = await early
        await exchange(one, late)
        one.close()
        late.close()


async def test_one_wrong_candidate_does_not_matter() -> None:
    async with ports(2) as (left, right):
        wrong = (HERE, free_port())
        one, other = await asyncio.gather(
            first_of(left, wrong, right.endpoint), first_of(right, wrong, left.endpoint, wrong)
        )
        await exchange(one, other)
        one.close()
        other.close()


async def test_the_port_listens_for_others_than_the_candidates_too() -> None:
    """A router may give its host another port for each connection; then only this side can be called."""
    async with ports(1) as (port,):
        waiting = asyncio.ensure_future(first_of(port, (HERE, free_port())))
        stranger = await persistent_stranger_at(port)
        found = await waiting
        await exchange(found, stranger)
        found.close()
        stranger.close()


async def test_a_port_does_not_connect_to_itself() -> None:
    async with ports(1) as (port,):
        assert await tcp_punch.attempt(port.number, port.endpoint) is None


async def test_a_port_hands_up_only_some_connections() -> None:
    async with ports(1) as (port,):
        crowd: list[socket.socket] = []
        async with aclosing(port.punch((HERE, free_port()))) as connections:
            taking = asyncio.ensure_future(all_of(connections))
            while not taking.done():
                if (stranger := await stranger_at(port)) is not None:
                    crowd.append(stranger)
                await asyncio.sleep(0)
            taken = await taking
        assert len(taken) == MAX_PER_PORT
        for each in [*taken, *crowd]:
            each.close()


async def test_it_ends_in_time() -> None:
    async with ports(2) as (left, right):
        assert await all_of(left.punch(right.endpoint, seconds=SOON)) == []
        assert await all_of(left.punch(seconds=SOON)) == []


async def test_giving_up_leaves_nothing() -> None:
    async with ports(2) as (left, right):
        waiting = asyncio.ensure_future(first_of(left, right.endpoint))
        await asyncio.sleep(SOON)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()


async def test_what_nobody_takes_is_closed() -> None:
    async with ports(2) as (left, right):
        async with aclosing(left.punch(right.endpoint)) as connections:
            one = asyncio.ensure_future(anext(connections))
            other = await first_of(right, left.endpoint)
            (await one).close()
            # It goes on listening, and nobody asks for what it finds.
            stranger = await stranger_at(left)
            assert stranger is not None
        stranger.close()
        other.close()


async def test_a_relay_that_lies_gets_few_syns(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0

    async def refuse(port: int, candidate: Endpoint) -> None:
        nonlocal attempts
        attempts += 1
        raise ConnectionRefusedError

    monkeypatch.setattr(tcp_punch, "attempt", refuse)
    monkeypatch.setattr(tcp_punch, "LONGEST_PAUSE", tcp_punch.SHORTEST_PAUSE)
    async with ports(1) as (port,):
        endless = punched(port.number, [(HERE, 2000)], PATIENCE, 0.0)
        waiting = asyncio.ensure_future(anext(endless))
        await until(lambda: attempts == MAX_SYNS)
        await asyncio.sleep(SOON)
        assert attempts == MAX_SYNS
        waiting.cancel()
        await asyncio.wait([waiting])


@pytest.mark.parametrize("number", [errno.EADDRINUSE, errno.EADDRNOTAVAIL])
async def test_a_port_in_use_is_asked_again(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The listener has the connection, or the other side's last attempt is not quite over; nothing was sent."""
    attempts = 0
    really = tcp_punch.attempt

    async def occupied(port: int, candidate: Endpoint) -> OwnSocket | None:
        nonlocal attempts
        attempts += 1
        if attempts <= MAX_SYNS + 1:
            raise OSError(number, "in use")
        return await really(port, candidate)

    monkeypatch.setattr(tcp_punch, "attempt", occupied)
    async with ports(1) as (port,):
        with socket.create_server((HERE, 0)) as server:
            async with aclosing(punched(port.number, [server.getsockname()], PATIENCE, 0.0)) as connections:
                (await anext(connections)).close()


async def test_without_a_listener_connecting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, backlog: int = 0) -> None:
        raise PermissionError("nobody may listen here")

    async with ports(1) as (port,):
        with socket.create_server((HERE, 0)) as server:
            monkeypatch.setattr(OwnSocket, "listen", refuse, raising=False)
            (await first_of(port, server.getsockname())).close()


def test_options_of_each_system() -> None:
    shared = punch_socket(socket.AF_INET)
    again = punch_socket(socket.AF_INET, shared.getsockname()[1])
    for each in (shared, again):
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        if sys.platform != "win32":
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
        else:
            assert not hasattr(socket, "SO_REUSEPORT")
        assert each in OwnSocket.open
        each.close()


def test_a_port_of_another_program_is_not_taken() -> None:
    before = set(OwnSocket.open)
    with socket.socket() as other:
        other.bind((HERE, 0))
        with pytest.raises(OSError, match="in use"):
            punch_socket(socket.AF_INET, other.getsockname()[1])
    assert set(OwnSocket.open) == before


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_ipv6_from_the_port_of_the_same_number() -> None:
    async with ports(2) as (left, right):
        try:
            one, other = await asyncio.gather(
                first_of(left, ("::1", right.number)), first_of(right, ("::1", left.number))
            )
        except OSError as e:
            pytest.skip(f"no IPv6: {e}")
        await exchange(one, other)
        one.close()
        other.close()
