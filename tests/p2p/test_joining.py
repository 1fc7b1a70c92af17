"""Starting a peer: initial peers, verdicts on addresses that do not work, addresses, and identities in use."""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from pathlib import Path

import pytest

from shoal.dht import DHTNode
from shoal.errors import BootstrapError, IdentityTakenError, InterruptedDialError, P2PDaemonError, ValidationError
from shoal.net.addresses import MAX_ADDRESSES_PER_PEER, AddressBook
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import Stream
from shoal.p2p import P2P, Identity, Multiaddr, PeerID, PeerInfo
from shoal.p2p.joining import DIAL_ATTEMPTS, explain_unreachable, reach_first
from shoal.reach.reachability import Reachability
from tests.p2p.peers import Number, Peers, assert_clean, serving, stub, until

STRANGER = Identity.generate().peer_id


async def test_one_of_several_initial_peers_is_enough() -> None:
    async with Peers("tcp") as peers:
        first = await peers.start()
        await serving(first)
        [good] = await first.get_visible_maddrs()
        joined = await peers.start(initial_peers=[f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}", good])
        assert (await stub(joined, first).rpc_square(Number(value=2))).value == 4
        assert_clean(first, joined)


async def test_each_address_has_its_verdict() -> None:
    """Also two addresses of the same peer."""
    async with Peers("tcp") as peers:
        other = await peers.start()
        [address] = other.get_addresses(other.peer_id)
        dead, wrong = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}", f"{address}/p2p/{STRANGER}"
        unresolved = f"/dns4/no-such-host.invalid/tcp/1/p2p/{STRANGER}"
        with pytest.raises(BootstrapError, match="failed to connect to bootstrap peers") as error:
            await P2P.create(initial_peers=[dead, wrong, unresolved])
        verdicts = error.value.verdicts
        assert set(verdicts) == {dead, wrong, unresolved}
        assert verdicts[dead].startswith("connection refused")
        assert verdicts[wrong].startswith(f"wrong identity: peer {other.peer_id} answers there")
        assert "cannot be resolved" in verdicts[unresolved]


async def test_an_initial_peer_with_another_identity_is_reported_though_others_let_this_one_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Peers("tcp") as peers:
        first = await DHTNode.create(p2p=await peers.start())
        [good] = await first.get_visible_maddrs()
        wrong = f"{good.decapsulate(f'/p2p/{first.peer_id}')}/p2p/{STRANGER}"
        node = await DHTNode.create(initial_peers=[good, wrong])
        await until(lambda: bool(caplog.messages))
        [line] = caplog.messages
        assert line.startswith("an initial peer is not the expected one: /ip4/127.0.0.1/tcp/")
        assert f"peer {first.peer_id} answers there, not {STRANGER}" in line
        await node.shutdown()
        await first.shutdown()


