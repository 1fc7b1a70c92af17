"""Addresses as people paste them: short ones, several in one text, quotes and line ends around them."""

from __future__ import annotations

import random

import pytest

from shoal.net.own_addresses import checked_announcement
from shoal.net.pasted import describe_target, read_address, read_addresses, read_targets, short_form, wants_local
from shoal.p2p import Identity, Multiaddr

PEER = Identity.generate(random.Random(1)).peer_id  # a fixed one: it is part of the names of tests
FULL = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
PLACE = Multiaddr("/ip4/203.0.113.7/tcp/31337")


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("203.0.113.7:31337", "/ip4/203.0.113.7/tcp/31337"),
        ("[2001:db8::7]:31337", "/ip6/2001:db8::7/tcp/31337"),
        ("example.org:31337", "/dns/example.org/tcp/31337"),
        ("localhost:1", "/dns/localhost/tcp/1"),
    ],
)
def test_a_short_address_and_its_full_form(short: str, full: str) -> None:
    assert read_address(short) == Multiaddr(full)
    assert read_targets(short) == [(Multiaddr(full), None)]
    assert short_form(Multiaddr(full)) == short
    assert short_form(Multiaddr(f"{full}/p2p/{PEER}")) == short
    assert describe_target((Multiaddr(full), None)) == short
    assert describe_target((Multiaddr(full), PEER)) == f"{full}/p2p/{PEER}"


@pytest.mark.parametrize(
    "given",
    [
        f"{FULL} 203.0.113.8:1",
        f"{FULL},203.0.113.8:1\n",
        f" '{FULL}' ,\t\"203.0.113.8:1\", ",
        f"['{FULL}', '203.0.113.8:1']",
        f"“{FULL}”\r\n203.0.113.8:1",
        [FULL, "203.0.113.8:1\n"],
        (Multiaddr(FULL), "`203.0.113.8:1`"),
        [f"{FULL} 203.0.113.8:1"],
    ],
)
def test_several_addresses_in_one_text(given: object) -> None:
    assert read_targets(given) == [(PLACE, PEER), (Multiaddr("/ip4/203.0.113.8/tcp/1"), None)]


def test_local_stands_beside_addresses() -> None:
    assert wants_local("local")
    assert wants_local(["'local'", FULL])
    assert read_targets(["local", FULL], may_be_local=True) == [(PLACE, PEER)]
    with pytest.raises(ValueError, match="trusted_relays takes addresses of certain peers, and 'local'"):
        read_targets(["local", FULL], "trusted_relays")
    assert not wants_local([FULL, "local:31337"])
    assert read_targets("local:31337") == [(Multiaddr("/dns/local/tcp/31337"), None)], "a host may have this name"


DAMAGED = "the peer id is damaged: a character is missing or wrong. Copy the whole address"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("203.0.113.7", r"'203.0.113.7' is no address .* its port is missing. Write 203.0.113.7:PORT; .* port 31337"),
        ("2001:db8::7", r"its port is missing. Write \[2001:db8::7\]:PORT|in brackets"),
        ("2001:db8::7:31337", r"put an IPv6 address in brackets before its port, such as \[2001:db8::7\]:31337"),
        ("203.0.113.7:70000", "a port is a number up to 65535"),
        ("203.0.113:31337", "'203.0.113:31337' is no address of a peer"),
        ("tcp://203.0.113.7:31337", "leave out tcp://, and give HOST:PORT"),
        ("bad_host!:31337", "takes a host name, got 'bad_host!'"),
        ("[example.org]:31337", "is no address of a peer"),
        ("laptop", "give HOST:PORT, such as 203.0.113.7:31337, or all of /ip4/"),
        ("", "it is empty"),
        (" , ", "it is empty"),
        ("x" * 5000 + ":1", r"x{99}'\.\.\. \(5002 long\) is no address"),
        (str(PLACE), "must end with /p2p/<peer id>; or write 203.0.113.7:31337, which stands for any peer"),
        (f"{PLACE}/p2p/{PEER}/p2p-circuit", "must end with /p2p/<peer id>$"),
        (f"{PLACE}/p2p/{str(PEER)[:-1]}", f"{str(PEER)[:-1]}: {DAMAGED}"),
        (f"{PLACE}/p2p/{str(PEER)[1:]}", DAMAGED),
        (f"{PLACE}/p2p/{str(PEER)[:-1]}l", f"{DAMAGED}"),
        (f"{PLACE}/p2p/{str(PEER)[:20]}{str(PEER)[21:]}/p2p-circuit/p2p/{PEER}", DAMAGED),
        (f"{PLACE}/p2p/QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKPbdG", "is not made from an Ed25519 key"),
    ],
)
def test_what_is_no_address_is_named_with_the_way_to_write_it(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_targets([text])


@pytest.mark.parametrize("given", [5, b"203.0.113.7:1", [5], [None]])
def test_what_is_no_text(given: object) -> None:
    with pytest.raises(TypeError, match="initial_peers must"):
        read_targets(given)


def test_addresses_to_listen_at_and_to_announce_need_no_peer() -> None:
    assert read_addresses("0.0.0.0:0 [::]:0", "host_maddrs") == [
        Multiaddr("/ip4/0.0.0.0/tcp/0"),
        Multiaddr("/ip6/::/tcp/0"),
    ]
    assert read_addresses([PLACE, "example.org:5"], "announce_maddrs") == [PLACE, Multiaddr("/dns/example.org/tcp/5")]
    with pytest.raises(ValueError, match="others need a real port, not 0"):
        checked_announcement(read_address("203.0.113.7:0"))
    with pytest.raises(TypeError, match="host_maddrs must be a list of addresses"):
        read_addresses(5, "host_maddrs")


def test_an_address_through_a_relay_has_no_short_form() -> None:
    assert short_form(Multiaddr(f"{FULL}/p2p-circuit/p2p/{Identity.generate().peer_id}")) is None
    assert short_form(Multiaddr("/memory/5")) is None
