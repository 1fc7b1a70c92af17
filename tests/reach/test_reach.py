"""How a peer finds out whether others can call it, with other peers around, and what others do to it."""

from __future__ import annotations

import asyncio

import pytest

from shoal.dht import DHTNode
from shoal.net.addresses import Judge
from shoal.net.memory import MemoryNetwork
from shoal.net.transport import Stream
from shoal.p2p import P2P, Multiaddr, PeerID
from shoal.reach.manager import TICK_SECONDS
from shoal.reach.presence import GREETINGS_AT_ONCE
from shoal.reach.reachability import Reach, Reachability
from tests.dht.virtual_time import in_virtual_time
from tests.p2p.peers import KINDS, Number, Peers, serving, stub, until
from tests.reach.relays import Relayed, square, tell

OUTSIDE = Multiaddr("/ip4/8.8.8.8/tcp/40000")


class Elsewhere(Stream):
    """Nothing but a connection with somebody outside."""

    closed = False

    def __init__(self, peer: P2P, address: Multiaddr = OUTSIDE) -> None:
        self.remote, self.remote_address = peer.peer_id, address

    async def write(self, *buffers: object) -> None: ...

    async def read_exactly_into(self, buffer: memoryview) -> None: ...

    def on_closed(self, callback: object) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@pytest.mark.parametrize("kind", KINDS)