async def test_a_taken_identity_whose_owner_is_the_only_initial_peer(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    async with Peers("tcp") as peers:
        owner = await peers.start(identity_path=path)
        addresses = await owner.get_visible_maddrs()
        with pytest.raises(P2PDaemonError, match=f"{owner.peer_id} is already taken .* online at /ip4/127.0.0.1/"):
            await P2P.create(initial_peers=addresses, identity_path=path)
        with pytest.raises(P2PDaemonError, match="is already taken"):
            await DHTNode.create(initial_peers=addresses, identity_path=path)
        await owner.shutdown()
        again = await peers.start(initial_peers=addresses, identity_path=path)
        assert again.peer_id == owner.peer_id, "nobody has it any more"


async def test_time_limit_of_a_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, and nobody ever answers
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"
        with pytest.raises(BootstrapError) as error:
            await P2P.create(initial_peers=[address], startup_timeout=0.2)
    assert error.value.verdicts == {address: "no answer within 0.2 s"}


@pytest.mark.parametrize("kind", ["tcp", "memory"])
async def test_visible_addresses(kind: str) -> None:
    async with Peers(kind) as peers:
        first, second = await peers.two()
        [visible] = await first.get_visible_maddrs()
        assert visible["p2p"] == str(first.peer_id)
        assert second.get_addresses(first.peer_id) == first.get_addresses(first.peer_id)
        assert await second.list_peers() == [PeerInfo(first.peer_id, first.get_addresses(first.peer_id))]


@pytest.mark.parametrize("client_mode", [False, True])
async def test_who_was_called_knows_who_has_called(client_mode: bool) -> None:
    async with Peers("tcp") as peers:
        first = await peers.start()
        second = await peers.start(initial_peers=await first.get_visible_maddrs(), client_mode=client_mode)
        await until(lambda: bool(first.server.peers))
        await first.wait_for_at_least_n_peers(1)
        assert [info.peer_id for info in await first.list_peers()] == [second.peer_id]
        with pytest.raises(P2PDaemonError, match="no handler"):
            await stub(second, first).rpc_square(Number(value=1))  # its greeting tells where it listens
        addresses = second.get_addresses(second.peer_id)
        assert await first.list_peers() == [PeerInfo(second.peer_id, addresses)]
        assert bool(addresses) is not client_mode
        await second.shutdown()
        await until(lambda: not first.server.peers)
        assert len(await first.list_peers()) == bool(addresses), "whose address is known may be called again"


async def test_announced_addresses() -> None:
    p2p = await P2P.create(announce_maddrs=["/ip4/203.0.113.7/tcp/31337"])
    assert [str(each) for each in await p2p.get_visible_maddrs()] == [f"/ip4/203.0.113.7/tcp/31337/p2p/{p2p.peer_id}"]
    await p2p.shutdown()
    with pytest.raises(ValueError, match="others need a real port"):
        await P2P.create(announce_maddrs=["/ip4/203.0.113.7/tcp/0"])
    with pytest.raises(ValueError, match="no peer knows the protocol 'tpc'"):
        await P2P.create(announce_maddrs=["/ip4/203.0.113.7/tpc/31337"])


async def test_identity_in_use_where_it_listens(tmp_path: Path) -> None:
    async with Peers("tcp") as peers:
        witness = await peers.start()
        path, addresses = tmp_path / "id", await witness.get_visible_maddrs()
        first = await peers.start(initial_peers=addresses, identity_path=path)
        await serving(witness)
        await stub(first, witness).rpc_square(Number(value=1))  # its greeting tells where it listens
        with pytest.raises(P2PDaemonError, match=r"already taken by another peer, which is online .*(at|connected)"):
            await P2P.create(initial_peers=addresses, identity_path=path)
        second = await peers.start(initial_peers=addresses, identity_path=path, check_if_identity_free=False)
        assert second.peer_id == first.peer_id


async def test_asking_whether_an_identity_is_taken(tmp_path: Path) -> None:
    async with Peers("tcp") as peers:
        witness = await peers.start()
        await serving(witness)
        path, addresses = tmp_path / "id", await witness.get_visible_maddrs()
        with pytest.raises(FileNotFoundError, match="there is no identity in"):
            await P2P.is_identity_taken(path, initial_peers=addresses)
        P2P.generate_identity(path)
        assert not await P2P.is_identity_taken(path, initial_peers=addresses)
        first = await peers.start(initial_peers=addresses, identity_path=path)
        assert first.peer_id == Identity.load_or_create(path).peer_id
        await stub(first, witness).rpc_square(Number(value=1))
        assert await P2P.is_identity_taken(path, initial_peers=addresses)
        with pytest.raises(IdentityTakenError, match="already taken by another peer"):
            await P2P.create(addresses, identity_path=path)
        await first.shutdown()
        assert not await P2P.is_identity_taken(path, initial_peers=addresses)
        with pytest.raises(FileExistsError):
            P2P.generate_identity(path)
        P2P.generate_identity(str(tmp_path / "other"))
        assert not await P2P.is_identity_taken(str(tmp_path / "other"), initial_peers=addresses)


async def test_identity_in_use_by_a_client(tmp_path: Path) -> None:
    async with Peers("tcp") as peers:
        witness = await peers.start()
        await serving(witness)
        path, addresses = tmp_path / "id", await witness.get_visible_maddrs()
        client = await peers.start(initial_peers=addresses, identity_path=path, client_mode=True)
        await stub(client, witness).rpc_square(Number(value=1))
        with pytest.raises(P2PDaemonError, match="and connected to peer"):
            await P2P.create(initial_peers=addresses, identity_path=path)


async def test_identity_that_is_free_again(tmp_path: Path) -> None:
    """After a restart the witness still knows the old address, where nobody answers any more."""
    async with Peers("tcp") as peers:
        witness = await peers.start()
        await serving(witness)
        path, addresses = tmp_path / "id", await witness.get_visible_maddrs()
        for _ in range(3):
            p2p = await P2P.create(initial_peers=addresses, identity_path=path)
            await stub_of(p2p, witness)
            assert witness.get_addresses(p2p.peer_id) == p2p.get_addresses(p2p.peer_id)
            await p2p.shutdown()
            await until(lambda: witness.server.connection_count == 0)


async def stub_of(caller: P2P, server: P2P) -> None:
    assert (await stub(caller, server).rpc_square(Number(value=2))).value == 4


def test_hearsay_does_not_push_out_what_is_certain() -> None:
    book = AddressBook()
    good = Multiaddr("/ip4/192.0.2.1/tcp/1")
    book.replace(STRANGER, [good])
    for port in range(1, 100):
        book.add(STRANGER, [f"/ip4/198.51.100.1/tcp/{port}"])
    known = book.get(STRANGER)
    assert known[0] == good
    assert len(known) == MAX_ADDRESSES_PER_PEER
    assert str(known[-1]).endswith("/99"), "newer hearsay takes the place of older"
    book.prefer(STRANGER, known[-1])
    assert book.get(STRANGER)[:2] == [known[-1], good]
    book.replace(STRANGER, ["/ip4/192.0.2.2/tcp/2", "/ip4/nonsense/tcp/1", "/a-newer-kind/1"])
    assert [str(each) for each in book.get(STRANGER)] == ["/ip4/192.0.2.2/tcp/2", "/a-newer-kind/1"]


def test_who_announces_only_what_this_version_cannot_dial_stays_where_it_was() -> None:
    book, newer = AddressBook(lambda address: "tcp" in address), ["/a-newer-kind/1", "/another/2"]
    book.replace(STRANGER, ["/ip4/nonsense/tcp/1"])
    assert STRANGER not in book
    book.replace(STRANGER, ["/ip4/192.0.2.1/tcp/1"])
    book.add(STRANGER, ["/ip4/198.51.100.1/tcp/1"])
    for _ in range(2):
        book.replace(STRANGER, [*newer, "/ip4/nonsense/tcp/1"])
        known = [str(each) for each in book.get(STRANGER)]
        assert known == ["/ip4/192.0.2.1/tcp/1", "/ip4/198.51.100.1/tcp/1", *newer], "others may know them"
    assert book.changes == 3
    book.replace(STRANGER, ["/a-newer-kind/1", "/ip4/192.0.2.2/tcp/2"])
    assert [str(each) for each in book.get(STRANGER)] == ["/a-newer-kind/1", "/ip4/192.0.2.2/tcp/2"]
    book.replace(STRANGER, ["/ip4/nonsense/tcp/1"])
    assert len(book.get(STRANGER)) == 1
    book.replace(STRANGER, [f"/a-newer-kind/{number}" for number in range(20)])
    assert len(book.get(STRANGER)) == MAX_ADDRESSES_PER_PEER
    assert str(book.get(STRANGER)[0]) == "/ip4/192.0.2.2/tcp/2"


def test_a_book_counts_its_changes() -> None:
    book, addresses = AddressBook(), ["/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/2"]
    counts = []
    for change in (
        lambda: book.replace(STRANGER, addresses),
        lambda: book.replace(STRANGER, addresses),
        lambda: book.add(STRANGER, addresses),
        lambda: book.prefer(STRANGER, Multiaddr(addresses[0])),
        lambda: book.prefer(STRANGER, Multiaddr(addresses[1])),
        lambda: book.replace(STRANGER, addresses),
        lambda: book.add(STRANGER, ["/ip4/192.0.2.3/tcp/3"]),
        lambda: book.replace(STRANGER, addresses),
    ):
        change()
        counts.append(book.changes)
    assert counts == [1, 1, 1, 1, 2, 3, 4, 5]


# --- connections that break -------------------------------------------------------------------------------------------


class Relay:
    """Passes connections on to a peer, but breaks the first few of them in the middle of the handshake."""

    def __init__(self, peer: P2P, broken: int) -> None:
        self.peer = peer
        self.left_to_break = broken
        self.arrived = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"/ip4/127.0.0.1/tcp/{self.server.sockets[0].getsockname()[1]}/p2p/{self.peer.peer_id}"

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.arrived += 1
        first = await reader.read(64)
        if self.left_to_break:
            self.left_to_break -= 1
            writer.transport.abort()
            return
        [address] = self.peer.get_addresses(self.peer.peer_id)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", int(address["tcp"] or 0))
        there_writer.write(first)
        for source, target in ((reader, there_writer), (there_reader, writer)):
            self._tasks.append(asyncio.ensure_future(self._pump(source, target)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        except ConnectionError:
            return
        finally:
            target.transport.abort()


@pytest.mark.parametrize("broken", [1, DIAL_ATTEMPTS - 1])
async def test_a_start_dials_again_when_connections_break(broken: int) -> None:
    async with Peers("tcp") as peers:
        server = await peers.start()
        await serving(server)
        relay = Relay(server, broken)
        async with relay as address:
            joined = await peers.start(initial_peers=[address])
            assert (await stub(joined, server).rpc_square(Number(value=3))).value == 9
        assert relay.left_to_break == 0
        assert relay.arrived >= broken + 1


async def test_a_start_gives_up_when_connections_go_on_breaking() -> None:
    async with Peers("tcp") as peers:
        relay = Relay(await peers.start(), broken=1000)
        async with relay as address:
            with pytest.raises(BootstrapError) as error:
                await P2P.create(initial_peers=[address])
        assert relay.arrived == DIAL_ATTEMPTS
        assert "closed during the handshake" in error.value.verdicts[address]


async def test_the_last_thing_that_went_wrong_is_told_when_time_is_over() -> None:
    """Also if at that moment another attempt is under way."""
    loop = asyncio.get_running_loop()
    tried = asyncio.Event()

    async def reach(address: Multiaddr, peer: PeerID | None) -> None:
        if tried.is_set():
            await loop.create_future()
        tried.set()
        raise InterruptedDialError(f"{address}: it broke")

    address = Multiaddr("/ip4/192.0.2.1/tcp/1")
    with pytest.raises(BootstrapError) as error:
        await reach_first([(address, STRANGER)], reach, 0.3)
    assert error.value.verdicts == {f"{address}/p2p/{STRANGER}": "it broke"}


@pytest.mark.skipif(sys.platform != "linux", reason="where no route leads is up to the system")
async def test_no_route() -> None:
    address = f"/ip4/255.255.255.255/tcp/1/p2p/{STRANGER}"
    with pytest.raises(BootstrapError) as error:
        await P2P.create(initial_peers=[address])
    assert error.value.verdicts[address].startswith("no route to that host")


async def test_what_is_refused_is_dialled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = []
    dial = TcpTransport.dial

    async def count(self: TcpTransport, address: Multiaddr, peer: PeerID) -> Stream:
        dialled.append(address)
        return await dial(self, address, peer)

    monkeypatch.setattr(TcpTransport, "dial", count)
    with pytest.raises(BootstrapError, match="refused"):
        await P2P.create(initial_peers=[f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"])
    assert len(dialled) == 1


async def test_retries_keep_to_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Peers("tcp") as peers:
        relay = Relay(await peers.start(), broken=1000)
        async with relay as address:
            with pytest.raises(BootstrapError) as error:
                await P2P.create(initial_peers=[address], startup_timeout=0.05)
        assert relay.arrived < DIAL_ATTEMPTS
        [verdict] = error.value.verdicts.values()
        assert verdict.startswith(("no answer within 0.05 s", "the connection was closed"))


# --- peers that cannot be dialled back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("announced", "seen_at", "words"),
    [
        (["/ip4/203.0.113.7/tcp/5"], "", "open the port in the firewall"),
        (["/ip4/203.0.113.7/tcp/5"], "/ip4/203.0.113.7/tcp/40000", "open the port in the firewall"),
        (["/ip4/127.0.0.1/tcp/5"], "/ip4/192.168.1.9/tcp/40000", "listen on all addresses, /ip4/0.0.0.0/tcp/0"),
        (["/ip4/192.168.1.9/tcp/5"], "/ip4/8.8.8.8/tcp/40000", "forward port 5 there and announce /ip4/8.8.8.8/tcp/5"),
        (["/ip4/9.9.9.9/tcp/5"], "/ip4/8.8.8.8/tcp/40000", "announce /ip4/8.8.8.8/tcp/5"),
        (["/ip6/fd00::1/tcp/5"], "/ip6/2606:4700::1/tcp/40000", "announce /ip6/2606:4700::1/tcp/5"),
        (["/dns4/example.org/tcp/5"], "nonsense from a stranger", "open the port in the firewall"),
        ([], "/ip4/8.8.8.8/tcp/40000", "/tcp/0"),
    ],
)
def test_what_to_do_when_nobody_can_call_back(announced: list[str], seen_at: str, words: str) -> None:
    what, advice = explain_unreachable(STRANGER, announced, seen_at)
    assert what.startswith(f"cannot be dialled back: peer {STRANGER} cannot call this node back at ")
    assert all(address in what for address in announced)
    assert words in advice
    assert "`shoal dht`" in advice


async def test_a_node_that_cannot_be_dialled_back_over_tcp(caplog: pytest.LogCaptureFixture) -> None:
    async with Peers("tcp") as peers:
        first = await DHTNode.create(p2p=await peers.start())
        [address] = await first.get_visible_maddrs()
        wrong = {"initial_peers": [address], "announce_maddrs": ["/ip4/127.0.0.2/tcp/1"]}
        guest = await DHTNode.create(**wrong)
        assert guest.p2p.reachability is Reachability.RELAYED
        assert guest.protocol.is_node
        assert "others cannot dial this peer at /ip4/127.0.0.2/tcp/1" in caplog.text
        assert "nobody can call this peer" not in caplog.text
        third = await DHTNode.create(initial_peers=[address])
        assert await third.protocol.call_ping(guest.peer_id) == guest.node_id
        await third.shutdown()
        await guest.shutdown()
        first.p2p.relay.wanted = False
        client = await DHTNode.create(**wrong)
        assert client.p2p.reachability is Reachability.CLIENT
        assert not client.protocol.is_node
        assert "nobody can call this peer" in caplog.text
        await client.shutdown()
        with pytest.raises(ValidationError, match="cannot be dialled back") as error:
            await DHTNode.create(**wrong, force_reachability="public")
        verdict = error.value.verdicts[str(address)]
        assert "/ip4/127.0.0.2/tcp/1" in verdict
        assert str(address) in str(error.value)
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
        client = await DHTNode.create(initial_peers=[address], client_mode=True)
        await client.shutdown()
        await first.shutdown()
