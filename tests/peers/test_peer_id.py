"""Peer ids: the vectors of libp2p, equality with their other forms, order, and splitting of addresses."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p import Identity, Multiaddr, PeerID, PeerInfo
from shoal.peers.identity import MAX_INTERNED, split_peer_address

# The Ed25519 test vectors of https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
PRIVATE_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
PUBLIC_KEY = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
EXAMPLE = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


def test_libp2p_private_key_vector() -> None:
    identity = Identity.from_bytes(PRIVATE_KEY)
    assert identity.public_key == PUBLIC_KEY[4:]
    assert identity.to_bytes() == PRIVATE_KEY
    assert PeerID.from_identity(PRIVATE_KEY) == identity.peer_id


def test_id_is_the_identity_multihash_of_the_public_key() -> None:
    peer_id = PeerID.from_public_key(PUBLIC_KEY[4:])
    assert peer_id.to_bytes() == b"\x00\x24" + PUBLIC_KEY
    assert str(peer_id).startswith("12D3KooW")
    assert peer_id.public_key == PUBLIC_KEY[4:]


def test_libp2p_text_example() -> None:
    peer_id = PeerID.from_base58(EXAMPLE)
    assert len(peer_id.to_bytes()) == 38
    assert peer_id.public_key is not None
    assert PeerID.from_public_key(peer_id.public_key) == peer_id


def test_an_rsa_id_holds_no_key() -> None:
    assert PeerID.from_base58("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N").public_key is None


@given(st.binary(max_size=60))
def test_text_round_trip(raw: bytes) -> None:
    peer_id = PeerID(raw)
    assert PeerID.from_base58(peer_id.to_base58()) == peer_id
    assert str(peer_id) == peer_id.pretty() == peer_id.to_string() == peer_id.to_base58()
    assert bytes(peer_id) == peer_id.to_bytes() == raw
    assert pickle.loads(pickle.dumps(peer_id)) == peer_id


def test_equality_with_other_forms() -> None:
    peer_id = PeerID.from_base58(EXAMPLE)
    assert peer_id == PeerID(peer_id.to_bytes())
    assert hash(peer_id) == hash(PeerID(peer_id.to_bytes()))
    assert peer_id == EXAMPLE
    assert peer_id == peer_id.to_bytes()
    assert peer_id != "another"
    assert peer_id != b"another"
    assert peer_id != 5
    assert repr(peer_id) == f"<PeerID {EXAMPLE}>"


@given(st.lists(st.binary(min_size=1, max_size=40).map(PeerID), max_size=10))
def test_order_is_that_of_the_text(peer_ids: list[PeerID]) -> None:
    assert sorted(peer_ids) == sorted(peer_ids, key=str)


@pytest.mark.parametrize("other", [EXAMPLE, b"", 5, None])
def test_order_with_foreign_types(other: object) -> None:
    peer_id = PeerID.from_base58(EXAMPLE)
    with pytest.raises(TypeError, match="PeerID"):
        peer_id < other  # noqa: B015
    with pytest.raises(TypeError, match="PeerID"):
        peer_id >= other  # noqa: B015


@pytest.mark.parametrize("text", ["0OIl", "12D3KooW!", "é", "1" * 10_000])
def test_malformed_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a peer id"):
        PeerID.from_base58(text)


@pytest.mark.parametrize("value", [EXAMPLE, 5, None])
def test_foreign_types(value: object) -> None:
    with pytest.raises(TypeError, match="PeerID is made from bytes"):
        PeerID(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 31, 33])
def test_public_key_of_wrong_size(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        PeerID.from_public_key(bytes(size))


def test_peer_info_equality_is_by_both_parts() -> None:
    peer_id, address = PeerID.from_base58(EXAMPLE), Multiaddr("/ip4/1.2.3.4/tcp/1")
    info = PeerInfo(peer_id, [address])
    assert info == PeerInfo(PeerID.from_base58(EXAMPLE), (Multiaddr("/ip4/1.2.3.4/tcp/1"),))
    assert hash(info) == hash(PeerInfo(peer_id, [address]))
    assert info != PeerInfo(peer_id, [])
    assert info != PeerInfo(PeerID(b"other"), [address])
    assert info != EXAMPLE


def test_split_peer_address() -> None:
    where, who = split_peer_address(Multiaddr(f"/ip4/1.2.3.4/tcp/1/p2p/{EXAMPLE}"))
    assert str(where) == "/ip4/1.2.3.4/tcp/1"
    assert who == EXAMPLE


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/1.2.3.4/tcp/1",
        f"/p2p/{EXAMPLE}",
        f"/p2p/{EXAMPLE}/tcp/1",
        "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_address_without_a_usable_peer(address: str) -> None:
    with pytest.raises(ValueError, match=address):
        split_peer_address(Multiaddr(address))


def test_a_long_one_is_refused_at_once_and_its_error_is_short() -> None:
    PeerID(bytes(64))
    with pytest.raises(ValueError, match="at most 64 bytes, got 900000"):
        PeerID(bytes(900_000))
    with pytest.raises(ValueError, match=r"is not a peer id|at most 64 bytes") as caught:
        PeerID.from_base58("1" * 900_000)
    assert len(str(caught.value)) < 400


def test_ids_of_one_peer_are_one_object_as_long_as_there_is_room() -> None:
    first = PeerID(b"first peer")
    assert PeerID(bytearray(b"first peer")) == first
    assert PeerID(b"first peer") is first is pickle.loads(pickle.dumps(first)) is copy.deepcopy(first)
    for number in range(MAX_INTERNED):
        assert PeerID(b"%d" % number) != first
    again = PeerID(b"first peer")
    assert again is not first, "others have taken the room"
    assert again == first
    assert hash(again) == hash(first)
    assert {first: 1}[again] == 1
