"""What a peer concludes from evidence about being callable: a table of cases, with made-up times."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.net.addresses import is_global, network_of
from shoal.p2p import Multiaddr
from shoal.reach.reachability import AddressStatus, Evidence, Reachability

PUBLIC, RELAYED, CLIENT, UNKNOWN = (
    Reachability.PUBLIC,
    Reachability.RELAYED,
    Reachability.CLIENT,
    Reachability.UNKNOWN,
)
HOME = Multiaddr("/ip4/192.168.1.7/tcp/5")
LOOPBACK = Multiaddr("/ip4/127.0.0.1/tcp/5")
WORLD = Multiaddr("/ip4/8.8.8.8/tcp/5")
WORLD_6 = Multiaddr("/ip6/2606:4700::7/tcp/5")
ROUTER = Multiaddr("/ip4/9.9.9.9/tcp/5")
MAPPED = Multiaddr("/ip4/9.9.9.9/tcp/4000")
CIRCUITS = [Multiaddr(f"/ip4/5.5.5.{number}/tcp/1") for number in range(2)]
"""Any address will do."""
MINUTE = 60.0


def evidence(*own: Multiaddr, witnesses: int = 2, **options: Any) -> Evidence:
    made = Evidence(**options)
    made.own, made.witnesses = list(own or (HOME, LOOPBACK)), witnesses
    return made


def outside(*own: Multiaddr, **options: Any) -> Evidence:
    """Evidence of a peer that has had a connection with somebody outside at time 0."""
    made = evidence(*own, **options)
    made.note_outside(0.0)
    return made


def refute(found: Evidence, now: float, address: Multiaddr, *witnesses: str) -> None:
    for witness in witnesses:
        found.note_verdict(now, witness, address, reached=False)


# --- one address ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("witnesses", "verdicts", "now", "expected"),
    [
        (2, [], 0, AddressStatus.UNKNOWN),
        (2, [(0, "a", True)], 1, AddressStatus.CONFIRMED),
        (2, [(0, "a", False)], 1, AddressStatus.UNKNOWN),
        (1, [(0, "a", False)], 1, AddressStatus.REFUTED),
        (2, [(0, "a", False), (1, "a", False)], 2, AddressStatus.UNKNOWN),
        (2, [(0, "a", False), (1, "b", False)], 2, AddressStatus.REFUTED),
        (9, [(0, "a", False), (1, "b", False)], 2, AddressStatus.REFUTED),
        (2, [(0, "a", True), (1, "b", False), (2, "c", False)], 9 * MINUTE, AddressStatus.CONFIRMED),
        (2, [(0, "a", True), (1, "b", False), (2, "c", False)], 11 * MINUTE, AddressStatus.REFUTED),
        (2, [(1, "b", False), (2, "c", False), (3, "a", True)], 11 * MINUTE, AddressStatus.CONFIRMED),
        (2, [(0, "a", True), (1, "a", False)], 2, AddressStatus.UNKNOWN),
        (2, [(0, "a", True)], 44 * MINUTE, AddressStatus.CONFIRMED),
        (2, [(0, "a", True)], 46 * MINUTE, AddressStatus.UNKNOWN),
        (2, [(0, "a", False), (0, "b", False)], 46 * MINUTE, AddressStatus.UNKNOWN),
    ],
)
def test_verdicts_of_witnesses(
    witnesses: int, verdicts: list[tuple[float, str, bool]], now: float, expected: AddressStatus
) -> None:
    found = outside(WORLD, witnesses=witnesses)
    for at, witness, reached in verdicts:
        found.note_verdict(at, witness, WORLD, reached=reached)
    assert found.standing(now, WORLD) is expected


def test_an_accepted_connection_weighs_more_than_witnesses() -> None:
    found = outside(WORLD)
    assert found.note_accepted(0.0, WORLD, is_outside=True)
    refute(found, 1.0, WORLD, "a", "b")
    assert found.standing(29 * MINUTE, WORLD) is AddressStatus.CONFIRMED
    assert found.standing(31 * MINUTE, WORLD) is AddressStatus.REFUTED


def test_an_accepted_connection_confirms_the_address_in_front_of_the_router() -> None:
    found = outside()
    found.offers["seen"] = ROUTER
    assert found.note_accepted(0.0, HOME, is_outside=True)
    assert found.confirmed(1.0) == [ROUTER]
    found.offers["mapping"] = MAPPED
    assert not found.note_accepted(2.0, HOME, is_outside=True), "it may have come by either"
    assert found.confirmed(3.0) == [ROUTER]
    assert found.note_accepted(2.0, WORLD_6, is_outside=True), "it can have come by neither"


def test_a_connection_from_inside_says_nothing_of_the_outside() -> None:
    found = outside(WORLD)
    assert found.note_accepted(0.0, WORLD, is_outside=False)
    assert found.standing(0.0, WORLD) is AddressStatus.UNKNOWN


def test_what_is_no_longer_an_address_is_forgotten() -> None:
    found = outside(WORLD)
    found.note_accepted(0.0, WORLD, is_outside=True)
    found.own = [WORLD_6]
    found.note_accepted(1.0, WORLD_6, is_outside=True)
    assert found.confirmed(2.0) == [WORLD_6]
    assert found.standing(2.0, WORLD) is AddressStatus.UNKNOWN


# --- this peer --------------------------------------------------------------------------------------------------------


def test_a_swarm_without_an_outside_is_public_to_itself() -> None:
    found = evidence(WORLD, HOME, LOOPBACK)
    assert found.conclude(0.0, is_reserved=False) is PUBLIC
    assert found.announced(0.0, CIRCUITS, 8) == [WORLD, HOME, LOOPBACK], "as they are"


def test_before_the_first_verdict_nothing_is_known() -> None:
    found = outside(WORLD, HOME)
    assert found.conclude(1.0, is_reserved=False) is UNKNOWN
    assert found.announced(1.0, [], 8) == [WORLD, HOME], "witnesses must know what to dial"
    found.note_judged()
    assert found.conclude(2.0, is_reserved=False) is CLIENT
    assert found.announced(2.0, [], 8) == [HOME]


def test_a_private_peer_is_called_through_relays() -> None:
    found = outside()
    found.note_judged()
    assert found.conclude(1.0, is_reserved=True) is RELAYED
    assert found.announced(1.0, CIRCUITS, 8) == [HOME, LOOPBACK, *CIRCUITS]
    assert found.announced(1.0, CIRCUITS, 3) == [HOME, *CIRCUITS], "there is always room for circuits"
    found.note_outside(50.0)
    assert found.conclude(60.0, is_reserved=False) is RELAYED, "it has had no time to find another relay"
    assert found.conclude(62.0, is_reserved=False) is CLIENT


def test_a_confirmed_peer_is_public_for_a_minute_at_least() -> None:
    found = outside(WORLD, HOME)
    found.note_judged()
    found.note_verdict(10.0, "a", WORLD, reached=True)
    assert found.conclude(10.0, is_reserved=True) is PUBLIC
    assert found.announced(10.0, CIRCUITS, 8) == [WORLD, HOME]
    refute(found, 11.0, WORLD, "a", "b")
    assert found.conclude(69.0, is_reserved=True) is PUBLIC
    found.note_outside(69.0)
    assert found.announced(69.0, CIRCUITS, 8) == [HOME], "nobody is sent where nobody gets in"
    assert found.conclude(71.0, is_reserved=True) is RELAYED


def test_when_everybody_outside_is_gone_the_own_network_trains_on() -> None:
    found = outside()
    found.note_judged()
    assert found.conclude(1.0, is_reserved=True) is RELAYED
    states = [found.conclude(float(now), is_reserved=False) for now in range(2, 300)]
    assert CLIENT not in states
    assert states[-1] is PUBLIC
    found.note_outside(300.0)
    assert found.conclude(300.0, is_reserved=False) is CLIENT


def test_a_peer_that_its_own_network_cannot_dial_is_not_public() -> None:
    found = evidence()
    found.note_inside(0.0, reached=False)
    assert found.conclude(0.0, is_reserved=False) is CLIENT
    assert found.conclude(1.0, is_reserved=True) is RELAYED
    found.note_inside(100.0, reached=True)
    assert found.conclude(100.0, is_reserved=False) is PUBLIC
    found.note_inside(101.0, reached=False)
    assert found.conclude(101.0, is_reserved=False) is PUBLIC, "somebody has reached it a moment ago"


@pytest.mark.parametrize(
    ("forced", "is_reserved", "expected"),
    [(True, False, PUBLIC), (True, True, PUBLIC), (False, True, RELAYED), (False, False, CLIENT)],
)
def test_what_the_user_says_is_not_doubted(forced: bool, is_reserved: bool, expected: Reachability) -> None:
    found = outside(WORLD, HOME, forced=forced)
    found.offers["mapping"] = MAPPED
    found.note_verdict(0.0, "a", WORLD, reached=not forced)
    refute(found, 0.0, WORLD, *("b", "c") if forced else ())
    found.note_judged()
    assert found.conclude(1.0, is_reserved=is_reserved) is expected
    assert (MAPPED in found.announced(1.0, [], 8)) is forced


def test_announced_addresses_count_as_confirmed_until_others_refute_them() -> None:
    found = outside(HOME, announced=[MAPPED])
    assert found.conclude(0.0, is_reserved=False) is PUBLIC
    assert found.to_check() == [MAPPED]
    refute(found, 1.0, MAPPED, "a", "b")
    assert found.conclude(2.0, is_reserved=True) is RELAYED
    assert found.announced(2.0, CIRCUITS, 8) == [MAPPED, *CIRCUITS], "the user wants it to be told"


def test_announced_addresses_of_the_own_network_are_refuted_from_there() -> None:
    for announced, expected in ((MAPPED, PUBLIC), (HOME, RELAYED)):
        found = evidence(HOME, announced=[announced])
        found.note_inside(1.0, reached=False)
        assert found.conclude(2.0, is_reserved=True) is expected, "routers need not let their own network in"


def test_global_addresses_come_first_and_ipv6_before_ipv4() -> None:
    found = outside(HOME, WORLD, WORLD_6, LOOPBACK)
    found.offers["mapping"] = MAPPED
    for address in (WORLD, WORLD_6, MAPPED):
        found.note_verdict(0.0, "a", address, reached=True)
    found.conclude(0.0, is_reserved=False)
    assert found.announced(0.0, [], 8) == [WORLD_6, WORLD, MAPPED, HOME, LOOPBACK]
    assert found.to_check() == [WORLD, WORLD_6, MAPPED]


def test_no_more_witnesses_are_remembered_than_needed() -> None:
    found = outside(WORLD)
    for number in range(100):
        found.note_verdict(float(number), f"host {number}", WORLD, reached=number == 0)
    assert found.standing(100.0, WORLD) is AddressStatus.REFUTED, "the success is forgotten"


def test_kinds_of_addresses() -> None:
    assert [is_global(address) for address in (WORLD, WORLD_6, HOME, LOOPBACK)] == [True, True, False, False]
    assert is_global(Multiaddr("/dns4/example.org/tcp/5"))
    assert not is_global(Multiaddr("/memory/1"))
    assert network_of(WORLD) == "8.8.8.0/24"
    assert network_of(WORLD_6) == "2606:4700::/48"
    assert network_of(Multiaddr("/memory/1")) == ""
