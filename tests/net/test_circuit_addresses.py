"""Addresses that lead through a relay: whose they are, where the relay is, and that nothing takes them for direct."""

from __future__ import annotations

import pytest

from shoal.base.logs import use_hivemind_log_handler
from shoal.errors import DialError, RefusedDialError
from shoal.net.addresses import AddressBook, host_of, is_loopback, what_to_do
from shoal.net.own_addresses import log_visible_maddrs
from shoal.p2p import Identity, Multiaddr
from shoal.p2p.joining import explain_unreachable, parse_peer_addresses
from shoal.peers.identity import circuit_address, is_circuit, relay_of, split_peer_address

RELAY, TARGET, OTHER = (Identity.generate().peer_id for _ in range(3))
PLACE = Multiaddr("/ip4/198.51.100.1/tcp/31337")
CIRCUIT = Multiaddr(f"{PLACE}/p2p/{RELAY}/p2p-circuit")
FULL = Multiaddr(f"{CIRCUIT}/p2p/{TARGET}")
NESTED = f"{CIRCUIT}/p2p/{OTHER}/p2p-circuit"


def test_a_circuit_names_its_relay_first_and_its_target_last() -> None:
    assert FULL.get("p2p") == FULL["p2p"] == str(RELAY)
    assert split_peer_address(FULL) == (CIRCUIT, TARGET)
    assert relay_of(CIRCUIT) == (PLACE, RELAY)
    assert circuit_address(PLACE, RELAY) == CIRCUIT
    assert is_circuit(CIRCUIT)
    assert not is_circuit(PLACE)
    assert Multiaddr(FULL.to_bytes()) == FULL


@pytest.mark.parametrize(
    "address",
    [
        str(PLACE),
        f"{PLACE}/p2p/{RELAY}",
        str(FULL),
        f"{PLACE}/p2p-circuit",
        f"/p2p/{RELAY}/p2p-circuit",
        f"{CIRCUIT}/tls",
        NESTED,
        f"{PLACE}/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N/p2p-circuit",
    ],
    ids=range(8),
)
def test_anything_else_has_no_relay(address: str) -> None:
    assert relay_of(Multiaddr(address)) is None


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        (f"{NESTED}/p2p/{TARGET}", "more than one relay"),
        (f"{PLACE}/p2p/{TARGET}/p2p-circuit/p2p/{TARGET}", "through that peer itself"),
    ],
    ids=["nested", "through itself"],
)
def test_circuits_that_cannot_be_are_refused(address: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        split_peer_address(Multiaddr(address))
    book = AddressBook()
    with pytest.raises(ValueError, match=complaint):
        book.add(TARGET, [address])
    book.replace(TARGET, [address])
    assert TARGET not in book


def test_the_book_takes_circuits_with_and_without_their_target() -> None:
    book = AddressBook()
    book.add(TARGET, [FULL, str(CIRCUIT), CIRCUIT, PLACE])
    assert book.get(TARGET) == [CIRCUIT, PLACE]
    with pytest.raises(ValueError, match=f"is not an address of peer {OTHER}"):
        book.add(OTHER, [FULL])
    book.forget(TARGET, CIRCUIT)
    book.forget(TARGET, CIRCUIT)
    assert book.get(TARGET) == [PLACE]
    changes = book.changes
    book.forget(TARGET, PLACE)
    assert TARGET not in book
    assert book.changes == changes + 1


def test_the_host_of_a_relay_is_not_that_of_its_guests() -> None:
    through_public = Multiaddr(f"/ip4/8.8.8.8/tcp/1/p2p/{RELAY}/p2p-circuit")
    assert host_of(TARGET, [through_public]) == TARGET
    assert host_of(TARGET, [through_public, Multiaddr("/ip4/9.9.9.9/tcp/1")]) == "9.9.9.0/24"
    assert not is_loopback(Multiaddr(f"/ip4/127.0.0.1/tcp/1/p2p/{RELAY}/p2p-circuit"))
    assert "31337" not in what_to_do([CIRCUIT])
    assert "which is this machine alone" not in explain_unreachable(OTHER, [str(CIRCUIT)], "/ip4/9.9.9.9/tcp/5")[0]


def test_the_host_of_a_peer_changes_with_its_addresses() -> None:
    book, public, another = AddressBook(), Multiaddr("/ip4/8.8.8.8/tcp/1"), Multiaddr("/ip4/9.9.9.9/tcp/1")
    assert book.host_of(TARGET) == TARGET
    book.add(TARGET, [PLACE])
    assert book.host_of(TARGET) == book.host_of(TARGET) == TARGET
    book.add(TARGET, [public, another])
    assert book.host_of(TARGET) == "8.8.8.0/24"
    book.prefer(TARGET, another)
    assert book.host_of(TARGET) == "9.9.9.0/24"
    book.forget(TARGET, another)
    assert book.host_of(TARGET) == "8.8.8.0/24"
    book.replace(TARGET, [another])
    assert book.host_of(TARGET) == "9.9.9.0/24"


@pytest.mark.parametrize(
    ("address", "answered_at", "is_gone"),
    [
        ("/ip4/192.168.1.2/tcp/5", None, False),
        ("/ip4/192.168.1.2/tcp/5", f"/ip4/192.168.1.3/tcp/5/p2p/{RELAY}/p2p-circuit", False),
        ("/ip4/192.168.1.2/tcp/5", "/ip4/192.168.1.2/tcp/5", True),
        ("/ip6/fd00::2/tcp/5", "/ip4/192.168.1.2/tcp/5", True),
        ("/ip4/127.0.0.1/tcp/5", None, True),
        ("/ip4/9.9.9.9/tcp/5", None, True),
    ],
    ids=["never", "by a relay", "itself", "elsewhere in it", "this machine", "public"],
)
def test_a_refusal_in_a_private_network_may_come_from_somebody_else(
    address: str, answered_at: str | None, is_gone: bool
) -> None:
    """A router of a home has forgotten its connections: no relay knows the peer there, and its private address is here,
    too. That does not mean that it is dead."""
    book = AddressBook()
    if answered_at is not None:
        book.prefer(TARGET, Multiaddr(answered_at))
    refusal = RefusedDialError("connection refused")
    judged = book.judged(TARGET, Multiaddr(address), refusal)
    assert isinstance(judged, RefusedDialError) is is_gone
    assert isinstance(judged, DialError)
    assert "connection refused" in str(judged)
    timeout = TimeoutError()
    assert book.judged(TARGET, Multiaddr(address), timeout) is timeout


def test_an_initial_peer_behind_a_relay_stands_for_the_relay_too() -> None:
    direct = Multiaddr(f"{PLACE}/p2p/{RELAY}")
    assert parse_peer_addresses([FULL]) == [(CIRCUIT, TARGET), (PLACE, RELAY)]
    assert parse_peer_addresses([direct, str(FULL)]) == [(PLACE, RELAY), (CIRCUIT, TARGET)]


def test_users_are_told_their_own_id_and_not_that_of_the_relay(caplog: pytest.LogCaptureFixture) -> None:
    use_hivemind_log_handler("nowhere")  # to pytest's own handler
    with caplog.at_level("INFO", logger="shoal"):
        log_visible_maddrs([FULL], only_p2p=True)
    assert caplog.messages[0].endswith(f"--initial_peers /p2p/{TARGET}")
