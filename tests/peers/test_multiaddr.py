"""Addresses: known vectors, round trips between text, bytes and parts, and refusal of everything else."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p import Identity, Multiaddr
from shoal.peers.multiaddr import ProtocolLookupError

pytestmark = pytest.mark.once

PEER = str(Identity.generate().peer_id)

host_labels = st.text("abcdefghijklmnopqrstuvwxyz0123456789é", min_size=1, max_size=12)
host_names = st.lists(host_labels, min_size=1, max_size=4).map(".".join)
ports = st.integers(0, 65535).map(str)
parts = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).map(lambda ip: f"/ip6/{ip}"),
    st.builds("/{}/{}".format, st.sampled_from(["tcp", "udp"]), ports),
    st.builds("/{}/{}".format, st.sampled_from(["dns", "dns4", "dns6"]), host_names),
    st.integers(0, 2**64 - 1).map(lambda number: f"/memory/{number}"),
    st.just(f"/p2p/{PEER}"),
    st.sampled_from(["/p2p-circuit", "/tls", "/quic", "/quic-v1", "/ws", "/wss"]),
)
addresses = st.lists(parts, min_size=1, max_size=6).map("".join).map(Multiaddr)
words = ["/", "", "ip4", "tcp", "dns", "p2p", "memory", "1", "-1", "1.2.3.4", "%"]
nearly_addresses = st.lists(st.sampled_from(words)).map("/".join)
shuffled_bytes = addresses.flatmap(lambda address: st.permutations(list(address.to_bytes()))).map(bytes)


@pytest.mark.parametrize(
    ("text", "binary"),
    [
        ("/ip4/127.0.0.1/udp/1234", "047f000001910204d2"),
        ("/ip4/127.0.0.1/tcp/4321", "047f0000010610e1"),
        ("/ip6/2001:8a0:7ac5:4201:3ac9:86ff:fe31:7095/tcp/8000", "29200108a07ac542013ac986fffe317095061f40"),
        ("/dns4/example.com/tcp/443/wss", "360b6578616d706c652e636f6d0601bbde03"),
        ("/ip4/1.2.3.4/tcp/80/p2p-circuit", "0401020304060050a202"),
    ],
)
def test_known_vectors(text: str, binary: str) -> None:
    """The same bytes as every other implementation of the format."""
    assert Multiaddr(text).to_bytes().hex() == binary
    assert str(Multiaddr(bytes.fromhex(binary))) == text


@given(addresses)
def test_round_trips(address: Multiaddr) -> None:
    assert Multiaddr(str(address)) == address
    assert Multiaddr(address.to_bytes()) == address
    assert Multiaddr(address) == address
    assert hash(Multiaddr(str(address))) == hash(address)
    assert pickle.loads(pickle.dumps(address)) == address
    assert copy.deepcopy(address) == address
    assert Multiaddr.join(*address.split()) == address
    assert list(zip(address.protocols(), address.values(), strict=True)) == address.items()
    assert address.keys() == list(address) == address.protocols()


@given(addresses, addresses)
def test_encapsulate_and_decapsulate(address: Multiaddr, other: Multiaddr) -> None:
    both = address.encapsulate(other)
    assert str(both) == str(address) + str(other)
    assert both.decapsulate(other) == address


@given(addresses, st.integers(0, 8))
def test_split_keeps_everything(address: Multiaddr, maxsplit: int) -> None:
    pieces = address.split(maxsplit)
    assert Multiaddr.join(*pieces) == address
    assert len(pieces) <= maxsplit + 1


@given(st.text(max_size=60) | nearly_addresses)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = Multiaddr(text)
    except ValueError as e:
        assert repr(text) in str(e)  # noqa: PT017
    else:
        assert Multiaddr(str(address)) == address
        if all(protocol.code is not None for protocol in address.protocols()):
            assert Multiaddr(address.to_bytes()) == address


@given(st.binary(max_size=60) | shuffled_bytes)
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    try:
        address = Multiaddr(raw)
    except ValueError:
        return
    assert Multiaddr(str(address)) == address
    assert Multiaddr(address.to_bytes()) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:1337",
        "ip4/127.0.0.1",
        "/ip4",
        "/ip4/",
        "/ip4/1.2.3",
        "/ip4/::1",
        "/ip6/1.2.3.4",
        "/tcp/65536",
        "/tcp/-1",
        "/tcp/+1",
        "/tcp/１２",
        "/tcp/0x10",
        "/udp/1_000",
        "/memory/-1",
        f"/memory/{2**64}",
        "/p2p/0OIl",
        "/dns4/",
        "/dns4/a b",
        "/dns4/a\x00b",
        "/dns4/" + "a" * 64,
        "/dns4/a..b",
        "/dns4/-a.b",
        "/dns4/" + "a." * 130,
        "/p2p/1",
        "/p2p/" + "2" * 300,
        "//ip4/1.2.3.4",
        "/carrier pigeon/1",
        "/9p/1",
        "/carrier-pigeon/\x00",
        "/ip4/1.2.3.4" * 200,
    ],
)
def test_malformed_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a multiaddr such as"):
        Multiaddr(text)


@pytest.mark.parametrize(
    "binary",
    [
        "04",
        "047f0000",
        "ff",
        "ffffffffffff",
        "00",
        "3600",
        "36",
        "36036162",
        "3603612f62",  # a host name with a slash, which would become another protocol in the text
        "36ffffffff0f61",
        "3602ff61",
        "a50300",
    ],
)
def test_malformed_bytes(binary: str) -> None:
    with pytest.raises(ValueError, match="is not a multiaddr"):
        Multiaddr(bytes.fromhex(binary))


@pytest.mark.parametrize("value", [None, 1, ["/ip4/1.2.3.4"], 1.5])
def test_foreign_types(value: object) -> None:
    with pytest.raises(TypeError, match="str, bytes or Multiaddr"):
        Multiaddr(value)  # type: ignore[arg-type]


def test_looking_up_protocols() -> None:
    address = Multiaddr(f"/ip4/1.2.3.4/tcp/80/ws/p2p/{PEER}")
    assert address["ip4"] == "1.2.3.4"
    assert address["ws"] is None
    assert address["p2p"] == PEER
    assert "tcp" in address
    assert "udp" not in address
    assert address.get("udp") is None
    assert len(address) == 4
    with pytest.raises(ProtocolLookupError, match="udp"):
        address["udp"]
    with pytest.raises(LookupError):
        address["udp"]


def test_protocols_have_names_and_codes() -> None:
    address = Multiaddr(f"/ip4/1.2.3.4/tcp/80/ws/p2p/{PEER}")
    assert address.protocols() == ["ip4", "tcp", "ws", "p2p"]
    assert [(protocol.name, protocol.code) for protocol in address] == [
        ("ip4", 4),
        ("tcp", 6),
        ("ws", 477),
        ("p2p", 421),
    ]
    assert {protocol.name: value for protocol, value in address.items()} == dict(address.items())
    assert address.value_for_protocol("tcp") == address.value_for_protocol(6) == "80"
    assert address[address.protocols()[1]] == "80"
    assert 421 in address
    assert 273 not in address
    for missing in ("udp", 273):
        with pytest.raises(ProtocolLookupError, match=str(missing)):
            address.value_for_protocol(missing)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("/carrier-pigeon/1", [("carrier-pigeon", "1")]),
        ("/ip4/1.2.3.4/carrier-pigeon/tcp/1", [("ip4", "1.2.3.4"), ("carrier-pigeon", None), ("tcp", "1")]),
        ("/ip4/1.2.3.4/tcp/1/pigeon", [("ip4", "1.2.3.4"), ("tcp", "1"), ("pigeon", None)]),
        (
            f"/udp/4001/quic-v1/webtransport/certhash/uEiD-x_y/p2p/{PEER}",
            [("udp", "4001"), ("quic-v1", None), ("webtransport", None), ("certhash", "uEiD-x_y"), ("p2p", PEER)],
        ),
    ],
)
def test_unknown_protocols_are_carried(text: str, items: list[tuple[str, str | None]]) -> None:
    address = Multiaddr(text)
    assert str(address) == text
    assert address.items() == items
    assert address == pickle.loads(pickle.dumps(address)) == Multiaddr.join(*address.split())
    assert address.encapsulate("/tcp/2").decapsulate("/tcp/2") == address
    with pytest.raises(ValueError, match="has no binary form"):
        address.to_bytes()


def test_the_first_of_two_equal_protocols_counts() -> None:
    assert Multiaddr("/ip4/1.2.3.4/tcp/1/ip4/5.6.7.8/tcp/2")["ip4"] == "1.2.3.4"


def test_decapsulate_cuts_at_the_last_occurrence() -> None:
    address = Multiaddr("/ip4/1.2.3.4/tcp/1/tcp/1/udp/2")
    assert str(address.decapsulate("/tcp/1")) == "/ip4/1.2.3.4/tcp/1"


def test_decapsulate_leaves_an_address_alone_that_does_not_end_so() -> None:
    address = Multiaddr("/ip4/1.2.3.4/tcp/1")
    assert address.decapsulate("/tcp/2") == address
    assert address.decapsulate(f"/p2p/{PEER}") == address


def test_old_name_of_the_peer_part() -> None:
    assert str(Multiaddr(f"/ip4/1.2.3.4/tcp/80/ipfs/{PEER}")) == f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}"


def test_the_address_of_nothing() -> None:
    nothing = Multiaddr("/")
    assert str(nothing) == "/"
    assert nothing == Multiaddr(b"") == Multiaddr("/tcp/1").decapsulate("/tcp/1")
    assert nothing.protocols() == []


def test_immutable() -> None:
    address = Multiaddr("/ip4/1.2.3.4")
    with pytest.raises(AttributeError):
        address.port = 1  # type: ignore[attr-defined]
    assert address != "/ip4/1.2.3.4"
    assert len({address, Multiaddr("/ip4/1.2.3.4/")}) == 1
