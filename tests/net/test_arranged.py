"""Direct connections that a relay has arranged are kept: while no relay can, nobody can make others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shoal.errors import DialError
from shoal.metrics import Metrics
from shoal.net.connection import Connection, Hello
from shoal.net.connection_pool import BARREN_SECONDS, MAX_AGE_SECONDS, ConnectionPool
from shoal.net.limits import DEFAULT_LIMITS, HeaderMemory
from shoal.net.service import P2PContext, ServicerBase
from shoal.peers.identity import Identity
from shoal.reach.presence import Presence, PresenceQuery, PresenceReply
from shoal.reach.reachability import Reach
from shoal.testing import run
from tests.p2p.peers import Number, Peers, ScriptedStream, serving, until
from tests.reach.relays import square

PEER = Identity.generate().peer_id
IDLE_SECONDS, DIAL_SECONDS = 30.0, 5.0


class Stranded:
    """A pool whose dials fail after some seconds, because the relay is gone."""

    def __init__(self) -> None:
        self.dials = 0
        self.relay_is_back = False
        self.pool = ConnectionPool(self._dial, IDLE_SECONDS)

    async def _dial(self, peer: object) -> Connection:
        self.dials += 1
        await asyncio.sleep(DIAL_SECONDS)
        if not self.relay_is_back:
            raise DialError("the relay does not answer")
        return self.connection(is_arranged=True)

    def connection(self, *, is_arranged: bool) -> Connection:
        stream = ScriptedStream(b"", PEER)
        stream.is_arranged = is_arranged
        return Connection(stream, Metrics(), Hello, lambda *_: None, HeaderMemory(DEFAULT_LIMITS))

    def add(self, *, is_arranged: bool = True) -> Connection:
        made = self.connection(is_arranged=is_arranged)
        self.pool.add(made)
        return made


def simulated(test: Callable[[Stranded], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        stranded = Stranded()
        await test(stranded)
        stranded.pool.close()
        await asyncio.sleep(0)

    def test_it() -> None:
        run(main())

    test_it.__name__, test_it.__doc__ = test.__name__, test.__doc__
    return test_it


def seconds() -> float:
    return asyncio.get_running_loop().time()


@simulated
async def test_they_are_not_closed_for_being_idle_or_old_or_greeted_long_ago(stranded: Stranded) -> None:
    arranged, other = stranded.add(), stranded.add(is_arranged=False)
    await asyncio.sleep(3 * IDLE_SECONDS)
    assert (arranged.closed, other.closed) == (False, True)
    assert stranded.pool.renew() == [PEER]
    await asyncio.sleep(MAX_AGE_SECONDS)
    assert await stranded.pool.acquire(PEER) is arranged
    stranded.pool.release(arranged, reusable=True)
    assert stranded.pool.idle_count == 1


@simulated
async def test_a_call_takes_what_another_one_gives_back_while_it_dials(stranded: Stranded) -> None:
    stranded.add()
    taken = await stranded.pool.acquire(PEER)
    waiting = asyncio.ensure_future(stranded.pool.acquire(PEER))
    await asyncio.sleep(1)
    stranded.pool.release(taken, reusable=True)
    began = seconds()
    assert await waiting is taken
    assert seconds() == began
    assert stranded.dials == 1


@simulated
async def test_a_call_whose_dial_fails_waits_for_another_one(stranded: Stranded) -> None:
    stranded.add()
    taken = await stranded.pool.acquire(PEER)
    waiting = [asyncio.ensure_future(stranded.pool.acquire(PEER)) for _ in range(3)]
    await asyncio.sleep(DIAL_SECONDS + 1)
    dials = stranded.dials
    more = asyncio.ensure_future(stranded.pool.acquire(PEER))
    await asyncio.sleep(1)
    assert stranded.dials == dials, "it was in vain a moment ago"
    pending = {*waiting, more}
    while pending:
        assert not any(each.done() for each in pending)
        stranded.pool.release(taken, reusable=True)
        [served], pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert served.result() is taken
    await asyncio.sleep(BARREN_SECONDS)
    last = asyncio.ensure_future(stranded.pool.acquire(PEER))
    await asyncio.sleep(1)
    assert stranded.dials == dials + 1
    last.cancel()


@simulated
async def test_who_comes_too_late_for_the_call_serves_the_next_one(stranded: Stranded) -> None:
    stranded.add()
    stranded.relay_is_back = True
    taken = await stranded.pool.acquire(PEER)
    waiting = asyncio.ensure_future(stranded.pool.acquire(PEER))
    await asyncio.sleep(1)
    stranded.pool.release(taken, reusable=True)
    assert await waiting is taken
    await asyncio.sleep(DIAL_SECONDS)
    assert stranded.pool.idle_count == 1


@simulated
async def test_a_call_that_is_cancelled_loses_no_connection(stranded: Stranded) -> None:
    stranded.add()
    taken = await stranded.pool.acquire(PEER)
    waiting = asyncio.ensure_future(stranded.pool.acquire(PEER))
    await asyncio.sleep(1)
    stranded.pool.release(taken, reusable=True)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(1)
    assert (stranded.pool.idle_count, stranded.pool.in_use_count, stranded.pool.dialling_count) == (1, 0, 0)


@simulated
async def test_a_call_that_dials_gets_no_second_dial(stranded: Stranded) -> None:
    """When the calls on the former connections end, others may dial, but this one does so already."""
    taken = [stranded.add() for _ in range(2)]
    assert [await stranded.pool.acquire(PEER) for _ in taken] == taken[::-1]
    stranded.relay_is_back = True
    waiting = asyncio.ensure_future(stranded.pool.acquire(PEER))
    await asyncio.sleep(1)
    for each in taken:
        stranded.pool.release(each, reusable=False)
    assert not (await waiting).closed
    assert stranded.dials == 1


@simulated
async def test_a_call_whose_dial_has_failed_dials_again_when_nothing_else_is_left(stranded: Stranded) -> None:
    stranded.add()
    taken = await stranded.pool.acquire(PEER)
    waiting = asyncio.ensure_future(stranded.pool.acquire(PEER))
    await asyncio.sleep(DIAL_SECONDS + 1)
    stranded.relay_is_back = True
    stranded.pool.release(taken, reusable=False)
    assert not (await waiting).closed
    assert stranded.dials == 2


@simulated
async def test_calls_wait_for_connections_that_are_made_elsewhere(stranded: Stranded) -> None:
    end = stranded.pool.expect(PEER, 3)
    waiting = [asyncio.ensure_future(stranded.pool.acquire(PEER)) for _ in range(2)]
    await asyncio.sleep(1)
    made = [stranded.add() for _ in range(3)]
    end()
    end()
    assert [await each for each in waiting] == made[:2]
    assert (stranded.dials, stranded.pool.dialling_count, stranded.pool.idle_count) == (0, 0, 1)


@simulated
async def test_calls_that_have_waited_in_vain_dial_all_together(stranded: Stranded) -> None:
    end = stranded.pool.expect(PEER, 3)
    stranded.relay_is_back = True
    waiting = [asyncio.ensure_future(stranded.pool.acquire(PEER)) for _ in range(2)]
    await asyncio.sleep(1)
    assert stranded.dials == 0
    end()
    began = seconds()
    await asyncio.gather(*waiting)
    assert (stranded.dials, seconds() - began) == (2, DIAL_SECONDS)


@simulated
async def test_what_comes_late_from_elsewhere_may_still_be_earlier_than_a_dial(stranded: Stranded) -> None:
    stranded.pool.expect(PEER, 1)
    dials = [asyncio.ensure_future(stranded.pool.acquire(PEER)) for _ in range(1)]
    await asyncio.sleep(1)
    assert stranded.dials == 1, "one more may be dialled beside it"
    late = stranded.add()
    assert await dials[0] is late


@simulated
async def test_without_any_connection_a_dial_that_fails_tells_so(stranded: Stranded) -> None:
    with pytest.raises(DialError, match="does not answer"):
        await stranded.pool.acquire(PEER)


class Slow(ServicerBase):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.entered, self.may_answer = asyncio.Event(), asyncio.Event()

    async def rpc_wait(self, request: Number, context: P2PContext) -> Number:
        self.entered.set()
        await self.may_answer.wait()
        return request


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("kind", ["memory", "tcp"])
async def test_a_question_that_is_given_up_does_not_cost_the_connection(kind: str, comes: bool) -> None:
    async with Peers(kind) as peers:
        server, caller, slow = await peers.start(), await peers.start(), Slow()
        await serving(server)
        await slow.add_p2p_handlers(server)
        caller.add_addresses(server.peer_id, server.get_addresses(server.peer_id))
        assert await square(caller, server) == 9
        [stream] = caller.pool.streams_to(server.peer_id)
        stream.is_arranged = True
        asking = asyncio.ensure_future(Slow.get_stub(caller, server.peer_id).rpc_wait(Number(value=1)))
        await slow.entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not stream.closed
        assert caller.pool.count_of(server.peer_id) == 0, "it waits for the answer"
        if comes:
            slow.may_answer.set()
            await until(lambda: caller.pool.count_of(server.peer_id) == 1)
            assert caller.pool.streams_to(server.peer_id) == [stream]
            assert await square(caller, server) == 9
        else:
            await caller.shutdown()
            assert stream.closed
        assert not len(caller.tasks)


# --- what others learn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "tcp"])
async def test_who_stays_connected_tells_where_it_is_now(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.start(), await peers.start()
        await serving(server)
        caller.add_addresses(server.peer_id, server.get_addresses(server.peer_id))
        assert await square(caller, server) == 9
        [accepted] = server.server.connections_of(caller.peer_id)
        assert not server.server.has_arranged()
        accepted.stream.is_arranged = True
        assert server.server.has_arranged()
        told = caller.get_addresses(caller.peer_id)[:1]
        server.address_book.replace(caller.peer_id, ["/ip4/192.0.2.1/tcp/9"])
        query = PresenceQuery(instance=caller.instance, addresses=[*map(str, told)], reach=Reach.HARD.value)
        handle = Presence.handle_name("rpc_who_am_i", None)
        await caller.call(server.peer_id, handle, query, PresenceReply)
        assert [accepted] == server.server.connections_of(caller.peer_id)
        assert server.get_addresses(caller.peer_id) == told
        assert server.book.find(caller.peer_id).reach == Reach.HARD
