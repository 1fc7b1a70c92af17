"""What goes wrong in the simulated network, and what peers see of it."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from shoal.base.clock import get_dht_time
from shoal.errors import DialError, StreamClosedError
from shoal.testing import START_OF_TIME, HostState, Link, Network, SimulationError, Trace, run
from shoal.testing.links import RETRANSMISSION_SECONDS
from shoal.testing.network import DIAL_TIMEOUT
from tests.testing.pipes import Listener, connect, now, read


def two_hosts(*args, **options):
    network = Network(*args, **options)
    return network.add_host(), network.add_host()


def test_so_many_dials_fail():
    async def main():
        a, b = two_hosts(Link(delay=0.01, dial_failure=0.1))
        listener = await Listener(b).start()
        outcomes = await asyncio.gather(*(listener.dial_from(a) for _ in range(1000)), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, DialError)]
        assert 70 <= len(failed) <= 130
        assert all("closed during the handshake" in str(error) for error in failed)
        assert len(a.streams) == 1000 - len(failed)

    run(main())


def test_connections_break_at_the_given_rate():
    async def main():
        a, b = two_hosts(Link(delay=0.01, break_rate=0.02))
        listener = await Listener(b).start()

        async def lifetime():
            near, far = await listener.dialled_by(a)
            begun, ends = now(), []
            near.on_closed(lambda: ends.append("near"))
            far.on_closed(lambda: ends.append("far"))
            with pytest.raises(StreamClosedError):
                await read(far, 1)
            assert near.closed
            assert sorted(ends) == ["far", "near"]
            return now() - begun

        lifetimes = await asyncio.gather(*(lifetime() for _ in range(500)))
        assert 43 < statistics.mean(lifetimes) < 57
        assert not a.streams
        assert not b.streams

    run(main())


def test_a_closed_connection_does_not_break_any_more():
    async def main():
        a, b = two_hosts(Link(break_rate=0.001))
        for _ in range(100):
            near, _ = await connect(a, b)
            near.close()
        await asyncio.sleep(1)
        assert sum(not timer.cancelled() for _, _, timer in asyncio.get_running_loop().timers) == 0

    run(main())


def test_connections_are_broken_on_purpose():
    async def main():
        network = Network(Link(delay=0.1))
        a, b, c = (network.add_host() for _ in range(3))
        ab, ba, ac = await connect(a, b), await connect(b, a), await connect(a, c)
        network.break_connections(a, b)
        assert all(stream.closed for stream in (*ab, *ba))
        assert not any(stream.closed for stream in ac)
        await connect(a, b)

    run(main())


def test_crash_ends_connections_and_tasks():
    async def main():
        a, b = two_hosts(Link(delay=0.1))
        listener = await Listener(b).start()
        near, far = await listener.dialled_by(a)
        endless = b.spawn(asyncio.sleep(1000))
        await far.write(b"last words")
        b.crash()
        begun = now()
        assert b.state is HostState.CRASHED
        assert far.closed
        assert await read(near, 10) == b"last words"  # on their way already
        with pytest.raises(StreamClosedError):
            await read(near, 1)
        assert now() - begun == pytest.approx(0.1)
        assert endless.cancelled()
        with pytest.raises(StreamClosedError):
            await near.write(b"x")
        begun = now()
        with pytest.raises(DialError, match="refused"):
            await listener.dial_from(a)
        assert now() - begun == pytest.approx(0.2)
        with pytest.raises(SimulationError, match="crashed"):
            b.spawn(asyncio.sleep(0))
        with pytest.raises(DialError, match="this host is down"):
            await listener.dial_from(b)

    run(main())


def test_powered_off_host_is_merely_silent():
    async def main():
        a, b = two_hosts(Link(delay=0.1))
        listener = await Listener(b).start()
        near, far = await listener.dialled_by(a)
        endless = b.spawn(asyncio.sleep(1000))
        await far.write(b"last words")
        b.power_off()
        assert await read(near, 10) == b"last words"
        assert endless.cancelled()
        reading = asyncio.ensure_future(read(near, 1))
        await near.write(b"anybody there?")
        await asyncio.sleep(600)
        assert not near.closed
        assert not reading.done()
        begun = now()
        with pytest.raises(DialError, match="no answer within 5 s"):
            await listener.dial_from(a)
        assert now() - begun == pytest.approx(DIAL_TIMEOUT)
        with pytest.raises(StreamClosedError):  # nobody acknowledges: as with TCP, that ends it after a long time
            await reading
        assert 0 <= now() - RETRANSMISSION_SECONDS < 10

    run(main())


def test_unsent_data_dies_with_the_machine():
    async def main():
        for death in ("crash", "power_off"):
            a, b = two_hosts(uplink=1000.0)
            near, far = await connect(a, b)
            await near.write(bytes(10_000))
            await asyncio.sleep(4)
            getattr(a, death)()
            await asyncio.sleep(100)
            assert 3000 <= sum(map(len, far.inbox)) <= 5600

    run(main())


def test_run_on_a_host_that_dies():
    async def main():
        a, b = two_hosts()
        running = asyncio.ensure_future(a.run(asyncio.sleep(10)))
        cancelled = asyncio.ensure_future(b.run(asyncio.sleep(10)))
        await asyncio.sleep(1)
        a.power_off()
        cancelled.cancel()
        with pytest.raises(SimulationError, match="died"):
            await running
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await b.run(asyncio.sleep(1, "done")) == "done"
        a.crash()  # it is dead already
        assert a.state is HostState.OFF

    run(main())


def test_partition_holds_messages_until_it_is_healed():
    async def main():
        network = Network(Link(delay=0.1))
        a, b, c = (network.add_host() for _ in range(3))
        near, far = await connect(a, b)
        other_near, other_far = await connect(a, c)
        await near.write(b"1")
        network.partition([a], [b])
        await near.write(b"2")
        await asyncio.sleep(30)
        await near.write(b"3")
        await far.write(b"back")
        await other_near.write(b"c is in no group")
        assert await read(other_far, 16) == b"c is in no group"
        assert not far.inbox
        listener = await Listener(b).start()
        with pytest.raises(DialError, match="no answer"):
            await listener.dial_from(a)
        network.heal()
        begun = now()
        await near.write(b"4")
        assert await read(far, 4) == b"1234"
        assert await read(near, 4) == b"back"
        assert now() - begun == pytest.approx(0.1)
        await listener.dialled_by(a)

    run(main())


def test_a_new_partition_replaces_the_old_one():
    async def main():
        network = Network(Link(delay=0.1))
        a, b, c = (network.add_host() for _ in range(3))
        ab, ac = await connect(a, b), await connect(a, c)
        network.partition([a, b], [c])
        await ac[0].write(b"to c")
        await asyncio.sleep(1)
        network.partition([a, c], [b])
        network.partition([a], [b, c])  # before anything has come through
        await asyncio.sleep(1)
        assert not ac[1].inbox
        network.partition([a, c], [b])
        await ab[0].write(b"to b")
        assert await read(ac[1], 4) == b"to c"
        await asyncio.sleep(1)
        assert not ab[1].inbox

    run(main())


def test_a_long_partition_ends_connections():
    async def main():
        a, b = two_hosts(Link(delay=0.1))
        near, far = await connect(a, b)
        silent_near, silent_far = await connect(a, b)
        a.network.partition([a], [b])
        await near.write(b"x")
        await asyncio.sleep(RETRANSMISSION_SECONDS + 1)
        assert near.closed
        assert not far.closed  # it has sent nothing, and has no reason to doubt
        assert not silent_near.closed
        a.network.heal()
        await silent_near.write(b"still there")
        assert await read(silent_far, 11) == b"still there"

    run(main())


def test_closing_behind_a_cut_is_known_after_it():
    async def main():
        a, b = two_hosts(Link(delay=0.1))
        near, far = await connect(a, b)
        a.network.partition([a], [b])
        near.close()
        await asyncio.sleep(10)
        assert not far.closed
        a.network.heal()
        await asyncio.sleep(0.2)
        assert far.closed

    run(main())


def test_nobody_gets_through_a_firewall():
    async def main():
        a, b = two_hosts(Link(delay=0.1))
        b.firewalled = True
        with pytest.raises(DialError, match="no answer"):
            await connect(a, b)
        near, far = await connect(b, a)  # from inside it works
        await near.write(b"x")
        assert await read(far, 1) == b"x"

    run(main())


def test_clock_of_a_host():
    async def main():
        a, b = two_hosts()
        a.clock_offset = 300.0

        async def time_there():
            return get_dht_time()

        assert await a.run(time_there()) == START_OF_TIME + 300
        assert await b.run(time_there()) == START_OF_TIME

    run(main())


def test_trace_tells_runs_apart():
    async def main(text):
        trace = Trace(keep_lines=True)
        a, b = two_hosts(Link(delay=(0.01, 0.1)), trace=trace)
        near, far = await connect(a, b)
        await near.write(text)
        await read(far, len(text))
        near.close()
        await asyncio.sleep(1)
        assert trace.events == len(trace.lines) == 2
        assert trace.lines[0].endswith(f"#0 data {text.hex()}")
        assert trace.lines[1].endswith("#0 end ")
        return trace.digest()

    assert run(main(b"same"), seed=1) == run(main(b"same"), seed=1)
    assert len({run(main(b"same"), seed=1), run(main(b"same"), seed=2), run(main(b"else"), seed=1)}) == 3
