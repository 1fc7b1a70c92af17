"""Peers that are found at an address which does not say who is there; and private addresses of other networks."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.access.badges import ROLES_BY_NAME
from shoal.access.tokens import Token
from shoal.errors import BootstrapError, DialError, IdentityTakenError, P2PDaemonError
from shoal.net.own_addresses import OwnAddress, OwnAddresses
from shoal.net.pasted import short_form
from shoal.net.tcp.handshake import ALPN
from shoal.net.tcp.transport import TcpTransport
from shoal.p2p import P2P, Identity, Multiaddr
from tests.p2p.peers import Number, Peers, serving, stub, until


def short(p2p: P2P) -> str:
    [address] = p2p.get_addresses(p2p.peer_id)
    found = short_form(address)
    assert found is not None
    return found


async def test_the_peer_that_answers_is_one_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal.net.endpoint")
    async with Peers("tcp") as peers:
        first = await peers.start()
        await serving(first)
        second = await peers.start(initial_peers=f"'{short(first)}'\n")
        [address] = first.get_addresses(first.peer_id)
        assert second.met == {address: first.peer_id}
        assert (await stub(second, first).rpc_square(Number(value=3))).value == 9
        assert second.metrics.connections_dialled == 1, "the connection of the join is used"
        await second.meet(address)
        [line] = [each for each in caplog.messages if "its identity was not checked" in each]
        assert line.startswith(f"peer {first.peer_id} answers at {short(first)}; ")
        assert line.endswith(f"to pin it: {address}/p2p/{first.peer_id}")


async def test_where_to_listen_may_be_short_in_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOST_MADDRS", "'127.0.0.1:0', 127.0.0.2:0")
    async with Peers("tcp") as peers:
        p2p = await peers.start()
        assert [listener.address[0] for listener in p2p.transport.listeners] == ["127.0.0.1", "127.0.0.2"]


async def test_host_names_and_several_addresses() -> None:
    async with Peers("tcp") as peers:
        first = await peers.start()
        port = short(first).rpartition(":")[2]
        second = await peers.start(initial_peers=f"127.0.0.1:1, localhost:{port}")
        assert list(second.met.values()) == [first.peer_id]


async def test_each_short_address_has_its_verdict() -> None:
    with pytest.raises(BootstrapError) as error:
        await P2P.create(initial_peers="127.0.0.1:1 no-such-host.invalid:2")
    assert set(error.value.verdicts) == {"127.0.0.1:1", "no-such-host.invalid:2"}
    assert error.value.verdicts["127.0.0.1:1"].startswith("connection refused")
    assert "cannot be resolved" in error.value.verdicts["no-such-host.invalid:2"]


async def test_a_peer_whose_only_address_is_its_own_begins_a_swarm() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first = await P2P.create(initial_peers=f"127.0.0.1:{port}", host_maddrs=f"127.0.0.1:{port}")
    try:
        assert first.met == {}
        with pytest.raises(DialError, match="this is the address of this peer itself"):
            await first.meet(Multiaddr(f"/dns4/localhost/tcp/{port}"))
    finally:
        await first.shutdown()
    by_name = await P2P.create(initial_peers=f"localhost:{port}", host_maddrs=f"127.0.0.1:{port}")
    assert list(by_name.met.values()) == [by_name.peer_id]
    await by_name.shutdown()


async def test_a_taken_identity_is_noticed_at_a_short_address(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    async with Peers("tcp") as peers:
        owner = await peers.start(identity_path=path)
        with pytest.raises(IdentityTakenError, match=r"online at /ip4/127\.0\.0\.1/"):
            await P2P.create(initial_peers=short(owner), identity_path=path)


async def test_a_token_protects_from_strangers_at_a_short_address() -> None:
    run = Token.new_run("mine")
    guest = run.invite(ROLES_BY_NAME["train"], 2**33)
    async with Peers("tcp") as peers:
        stranger = await peers.start(token="")
        with pytest.raises(BootstrapError, match=f"peer {stranger.peer_id} is no member of the run"):
            await P2P.create(initial_peers=short(stranger), token=guest.text)
        member = await peers.start(token=run.text)
        joined = await peers.start(initial_peers=short(member), token=guest.text)
        assert list(joined.met.values()) == [member.peer_id]
        with pytest.raises(BootstrapError, match="takes part in a private run"):
            await P2P.create(initial_peers=short(member), token="")


@asynccontextmanager
async def other_tls_server(folder: Path) -> AsyncIterator[str]:
    """It speaks the protocol of peers by name, but has a key that no peer can have."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "other")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    valid = x509.load_pem_x509_certificate(Identity.generate().certificate_pem()[0])
    certificate = (
        builder.serial_number(1)
        .not_valid_before(valid.not_valid_before_utc)
        .not_valid_after(valid.not_valid_after_utc)
        .sign(key, hashes.SHA256())
    )
    pem, path = serialization.Encoding.PEM, folder / "other.pem"
    kept = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(kept + certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols([ALPN])
    context.load_cert_chain(path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_something_else_at_a_short_address(tmp_path: Path) -> None:
    async with other_tls_server(tmp_path) as address:
        with pytest.raises(BootstrapError, match="something else answers there: its key is no Ed25519 key"):
            await P2P.create(initial_peers=address)


async def test_a_meeting_that_is_given_up_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, and nobody ever answers
        address = Multiaddr(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}")
        p2p = await P2P.create()
        given_up, cut_short = (asyncio.create_task(p2p.meet(address)) for _ in range(2))
        await until(lambda: len(p2p.dialler.tasks) == 2)
        given_up.cancel()
        await until(lambda: len(p2p.dialler.tasks) == 1)
        await p2p.shutdown()
        with pytest.raises(P2PDaemonError, match="this peer is shut down"):
            await cut_short
        assert given_up.cancelled()
        assert not p2p.dialler.tasks
        with pytest.raises(P2PDaemonError, match="this peer is shut down"):
            await p2p.meet(address)


async def test_a_trusted_relay_may_be_given_by_a_short_address() -> None:
    async with Peers("tcp") as peers:
        relay = await peers.start(relay=True, force_reachability="public")
        guest = await peers.start(trusted_relays=[short(relay)], force_reachability="private")
        await until(lambda: relay.peer_id in guest.reservations.held)


async def test_a_trusted_relay_that_comes_later_under_another_identity() -> None:
    """An address stands for whatever relay is there."""
    async with Peers("tcp") as peers:
        relay = await peers.start(relay=True, force_reachability="public")
        address = short(relay)
        await relay.shutdown()
        guest = await peers.start(trusted_relays=address, force_reachability="private")
        await until(lambda: bool(guest.metrics.dials_failed))
        await relay.shutdown()
        later = await peers.start(relay=True, force_reachability="public", host_maddrs=address)
        await until(lambda: later.peer_id in guest.reservations.held)


# --- private addresses of other networks ------------------------------------------------------------------------------


LAPTOP = Multiaddr("/ip4/192.168.77.11/tcp/40123")


def machine(*networks: str) -> OwnAddresses:
    found = [OwnAddress(text.partition("/")[0], 1, int(text.partition("/")[2])) for text in networks]
    own = OwnAddresses(lambda: found)
    own.look(0.0)
    return own


@pytest.mark.parametrize(
    ("ip", "networks", "is_elsewhere"),
    [
        ("192.168.77.11", ["203.0.113.7/24"], True),
        ("192.168.77.11", ["192.168.1.5/24"], True),
        ("192.168.77.11", ["192.168.77.5/24"], False),
        ("192.168.77.11", ["192.168.1.5/16"], False),
        ("10.1.2.3", ["203.0.113.7/24"], True),
        ("172.31.0.1", ["172.17.0.1/16"], True),
        ("100.64.0.9", ["203.0.113.7/24"], True),
        ("100.64.0.9", ["100.101.102.103/32"], False),  # a VPN, whose addresses have no network
        ("169.254.1.2", ["203.0.113.7/24"], True),
        ("fd00::1", ["2001:db8::7/64"], True),
        ("fd00::1", ["fd00::7/64"], False),
        ("203.0.113.9", ["192.168.1.5/24"], False),
        ("8.8.8.8", ["192.168.1.5/24"], False),
        ("127.0.0.1", ["192.168.1.5/24"], False),
    ],
)
def test_which_addresses_are_those_of_another_network(ip: str, networks: list[str], is_elsewhere: bool) -> None:
    assert machine("127.0.0.1/8", *networks).is_elsewhere(ip) is is_elsewhere


class Server:
    """A peer on a machine with these networks, of which nothing but what it says about addresses is of interest."""

    def __init__(self, *networks: str, **options: object) -> None:
        self.networks, self.options = networks, options

    async def advice_on(self, address: Multiaddr) -> str:
        transport = TcpTransport(Identity.generate(), machine=machine("127.0.0.1/8", *self.networks))
        p2p = await P2P.create(transport=transport, nat_port_map=False, **self.options)  # type: ignore[arg-type]
        try:
            return p2p.advise(address)
        finally:
            await p2p.shutdown()


async def test_a_private_address_of_another_network_comes_with_the_address_to_give_instead() -> None:
    what = ". 192.168.77.11 is a private address of another network: let that machine join this one instead"
    server = Server("203.0.113.7/24", host_maddrs="0.0.0.0:0", announce_maddrs="203.0.113.7:31337")
    assert await server.advice_on(LAPTOP) == (
        f"{what}. Start this one without that address, and give 203.0.113.7:31337 to that machine"
    )
    server = Server("203.0.113.7/24", host_maddrs="0.0.0.0:0")
    assert (await server.advice_on(LAPTOP)).endswith(" and give 203.0.113.7:PORT to that machine")
    at_home = await Server("192.168.1.5/24", host_maddrs="0.0.0.0:0").advice_on(LAPTOP)
    assert at_home.startswith(f"{what}, if this one has a public address, which its own interfaces do not show;")
    assert "run `shoal dht` on a machine that has one" in at_home
    client = await Server("203.0.113.7/24", client_mode=True).advice_on(LAPTOP)
    assert client.endswith("run `shoal dht` on a machine that both can call, and give its address to both")
    assert not await Server("192.168.77.5/24").advice_on(LAPTOP)
    assert not await Server("203.0.113.7/24").advice_on(Multiaddr("/dns/example.org/tcp/1"))


async def test_the_error_of_a_join_has_that_advice_for_private_addresses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr("shoal.net.tcp.transport.connect", refuse)
    transport = TcpTransport(Identity.generate(), machine=machine("127.0.0.1/8", "203.0.113.7/24"))
    peer = Identity.generate().peer_id
    with pytest.raises(BootstrapError) as error:
        await P2P.create(
            [f"{LAPTOP}/p2p/{peer}", "10.9.9.9:31337", "203.0.113.8:31337"],
            transport=transport,
            host_maddrs="0.0.0.0:0",
            nat_port_map=False,
        )
    verdicts = error.value.verdicts
    assert list(verdicts) == [f"{LAPTOP}/p2p/{peer}", "10.9.9.9:31337", "203.0.113.8:31337"]
    for ip, verdict in zip(["192.168.77.11", "10.9.9.9"], verdicts.values(), strict=False):
        assert verdict.startswith("no route to that host")
        assert f". {ip} is a private address of another network: let that machine join this one instead. " in verdict
    assert "private" not in verdicts["203.0.113.8:31337"]