async def test_a_swarm_on_one_machine_is_public_to_itself_and_asks_nobody(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await serving(server)
        assert (await stub(caller, server).rpc_square(Number(value=3))).value == 9
        for p2p in (server, caller):
            assert p2p.reachability is Reachability.PUBLIC
            assert p2p.is_callable
            assert p2p.metrics.reachability == "public"
            assert p2p.get_addresses(p2p.peer_id) == p2p.transport.addresses()
        assert server.book.find(caller.peer_id).reach == Reach.PUBLIC
        assert caller.metrics.calls_made == 1
        assert server.metrics.calls_made == 0


async def test_who_does_not_listen_is_a_client() -> None:
    async with Peers("tcp") as peers:
        server = await peers.start()
        client = await peers.start(client_mode=True)
        await serving(server)
        await stub(client, server).rpc_square(Number(value=3))
        assert client.reachability is Reachability.CLIENT
        assert not client.is_callable
        assert server.book.find(client.peer_id).reach == Reach.CLIENT


@pytest.mark.parametrize("kind", KINDS)
async def test_who_is_said_to_be_private_is_called_through_relays(kind: str) -> None:
    async with Peers(kind) as peers:
        relay = await DHTNode.create(p2p=await peers.start())
        initial = await relay.get_visible_maddrs()
        node = await DHTNode.create(
            p2p=await peers.start(force_reachability="private", initial_peers=initial), initial_peers=initial
        )
        assert node.p2p.reachability is Reachability.RELAYED
        assert node.protocol.is_node
        assert any("p2p-circuit" in address for address in await node.get_visible_maddrs())
        assert node.p2p.metrics.reservations == 1
        await until(lambda: relay.p2p.book.find(node.peer_id).reach == Reach.EASY)
        await node.shutdown()
        await relay.shutdown()


async def test_trusted_relays_are_parsed_and_relays_can_be_turned_off() -> None:
    async with Peers("tcp") as peers:
        relay = await peers.start(relay_hop_limit=0)
        assert not relay.relay.serves
        (address, *_) = await relay.get_visible_maddrs()
        p2p = await peers.start(use_relay=False, use_auto_relay=False, trusted_relays=[str(address)])
        assert [peer for _, peer in p2p.reservations.trusted] == [relay.peer_id]
        assert p2p.dialler.dial_circuit is None
        same = await peers.start(use_auto_relay=False, trusted_relays=f"{address},")
        assert same.reservations.trusted == p2p.reservations.trusted
        with pytest.raises(TypeError, match="trusted_relays must be a list"):
            await peers.start(trusted_relays=5)


async def test_a_liar_does_not_talk_a_peer_out_of_an_address_that_works() -> None:
    async with Peers("tcp") as peers:
        p2p, honest, liar = await peers.start(auto_nat=False), await peers.start(), await peers.start()
        outlook = p2p.outlook
        for peer, address in ((honest, OUTSIDE), (liar, Multiaddr("/ip4/9.9.9.9/tcp/40000"))):
            outlook.note_stream(Elsewhere(peer, address))
        assert p2p.reachability is Reachability.UNKNOWN
        outlook.note_seen(honest.peer_id, "/ip4/11.0.0.1/tcp/50000")
        port = p2p.transport.addresses()[0]["tcp"]
        works = Multiaddr(f"/ip4/11.0.0.1/tcp/{port}")
        outlook.note_called_back(honest.peer_id, [works], reached=True)
        assert p2p.reachability is Reachability.PUBLIC
        assert outlook.announced()[0] == works
        for lie in ("/ip4/11.0.0.2/tcp/1", "/ip4/11.0.0.3/tcp/1", "nonsense", "/dns4/example.org/tcp/1", ""):
            outlook.note_seen(liar.peer_id, lie)
        assert outlook.announced()[0] == works
        assert p2p.reachability is Reachability.PUBLIC
        assert len(outlook.evidence.offers) == 2


@pytest.mark.parametrize("comes", [True, False], ids=["honest", "liar"])
async def test_a_witness_that_says_that_it_has_come_must_have_come(monkeypatch, comes: bool) -> None:
    """Else one liar would make a private peer believe that it is public, and give up its relays."""
    async with Peers("tcp") as peers:
        witness, p2p = await peers.two()
        await serving(witness)
        await stub(p2p, witness).rpc_square(Number(value=3))
        other = await peers.start()  # comes instead of the witness, which would be seen to be on this machine
        (here, *_) = p2p.transport.addresses()

        async def dial(peer: PeerID, address: Multiaddr, judge: Judge) -> Stream:
            return await other.dial_without_greeting(peer, here) if comes else Elsewhere(p2p)

        monkeypatch.setattr(witness, "dial_without_greeting", dial)
        p2p.outlook.note_stream(Elsewhere(witness, OUTSIDE))
        p2p.outlook.note_seen(witness.peer_id, "/ip4/11.0.0.1/tcp/50000")
        await p2p.outlook.check()
        assert bool(p2p.outlook.confirmed()) is comes


async def test_what_witnesses_inside_see_is_no_address_outside() -> None:
    async with Peers("tcp") as peers:
        server, caller = await peers.two()
        await serving(server)
        await stub(caller, server).rpc_square(Number(value=3))
        caller.outlook.note_seen(server.peer_id, "/ip4/11.0.0.1/tcp/50000")
        assert not caller.outlook.evidence.offers


@in_virtual_time
async def test_everybody_hears_of_changes_that_follow_each_other_soon() -> None:
    """As when a peer gets its second reservation just after the first one."""
    async with Peers("memory") as peers:
        peers.network = MemoryNetwork(lambda source, target, size: 0.1)
        others = [await peers.start() for _ in range(3 * GREETINGS_AT_ONCE)]
        caller = await peers.start()
        for other in others:
            await serving(other)
            await stub(caller, other).rpc_square(Number(value=3))
        for _ in range(2):
            caller.outlook.announce_anew()
            await asyncio.sleep(0.05)
        moved = Multiaddr("/memory/999")
        caller.outlook.evidence.announcement = [moved]
        caller.outlook.announce_anew()
        await asyncio.sleep(10.0)
        assert [other.get_addresses(caller.peer_id) for other in others] == [[moved]] * len(others)


@in_virtual_time
async def test_who_has_moved_tells_all_it_had_connections_with() -> None:
    """Also if idle ones were ended before it was clear where it is now."""
    async with Peers("memory") as peers:
        witness, others = await peers.start(), [await peers.start() for _ in range(3)]
        caller = await peers.start()
        caller.outlook.note_stream(Elsewhere(witness))
        for other in others:
            await serving(other)
            await stub(caller, other).rpc_square(Number(value=3))
        assert caller.pool.idle_count == len(others)
        moved = Multiaddr("/memory/999")
        caller.outlook.evidence.announcement = [moved]
        assert caller.transport.on_addresses_changed is not None
        caller.transport.on_addresses_changed()
        await asyncio.sleep(1.0)
        assert [other.get_addresses(caller.peer_id) for other in others] == [[moved]] * len(others)


@in_virtual_time
async def test_who_meets_a_relay_first_tells_those_behind_relays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays are dialled directly. That must not hold for whatever such a dial brings about."""
    async with Relayed("memory") as peers:
        await peers.relay()
        guest, caller = await peers.guest(), await peers.start()
        monkeypatch.setattr(caller.transport, "is_inside", lambda address: False)
        caller.circuits.public_addresses = list  # so that it is not called in reverse
        tell(caller, guest)
        assert await square(caller, guest) == 9
        moved = Multiaddr("/memory/999")
        caller.outlook.evidence.announcement = [moved]
        await asyncio.sleep(5 * TICK_SECONDS)
        assert moved in guest.get_addresses(caller.peer_id)
