"""The simulated network: time that things take, and capacity that is shared."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.errors import DialError, IdentityMismatchError, P2PDaemonError, StreamClosedError
from shoal.net.memory import WINDOW_BYTES
from shoal.p2p import P2P, Header, Identity, Multiaddr, P2PContext, ServicerBase
from shoal.testing import Link, Machine, Network, SimulationError, run, start_peers
from tests.testing.pipes import Listener, connect, now, read

MEGABYTE = 1_000_000


def two_hosts(*args, **options):
    network = Network(*args, **options)
    return network.add_host(), network.add_host()


def test_needs_virtual_time():
    async def main():
        with pytest.raises(SimulationError, match=r"shoal\.testing\.run"):
            Network()

    asyncio.run(main())


def test_messages_and_connecting_take_their_time():
    async def main():
        a, b = two_hosts(Link(delay=0.1))
        near, far = await connect(a, b)
        assert now() == pytest.approx(0.7)  # the listener knows half a round trip after the dialler
        await near.write(b"ab", bytearray(b"cd"))
        assert await read(far, 3) == b"abc"
        assert await read(far, 1) == b"d"
        assert now() == pytest.approx(0.8)
        await far.write(memoryview(b"back"))
        assert await read(near, 4) == b"back"
        assert now() == pytest.approx(0.9)
        assert a.network.delay_between(a, b) == 0.1

    run(main())


def test_each_pair_of_hosts_has_its_own_delay():
    async def main():
        network = Network(Link(delay=(0.02, 0.15)))
        hosts = [network.add_host() for _ in range(30)]
        delays = {(i, j): network.delay_between(a, b) for i, a in enumerate(hosts) for j, b in enumerate(hosts)}
        assert all(delays[i, j] == delays[j, i] for i, j in delays)
        between = [delay for (i, j), delay in delays.items() if i != j]
        assert all(0.02 <= delay <= 0.15 for delay in between)
        assert min(between) < 0.03
        assert max(between) > 0.14
        assert delays[3, 3] == 0

    run(main())


def test_jitter_never_lets_messages_overtake_each_other():
    async def main():
        a, b = two_hosts(Link(delay=0.05, jitter=0.2))
        near, far = await connect(a, b)
        begun, gaps, last = now(), set(), 0.0
        for number in range(200):
            await near.write(bytes([number]))
        for number in range(200):
            assert await read(far, 1) == bytes([number])
            gaps.add(now() - last)
            last = now()
        assert 0.05 < now() - begun <= 0.25
        assert len(gaps) > 2

    run(main())


def test_links_can_be_changed():
    async def main():
        a, b = two_hosts()
        near, far = await connect(a, b)
        a.network.set_link(a, b, Link(delay=3.0))
        await near.write(b"x")
        await read(far, 1)
        assert now() == 3

    run(main())


@pytest.mark.parametrize("side", ["uplink", "downlink"])
def test_host_rate_limits_both_directions(side):
    async def main():
        a, b = two_hosts(Link(delay=0.05), **{side: MEGABYTE})
        near, far = await connect(a, b)
        begun = now()
        await near.write(bytes(2 * MEGABYTE))
        await read(far, 2 * MEGABYTE)
        assert now() - begun == pytest.approx(2.05, abs=0.01)

    run(main())


def test_slow_lines_at_both_ends_overlap():
    async def main():
        a, b = two_hosts(Link(delay=0.05), uplink=MEGABYTE, downlink=MEGABYTE)
        near, far = await connect(a, b)
        begun = now()
        await near.write(bytes(2 * MEGABYTE))
        await read(far, 2 * MEGABYTE)
        assert now() - begun == pytest.approx(2.05, abs=0.01)
        a.uplink = None
        b.downlink = 10 * MEGABYTE
        begun = now()
        await near.write(bytes(MEGABYTE))
        await read(far, MEGABYTE)
        assert now() - begun == pytest.approx(0.15, abs=0.01)
        assert (a.uplink, a.downlink) == (None, MEGABYTE)

    run(main())


def test_connections_share_a_line_fairly():
    async def main():
        network = Network(uplink=MEGABYTE)
        a, *others = [network.add_host() for _ in range(4)]
        pipes = [await connect(a, other) for other in others]
        begun = now()

        async def transfer(number, size):
            near, far = pipes[number]
            await near.write(bytes(size))
            await read(far, size)
            return now() - begun

        took = await asyncio.gather(transfer(0, MEGABYTE), transfer(1, MEGABYTE), transfer(2, 100))
        assert took == pytest.approx([2, 2, 0.0025], abs=0.01)  # a small message does not wait for the large ones

    run(main())


def test_senders_share_the_line_of_a_receiver():
    async def main():
        network = Network(Link(delay=0.02), downlink=MEGABYTE)
        receiver, *senders = [network.add_host() for _ in range(5)]
        pipes = [await connect(sender, receiver) for sender in senders]
        begun = now()

        async def transfer(near, far):
            await near.write(bytes(MEGABYTE))
            await read(far, MEGABYTE)
            return now() - begun

        assert await asyncio.gather(*(transfer(*pipe) for pipe in pipes)) == pytest.approx([4] * 4, abs=0.1)

    run(main())


def test_bytes_arrive_whole_through_slow_lines():
    async def main():
        a, b = two_hosts(uplink=50_000.0, downlink=20_000.0)
        near, far = await connect(a, b)
        rng = random.Random(1)
        messages = [rng.randbytes(rng.choice([0, 1, 100, 5000, 20_000])) for _ in range(30)]

        async def send():
            for message in messages:
                await near.write(message[:70], message[70:])
            near.close()

        sending = asyncio.ensure_future(send())
        assert await read(far, sum(map(len, messages))) == b"".join(messages)
        with pytest.raises(StreamClosedError):
            await read(far, 1)
        await sending

    run(main())


def test_writer_waits_for_a_slow_reader():
    async def main():
        a, b = two_hosts()
        near, far = await connect(a, b)
        await near.write(bytes(WINDOW_BYTES))
        writing = asyncio.ensure_future(near.write(bytes(10)))
        await asyncio.sleep(100)
        assert not writing.done()
        await read(far, 10)
        await writing

    run(main())


def test_abort_drops_unsent_data_and_close_keeps_it():
    async def main():
        for end, arrives in (("close", 100_000), ("abort", 10_000)):
            a, b = two_hosts(Link(delay=0.01), uplink=100_000.0)
            near, far = await connect(a, b)
            await near.write(bytes(100_000))
            await asyncio.sleep(0.105)
            getattr(near, end)()
            assert near.closed
            await asyncio.sleep(2)
            assert far.closed
            assert sum(map(len, far.inbox)) == pytest.approx(arrives, rel=0.15)

    run(main())


def test_nobody_there_or_somebody_else():
    async def main():
        network = Network(Link(delay=0.1))
        a, b, c = (network.add_host() for _ in range(3))
        listener = await Listener(b).start()
        with pytest.raises(IdentityMismatchError):
            await a.transport().dial(listener.address, Identity.generate().peer_id)
        with pytest.raises(DialError, match="no such address"):
            await a.transport().dial(Multiaddr("/memory/999"), listener.transport.identity.peer_id)
        with pytest.raises(P2PDaemonError, match="another peer listens there"):
            await c.transport().listen(listener.address, lambda stream: None)
        await listener.transport.close()
        begun = now()
        with pytest.raises(DialError, match="refused"):
            await a.transport().dial(listener.address, listener.transport.identity.peer_id)
        assert now() - begun == pytest.approx(0.2)

    run(main())


class WhereAmI(Header):
    host: int = -1


class Guide(ServicerBase):
    async def rpc_where(self, request: WhereAmI, context: P2PContext) -> WhereAmI:
        return WhereAmI(host=Machine.current().index)


def test_handlers_run_on_the_host_that_listens():
    async def main():
        network = Network()
        peers = await start_peers(network, 3)
        for peer in peers:
            await Guide().add_p2p_handlers(peer)  # where this is called from makes no difference
        for caller in peers:
            for index, callee in enumerate(peers):
                if caller is not callee:
                    caller.add_addresses(callee.peer_id, await callee.get_visible_maddrs())
                    reply = await Guide.get_stub(caller, callee.peer_id).rpc_where(WhereAmI())
                    assert reply.host == index == network.host_of(callee.peer_id).index
        for peer in peers:
            await peer.shutdown()

    run(main())


def test_many_peers_may_share_a_host():
    async def main():
        network = Network(Link(delay=1.0))
        host = network.add_host()
        server, client = [await host.run(P2P.create(transport=host.transport(), rng=host.rng)) for _ in range(2)]
        await Guide().add_p2p_handlers(server)
        client.add_addresses(server.peer_id, await server.get_visible_maddrs())
        assert (await Guide.get_stub(client, server.peer_id).rpc_where(WhereAmI())).host == 0
        assert now() == 0  # nothing has left the machine
        await client.shutdown()
        await server.shutdown()

    run(main())
