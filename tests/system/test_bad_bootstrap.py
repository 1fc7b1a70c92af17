"""A peer that cannot join must say so soon, and say which address failed and why."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal import DHT
from shoal.errors import BootstrapError
from shoal.p2p import Identity

TIME_LIMIT_SECONDS = 10.0
STRANGER = str(Identity.generate().peer_id)


@contextmanager
def server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens here and is no shoal peer; gives an address that claims it is one."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, ExitStack() as connections:

        def serve() -> None:
            while True:
                try:
                    connection = connections.enter_context(listener.accept()[0])
                except OSError:
                    return  # the test is over
                threading.Thread(target=serve_one, args=(connection,), name="one connection").start()

        def serve_one(connection: socket.socket) -> None:
            try:
                behave(connection)
                while connection.recv(65536):
                    pass
            except OSError:
                pass  # the peer went away, which is what it should do

        thread = threading.Thread(target=serve, name="not a peer")
        thread.start()
        try:
            yield f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{STRANGER}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def silent(connection: socket.socket) -> None:
    """Takes what it gets and never answers."""


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\nwhat do you mean?\r\n" * 100)


def hangs_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def other_tls(tmp_path: Path, chatty: bool) -> Callable[[socket.socket], None]:
    """A web server, for example: it speaks TLS, but with a certificate that belongs to no peer."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "www.example.org")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "server.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)

    def behave(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as encrypted:
            if chatty:
                encrypted.sendall(b"220 mail.example.org ESMTP\r\n" * 10)
            while encrypted.recv(65536):
                pass

    return behave


@pytest.fixture(params=["silent", "garbage", "hangs up", "silent TLS server", "chatty TLS server"])
def not_a_peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    behaviours = {"silent": silent, "garbage": garbage, "hangs up": hangs_up}
    behave = behaviours.get(request.param) or other_tls(tmp_path, chatty=request.param.startswith("chatty"))
    with server(behave) as address:
        yield address


@pytest.fixture
def full_backlog() -> Iterator[str]:
    """A host that does not answer at all: its queue of connections is full, so that the kernel drops what comes."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as listener, ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(closing(socket.socket()))
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{STRANGER}"


@pytest.fixture
def dead_port() -> Iterator[str]:
    with socket.socket() as silent:  # which has the port, so that nobody else gets it, but does not listen
        silent.bind(("127.0.0.1", 0))
        yield f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"


def join(addresses: list[str]) -> BootstrapError:
    began = time.monotonic()
    with pytest.raises(BootstrapError, match="failed to connect to bootstrap peers") as error:
        DHT(initial_peers=addresses, start=True).shutdown()
    took = time.monotonic() - began
    assert took < TIME_LIMIT_SECONDS, f"took {took:.1f} s"
    return error.value


def check_verdicts(addresses: list[str]) -> dict[str, str]:
    """Every address is named in the text, with a cause of its own."""
    error = join(addresses)
    assert set(error.verdicts) == set(addresses)
    for address, cause in error.verdicts.items():
        assert address in str(error)
        assert cause in str(error)
        assert len(cause) > 5
        assert "Error(" not in cause, "the cause must be words, not a representation"
    return error.verdicts


def test_dead_port(dead_port: str) -> None:
    assert "refused" in check_verdicts([dead_port])[dead_port].lower()


def test_host_that_does_not_answer(full_backlog: str) -> None:
    cause = check_verdicts([full_backlog])[full_backlog]
    assert any(word in cause for word in ("timed out", "no answer", "within", "did not answer")), cause


def test_port_where_something_else_answers(not_a_peer: str) -> None:
    check_verdicts([not_a_peer])


def test_wrong_peer_id() -> None:
    other = DHT(start=True)
    try:
        own_address = str(other.get_visible_maddrs()[0])
        wrong = own_address.replace(str(other.peer_id), STRANGER)
        cause = check_verdicts([wrong])[wrong]
        assert str(other.peer_id) in cause, "the cause must name the peer that answered"
    finally:
        other.shutdown()


def test_unknown_host_name() -> None:
    address = f"/dns4/no-such-host.invalid/tcp/31337/p2p/{STRANGER}"
    assert "no-such-host.invalid" in str(join([address]))


def test_all_addresses_fail_each_with_its_cause(dead_port: str, full_backlog: str) -> None:
    other = DHT(start=True)
    try:
        wrong = str(other.get_visible_maddrs()[0]).replace(str(other.peer_id), str(Identity.generate().peer_id))
        with server(garbage) as strange:
            verdicts = check_verdicts([dead_port, full_backlog, strange, wrong])
        assert "refused" in verdicts[dead_port].lower()
        assert str(other.peer_id) in verdicts[wrong]
    finally:
        other.shutdown()


def test_one_good_address_is_enough(dead_port: str, full_backlog: str) -> None:
    first = DHT(start=True)
    try:
        began = time.monotonic()
        second = DHT(initial_peers=[dead_port, full_backlog, str(first.get_visible_maddrs()[0])], start=True)
        assert time.monotonic() - began < TIME_LIMIT_SECONDS
        assert second.store("key", "value", time.time() + 30)
        found = first.get("key", latest=True)
        assert found is not None
        assert found.value == "value"
        second.shutdown()
    finally:
        first.shutdown()


@pytest.mark.parametrize(
    "address",
    [
        "not-an-address",
        "",
        "/ip4/300.0.0.1/tcp/31337/p2p/" + STRANGER,
        "/ip4/127.0.0.1/tcp/99999/p2p/" + STRANGER,
        "/ip4/127.0.0.1/tcp/31337",
        "/ip4/127.0.0.1/tcp/31337/p2p/notapeer",
        "/ip4/127.0.0.1/p2p/" + STRANGER,
    ],
    ids=lambda address: address.replace(STRANGER, "<peer>"),
)
def test_not_a_multiaddr_of_a_peer(address: str) -> None:
    began = time.monotonic()
    with pytest.raises((ValueError, BootstrapError)) as error:
        DHT(initial_peers=[address], start=True).shutdown()
    assert time.monotonic() - began < TIME_LIMIT_SECONDS
    assert repr(address) in str(error.value) or (address and address in str(error.value)), error.value


@pytest.mark.parametrize("peers", [[31337], 31337, [None]], ids=range(3))
def test_not_a_list_of_addresses(peers: object) -> None:
    with pytest.raises(TypeError, match="initial_peers"):
        DHT(initial_peers=peers, start=True).shutdown()  # type: ignore[arg-type]
